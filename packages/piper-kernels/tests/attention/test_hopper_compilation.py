"""The dense attention kernel for Hopper compiles without a GPU and hardly spills."""

import re
import subprocess
from tempfile import NamedTemporaryFile

import pytest

pytest.importorskip("triton", reason="Triton is not installed")
pytest.importorskip("triton.experimental.gluon", reason="this Triton has no Gluon")

import triton
from triton.backends.compiler import GPUTarget
from triton.experimental.gluon import language as gl
from triton.experimental.gluon._runtime import GluonASTSource

from piper_kernels.attention._sm90_kernels import launch
from piper_kernels.attention._sm90_kernels.dense import dense_attention_kernel as kernel

POINTERS = {"q_scale": "*fp32", "k_scale": "*fp32", "v_log_max": "*fp32", "v_vector": "*fp32"}
MAX_STACK = 128  # bytes of a thread; a few row numbers, outside of the loop or rarely read


def descriptor(element, *block):
    layout = gl.NVMMASharedLayout.get_default_for(
        list(block), gl.int8 if "8" in element else gl.int32
    )
    return f"tensordesc<{element}[{', '.join(map(str, block))}],{layout!r}>"


def build(head_dim, causal, fp8):
    constants = {
        "CAUSAL": causal,
        "FP8": fp8,
        "PER_KEY": causal and not fp8,
        "HAS_MEAN": not causal and not fp8,
        "STAGES": launch.STAGES[head_dim],
        "COPY_REGISTERS": launch.COPY_REGISTERS,
        "ATTEND_REGISTERS": launch.ATTEND_REGISTERS,
    }
    types = POINTERS | {
        "out": "*bf16",
        "q_desc": descriptor("i8", launch.TILE, head_dim),
        "k_desc": descriptor("i8", launch.PAIR, head_dim),
        "v_desc": descriptor("fp8e4nv" if fp8 else "i8", head_dim, launch.TILE),
        "m_desc": descriptor("fp32", launch.PAIR),
        "s_desc": descriptor("i32", head_dim),
    }
    names = kernel.arg_names
    signature = {n: "constexpr" if n in constants else types.get(n, "i32") for n in names}
    aligned = {
        (index,): [["tt.divisibility", 16]]
        for index, name in enumerate(names)
        if signature[name].startswith("*") or name.startswith("stored")
    }
    places = {(names.index(name),): value for name, value in constants.items()}
    source = GluonASTSource(fn=kernel, signature=signature, constexprs=places, attrs=aligned)
    target = GPUTarget("cuda", 90, 32)
    return triton.compile(source, target=target, options={"num_warps": launch.WARPS})


def stack(binary):
    with NamedTemporaryFile(suffix=".cubin") as file:
        file.write(binary)
        file.flush()
        command = [triton.knobs.nvidia.cuobjdump.path, "--dump-resource-usage", file.name]
        text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return int(re.search(r"STACK:(\d+)", text)[1])


@pytest.mark.parametrize("head_dim", [64, 128], ids=["D64", "D128"])
@pytest.mark.parametrize(
    ("causal", "fp8"), [(False, False), (True, False), (True, True)], ids=["full", "causal", "fp8"]
)
def test_compiles_for_hopper(head_dim, causal, fp8, tmp_path, monkeypatch):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    compiled = build(head_dim, causal, fp8)
    assert compiled.metadata.shared < 227 * 1024
    text = compiled.asm["ptx"]
    assert "wgmma.mma_async.sync.aligned.m64n128k32.s32.s8.s8" in text
    values = "f32.e4m3.e4m3" if fp8 else "s32.s8.s8"
    assert f"wgmma.mma_async.sync.aligned.m64n{head_dim}k32.{values}" in text
    # Codes go from accumulators to operands within threads: the only shuffles are of row maxima.
    assert "stmatrix" not in text
    assert stack(compiled.asm["cubin"]) <= MAX_STACK
