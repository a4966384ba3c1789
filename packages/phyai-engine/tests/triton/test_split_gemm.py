"""Split fp32 products: numerics in the interpreter or on a GPU, machine code, and the row."""

import re
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="Triton is not installed")

import triton
from triton.compiler import ASTSource

from phyai.dispatch import KernelQuery, Selector, policy_from_mapping
from phyai.dispatch.catalog import build_catalog
from phyai.triton import split_gemm

from .checks import WHERE
from .targets import TARGETS

CHECKS = Path(__file__).with_name("split_gemm_checks.py")


@pytest.mark.parametrize("target", [name for name in TARGETS if name.startswith("sm")])
def test_compiles(target):
    kernel = split_gemm._split_kernel
    constants = {
        "K": 588, "x_stride": 588, "HAS_BIAS": True, "BLOCK_M": split_gemm.BLOCK_M,
        "BLOCK_N": split_gemm.BLOCK_N, "BLOCK_K": split_gemm.BLOCK_K,
    }  # fmt: skip
    pointers = {"x", "weight", "bias", "out"}
    signature = {
        name: "constexpr" if name in constants else "*fp32" if name in pointers else "i32"
        for name in kernel.arg_names
    }
    aligned = {(i,): [["tt.divisibility", 16]] for i, n in enumerate(signature) if n in pointers}
    source = ASTSource(kernel, signature, constexprs=constants, attrs=aligned)
    compiled = triton.compile(source, target=TARGETS[target], options={"num_stages": 3})
    text = compiled.asm["ptx"]
    assert "tf32" in text
    copied = re.findall(r"cp\.async\.c[ag]\.shared\.global[^;]*?, (0x\w+)[,;]", text)
    if target == "sm_100":  # operands go through registers
        return
    assert copied
    assert set(copied) == {"0x10"}, "16 bytes a time, though K is no multiple of 16"


@pytest.mark.parametrize("where", WHERE)
def test_numerics(where, run_kernel_checks):
    run_kernel_checks(CHECKS, *where)


def test_a_policy_chooses_the_row_where_it_can_run(monkeypatch):
    monkeypatch.setattr("phyai.dispatch.facts.library_problem", lambda name: None)
    catalog = build_catalog()
    rule = {"id": "patches", "match": {"op": "gemm"}, "prefer": "triton.gemm.split_fp32"}
    policy = policy_from_mapping({"rules": [rule]}, catalog=catalog)

    def chosen(device="nvidia:sm90", dtype="fp32", *, rules=True, **changes):
        dtypes = {"input": dtype, "output": dtype, "weight": dtype}
        query = KernelQuery.build(
            "gemm", device=device, dtype=dtypes, quant={"format": "bf16"},
            shape={"M": 768, "N": 1152, "K": 588} | changes,
        )  # fmt: skip
        more = {"policy": policy} if rules else {}
        return Selector(catalog, device=device, **more).explain(query).selected

    assert chosen(rules=False) == "torch.gemm.bf16"
    assert chosen() == "triton.gemm.split_fp32"
    for changes in (
        {"M": 255}, {"K": 590}, {"dtype": "bf16"}, {"device": "nvidia:sm75"},
        {"device": "amd:gfx942"},
    ):  # fmt: skip
        assert chosen(**changes) == "torch.gemm.bf16", changes
