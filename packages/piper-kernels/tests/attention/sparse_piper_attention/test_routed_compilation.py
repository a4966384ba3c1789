"""The routed kernels compile to the machine code of Hopper, without a GPU."""

import re
import subprocess
from pathlib import Path

import pytest

triton = pytest.importorskip("triton", reason="Triton is not installed")
routed_launch = pytest.importorskip("piper_kernels.attention._sm90_kernels.routed_launch")

POINTERS = {
    "q_scale": "*fp32",
    "k_scale": "*fp32",
    "v_multiplier": "*fp32",
    "v_sum": "*i32",
    "v_mean": "*fp32",
    "lengths": "*i32",
    "coarse": "*fp32",
    "gate": "*bf16",
    "out": "*bf16",
    "routes": "*u16",
    "table": "*i32",
}
SPILLED_BYTES = 64


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))


def hopper():
    return triton.backends.compiler.GPUTarget("cuda", 90, 32)


def descriptor(block, layout=None):
    from triton.experimental.gluon import language as gl

    layout = layout or gl.NVMMASharedLayout.get_default_for(block, gl.int8)
    return f"tensordesc<i8{block},{layout!r}>"


def stack_bytes(compiled, folder):
    binary = Path(folder, "kernel.cubin")
    binary.write_bytes(compiled.asm["cubin"])
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    if not tool.exists():
        pytest.skip(f"this Triton has no {tool.name}")
    usage = subprocess.run([tool, "-res-usage", binary], capture_output=True, text=True, check=True)
    return int(re.search(r"STACK:(\d+)", usage.stdout)[1])


@pytest.mark.parametrize("head_dim", [64, 128], ids=["D64", "D128"])
@pytest.mark.parametrize(("lengths", "coarse"), [(False, False), (True, True)])
def test_routed_attention(head_dim, lengths, coarse, tmp_path):
    from triton.experimental.gluon._runtime import GluonASTSource

    from piper_kernels.attention._sm90_kernels.routed import routed_attention_kernel as kernel

    names = list(kernel.arg_names)
    constants = {
        "HAS_LENGTHS": lengths, "HAS_COARSE": coarse, "STAGES": routed_launch.STAGES[head_dim],
        "STORE": routed_launch.store_layout(head_dim),
        "COPY_REGISTERS": routed_launch.COPY_REGISTERS,
    }  # fmt: skip
    types = POINTERS | {
        "q_desc": descriptor([64, head_dim]),
        "k_desc": descriptor([4, 2, 4, 2, head_dim], routed_launch.permuted_layout(head_dim)),
        "v_desc": descriptor([head_dim, 64]),
    }
    source = GluonASTSource(
        fn=kernel,
        signature={n: "constexpr" if n in constants else types.get(n, "i32") for n in names},
        constexprs={(names.index(name),): value for name, value in constants.items()},
        attrs={(names.index(name),): [["tt.divisibility", 16]] for name in POINTERS},
    )
    options = {"num_warps": routed_launch.WARPS, "maxnreg": routed_launch.MAX_REGISTERS}
    compiled = triton.compile(source, target=hopper(), options=options)
    text = compiled.asm["ptx"]
    assert "wgmma.mma_async.sync.aligned.m64n64k32.s32.s8.s8" in text
    assert f"wgmma.mma_async.sync.aligned.m64n{head_dim}k32.s32.s8.s8" in text
    assert "setmaxnreg.inc" in text
    assert "cp.async.bulk.tensor.5d" in text
    # Two programs share a multiprocessor, one kibibyte is reserved for each.
    assert 2 * (compiled.metadata.shared + 1024) <= 228 * 1024
    assert stack_bytes(compiled, tmp_path) <= SPILLED_BYTES


def test_tile_sums():
    from triton.compiler import ASTSource

    from piper_kernels.attention._sm90_kernels.sum_kernels import tile_sum_kernel

    signature = {"codes": "*i8", "sums": "*i32", "tiles": "i32", "D": "constexpr"}
    source = ASTSource(tile_sum_kernel, signature, {"D": 128})
    assert triton.compile(source, target=hopper()).asm["cubin"]
