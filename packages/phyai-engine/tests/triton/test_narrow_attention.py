"""Attention of heads of any width: numerics in the interpreter or on a GPU, code for all."""

from pathlib import Path

import pytest

pytest.importorskip("triton", reason="Triton is not installed")

import triton
from triton.compiler import ASTSource

from phyai.dispatch import explain
from phyai.triton import narrow_attention

from .checks import WHERE
from .targets import TARGETS

CHECKS = Path(__file__).with_name("narrow_attention_checks.py")
BLOCKS = {"BLOCK_M": 64, "BLOCK_N": 64, "WIDE": False}


@pytest.mark.parametrize("target", TARGETS)
def test_compiles(target):
    kernel = narrow_attention._narrow_attention_kernel
    constants = {"GROUP": 1, "DIM": 72, "LOW": 64, "HIGH": 16, **BLOCKS}
    if target.startswith("gfx"):
        constants |= {"BLOCK_M": 32, "BLOCK_N": 32}
    types = dict.fromkeys(kernel.arg_names, "i32")
    types |= dict.fromkeys(("query", "key", "value", "out"), "*bf16")
    types["scale"] = "fp32"
    signature = {name: "constexpr" if name in constants else types[name] for name in types}
    options = {"num_warps": 4, "num_stages": 2}
    source = ASTSource(kernel, signature, constexprs=constants)
    assert triton.compile(source, target=TARGETS[target], options=options).asm


@pytest.mark.parametrize("where", WHERE)
def test_numerics(where, run_kernel_checks):
    run_kernel_checks(CHECKS, *where)


@pytest.mark.parametrize(
    ("head_dim", "parts"),
    [(32, (16, 16)), (72, (64, 16)), (80, (64, 16)), (120, (64, 64)), (128, (64, 64))],
)
def test_parts_cover_a_head(head_dim, parts):
    assert narrow_attention.parts_of(head_dim) == parts


@pytest.mark.parametrize(("head_dim", "usable"), [(72, True), (76, False), (136, False)])
def test_which_widths(head_dim, usable):
    trace = explain(
        "attention",
        shape={"tokens": 768, "heads": 16, "kv_heads": 16, "head_dim": head_dim},
        dtype=dict.fromkeys(("input", "key", "value", "output"), "bf16"),
        attrs={"layout": "padded", "causal": False},
        device="nvidia:sm90",
    )
    found = {row["kernel_id"]: row for row in trace.as_dict()["candidates"]}
    assert found["triton.attention.narrow"]["eligible"] is usable
