"""The loops in plain Triton: numerics in the interpreter, machine code for every target, plans."""

import re
from collections import Counter
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed")

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from piper_kernels._triton.targets import AcceleratorTarget
from piper_kernels.attention._backends import AttentionRequest
from piper_kernels.attention._mixed_sign import _launch
from piper_kernels.attention._mixed_sign.plan import Product, fp8_plan, piper_plan, sparse_plan
from piper_kernels.attention._quantization import Granularity
from piper_kernels.attention.piper_attention._mixed_sign import MixedSignBackend
from piper_kernels.attention.sage_attention_2pp._fp8 import Fp8Backend

CHECKS = Path(__file__).with_name("mixed_sign_checks.py")
NVIDIA = ("sm_80", "sm_86", "sm_89", "sm_120")
AMD = ("gfx1200", "gfx1201")
POINTERS = {
    "query_codes": "*i8",
    "key_codes": "*i8",
    "value_codes": "*i8",
    "out": "*bf16",
    "lengths": "*i32",
    "routes": "*u16",
    "table": "*i32",
    "gate": "*bf16",
    "gate_batch_stride": "i64",
    "gate_row_stride": "i64",
    "gate_head_stride": "i64",
}
FLOATS = (
    "query_scale", "key_scale", "value_multiplier", "value_mean", "value_scale", "coarse",
)  # fmt: skip
PRODUCTS = re.compile(r"mma\.sync[\w.]*\.s32\.(\w8\.s8)|(neg_lo:\[.,.,0\])|(f16\.e4m3\.e4m3)")


def test_numerics_in_the_interpreter(run_kernel_checks):
    run_kernel_checks(CHECKS)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_numerics_on_the_gpu(run_kernel_checks):
    run_kernel_checks(CHECKS, "cuda")


def accelerator(name):
    return AcceleratorTarget("hip" if name.startswith("gfx") else "cuda", name)


def products(kernel, name, constants, plan, **types):
    """Compile to machine code and count the products by the signs of their operands."""
    amd = name.startswith("gfx")
    target = GPUTarget("hip", name, 32) if amd else GPUTarget("cuda", int(name[3:]), 32)
    types = POINTERS | dict.fromkeys(FLOATS, "*fp32") | types
    signature = {
        argument: "constexpr" if argument in constants else types.get(argument, "i32")
        for argument in kernel.arg_names
    }
    aligned = {
        (index,): [["tt.divisibility", 16]]
        for index, argument in enumerate(kernel.arg_names)
        if signature[argument].startswith("*")
    }
    options = {"num_warps": plan.num_warps, "num_stages": plan.num_stages}
    with _launch.stage_hook(plan):
        compiled = triton.compile(
            ASTSource(kernel, signature, constants, aligned), target=target, options=options
        )
    assert compiled.asm["hsaco" if amd else "cubin"][:4] == b"\x7fELF"
    text = compiled.asm["amdgcn" if amd else "ptx"]
    return Counter(next(filter(None, match)) for match in PRODUCTS.findall(text))


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))


def assert_half_mixed(found):
    """As many bytes are multiplied for the logits, signed, as for the values, mixed."""
    mixed = found["u8.s8"] + found["neg_lo:[1,0,0]"]
    signed = found["s8.s8"] + found["neg_lo:[1,1,0]"]
    assert mixed == signed > 0
    assert found.total() == mixed + signed


@pytest.mark.parametrize("name", [*NVIDIA, *AMD])
def test_dense_loops_multiply_mixed_signs(name):
    for head_dim, is_causal in ((128, False), (64, True)):
        plan, _ = piper_plan(accelerator(name), head_dim, is_causal)
        constants = _launch.dense_constants(plan, head_dim, 2, is_causal)
        assert_half_mixed(products(_launch.dense_kernel, name, constants, plan))


@pytest.mark.parametrize("name", [*NVIDIA, *AMD])
def test_sparse_loops_multiply_mixed_signs(name):
    plan, _ = sparse_plan(accelerator(name))
    constants = _launch.sparse_constants(plan, 128 if name in ("sm_80", "gfx1201") else 64, 2)
    constants |= {"ROUTED": True, "HAS_LENGTHS": False, "HAS_COARSE": True}
    assert_half_mixed(products(_launch.sparse_kernel, name, constants, plan))


@pytest.mark.parametrize("name", ["sm_89", "sm_90", "sm_120"])
def test_fp8_loops_sum_in_fp16(name):
    plan, _ = fp8_plan(accelerator(name), True)
    constants = _launch.fp8_constants(plan, 64, True)
    found = products(_launch.fp8_kernel, name, constants, plan, value_codes="*fp8e4nv")
    assert found["f16.e4m3.e4m3"] > 0


def test_where_the_loops_are_used():
    backend = MixedSignBackend()
    for name in (*NVIDIA, *AMD, "sm_121"):
        for is_causal in (False, True):
            request = AttentionRequest(accelerator(name), 128, is_causal)
            assert backend.support(request) == (True, "")
    for name in ("sm_75", "sm_90", "sm_100", "gfx942", "gfx1100"):
        usable, reason = backend.support(AttentionRequest(accelerator(name), 64, False))
        assert not usable
        assert name in reason
        assert sparse_plan(accelerator(name))[0] is None
        assert name in sparse_plan(accelerator(name))[1]
    assert not backend.support(AttentionRequest(None, 64, False))[0]


def test_where_fp8_is_used():
    backend = Fp8Backend()
    for name in ("sm_89", "sm_90", "sm_120"):
        assert backend.support(AttentionRequest(accelerator(name), 64, True)) == (True, "")
    for name in ("sm_80", "sm_86", *AMD):
        usable, reason = backend.support(AttentionRequest(accelerator(name), 64, True))
        assert not usable
        assert name in reason
    assert not backend.support(AttentionRequest(None, 64, True))[0]


def test_plans():
    def plan(name, head_dim, is_causal):
        return piper_plan(accelerator(name), head_dim, is_causal)[0]

    for name in ("sm_80", "sm_86", "sm_89"):
        assert plan(name, 64, False).granularity is Granularity.PER_THREAD
        assert (plan(name, 64, False).block_m, plan(name, 64, True).block_m) == (128, 64)
    for name in ("sm_120", "sm_121", *AMD):
        assert plan(name, 64, False).granularity is Granularity.PER_WARP
    assert plan("sm_121", 128, False).block_m == 64
    assert plan("sm_120", 128, False).block_m == 128
    assert plan("sm_120", 128, False).split_pv_head_dim
    assert plan("sm_120", 64, False).derive_value_log_bound
    assert not plan("sm_120", 64, True).derive_value_log_bound
    assert not plan("sm_120", 128, True).use_packed_probability_conversion
    assert plan("sm_89", 64, True).derive_value_log_bound
    assert plan("gfx1201", 64, False).product is Product.AMD
    grouped = plan("sm_80", 64, False).with_granularity(Granularity.PER_WARP)
    assert grouped.granularity is Granularity.PER_WARP
