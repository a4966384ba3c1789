"""Norm and action head in one kernel: numerics, machine code, and which row the model asks for."""

from pathlib import Path

import pytest

pytest.importorskip("triton", reason="Triton is not installed")

import triton
from triton.compiler import ASTSource

from phyai.dispatch import KernelQuery, Selector
from phyai.dispatch.catalog import build_catalog
from phyai.triton import flow_velocity

from .checks import WHERE
from .targets import TARGETS

CHECKS = Path(__file__).with_name("flow_velocity_checks.py")


@pytest.mark.parametrize("target", TARGETS)
def test_compiles(target):
    kernel = flow_velocity._flow_velocity_kernel
    constants = {"HAS_BIAS": True, "BLOCK_N": 8, "BLOCK": 1024}
    types = dict.fromkeys(("modulation", "weight", "bias", "out"), "*fp32")
    types |= {"x": "*bf16", "eps": "fp32"}
    signature = {
        name: "constexpr" if name in constants else types.get(name, "i32")
        for name in kernel.arg_names
    }
    source = ASTSource(kernel, signature, constexprs=constants)
    assert triton.compile(source, target=TARGETS[target], options={"num_warps": 8}).asm


@pytest.mark.parametrize("where", WHERE)
def test_numerics(where, run_kernel_checks):
    run_kernel_checks(CHECKS, *where)


def chosen(device="nvidia:sm90", dtype="bf16", weight="fp32", shared=True, **changes):
    query = KernelQuery.build(
        "flow_velocity", device=device, dtype={"input": dtype, "weight": weight},
        quant={"format": "bf16"}, shape={"tokens": 50, "hidden": 1024, "actions": 32} | changes,
        attrs={"shared_modulation": shared},
    )  # fmt: skip
    return Selector(build_catalog(), device=device).explain(query).selected


def test_which_row_is_chosen(monkeypatch):
    monkeypatch.setattr("phyai.dispatch.facts.library_problem", lambda name: None)
    assert chosen() == "triton.flow_velocity"
    for changes in (
        {"dtype": "fp32"}, {"weight": "bf16"}, {"shared": False}, {"hidden": 8193},
        {"device": "cpu"}, {"device": "amd:gfx942"},
    ):  # fmt: skip
        assert chosen(**changes) == "layers.flow_velocity", changes
