"""Launches bind every argument of a kernel, and what compiles anew has a key of its own."""

from dataclasses import replace

import pytest
import torch
from aligned_memory import aligned

pytest.importorskip("triton", reason="Triton is not installed")
hopper = pytest.importorskip("piper_kernels.linear.nvfp4._nvidia.hopper")

from piper_kernels._triton.launching import launch_key  # noqa: E402
from piper_kernels.linear.nvfp4 import _operands, _product  # noqa: E402
from piper_kernels.linear.nvfp4._nvidia.hopper_plan import HopperPlan, select_plan  # noqa: E402
from piper_kernels.linear.nvfp4._weight import Weight  # noqa: E402
from piper_kernels.weights.nvfp4._layout import scale_shape  # noqa: E402

STREAM = HopperPlan(16, 128, 2, 8, w_stages=5, held_steps=2, chunk=2)
PRODUCT = HopperPlan(32, 128, 2, 8, w_stages=4, x_stages=8)


@pytest.fixture
def launches(monkeypatch):
    """By kernel, the arguments by name, the options and the key of every launch."""
    found = []
    launchers = ((hopper, "_stream"), (hopper, "_product"), (_operands, "_dense"))
    for module, name in (*launchers, (_operands, "_rotated"), (_product, "_finish_parts")):
        names = getattr(module, name).kernel.arg_names

        def launch(programs, arguments, options, key, name=name, names=names):
            found.append((name, dict(zip(names, arguments, strict=True)), options, key))
            assert programs > 0

        monkeypatch.setattr(module, name, launch)
    monkeypatch.setattr(_product, "sm_count", lambda _device: 132)
    return found


def multiply(plan=STREAM, rows=3, outputs=300, features=1024, bias=None, level=True,
             input_level=False, high_first=False, follows=False, dtype=torch.bfloat16,
             offset=0):  # fmt: skip
    weight = Weight(
        aligned(outputs, features // 2, dtype=torch.uint8),
        aligned(*scale_shape(outputs, features, swizzled=True), dtype=torch.float8_e4m3fn),
        aligned() if level else None,
        None if bias is None else aligned(outputs, dtype=bias),
        True,
        high_first,
    )
    operand = aligned(rows, features, dtype=torch.bfloat16, offset=offset)
    out = aligned(rows, outputs, dtype=dtype)
    given = aligned() if input_level else None
    _product.multiply(operand, given, weight, out, plan, 4.0, follows=follows)


@pytest.mark.parametrize(("plan", "name"), [(STREAM, "_stream"), (PRODUCT, "_product")])
def test_products(launches, plan, name):
    changes = [{}, {"outputs": 301}, {"features": 2048}, {"bias": torch.float32}]
    changes += [{"bias": torch.float16}, {"level": False}, {"input_level": True}]
    changes += [{"high_first": True}, {"plan": replace(plan, w_stages=3)}]
    changes += [{"follows": True}] if plan is STREAM else []
    for change in changes:
        multiply(**{"plan": plan} | change)
    products = [launch for launch in launches if launch[0] == name]
    finishes = [launch for launch in launches if launch[0] == "_finish_parts"]
    assert len(products) == len(finishes) == len(changes)
    assert len({key for *_, key in products} - {None}) == len(changes)
    arguments = products[-1][1]
    assert (arguments["rows"], arguments["outputs"], arguments["features"]) == (3, 300, 1024)
    assert arguments["factor"] == 4 * hopper.OPERAND_FACTOR
    assert arguments["SPLITS"] == 2
    assert arguments["out"].dtype == torch.float32
    if plan is STREAM:
        assert [launch[1]["FOLLOWS"] for launch in products[-2:]] == [False, True]
    last = finishes[-1][1]
    assert last["partials"] is arguments["out"]
    assert (last["SPLITS"], last["DEPENDENT"], last["input_factor"]) == (2, True, 4.0)
    assert finishes[-1][2] == {"launch_pdl": True}
    multiply(plan=plan, rows=5)
    assert launches[-2][3] == products[0][3]
    assert launches[-1][3] == finishes[0][3]


def test_what_is_not_aligned_has_no_key(launches):
    multiply(offset=8)
    assert launches[0][3] is None


@pytest.mark.parametrize("group", [0, 64, 256])
@pytest.mark.parametrize("rows", [1, 16, 40])
def test_operands(launches, rows, group):
    plan = select_plan(rows, 512, 2048, 132)
    x = aligned(rows, 2048, dtype=torch.bfloat16)
    operand, factor, leads = _operands.dense_operand(x, torch.bfloat16, group, plan)
    assert factor == 1
    if rows <= 16 and group == 0:
        assert operand is x
        assert not leads
        assert launches == []
        return
    assert leads
    name, arguments, options, key = launches[0]
    assert not options.get("launch_pdl")
    assert arguments["LEADS"]
    assert arguments["out"] is operand
    assert arguments["features"] == 2048
    if name == "_rotated":
        assert (group, rows) == (256, 40)
        assert options["num_warps"] == 1
    else:
        assert (arguments["GROUP"], arguments["ARRANGEMENT"]) == (group, plan.arrangement)
        assert arguments["ROWS"] == (2 if rows <= 16 else 8)
    _operands.dense_operand(x[:, :1024], torch.bfloat16, group, select_plan(rows, 512, 1024, 132))
    assert launches[1][3] not in (key, None)


def test_keys():
    a, b = aligned(3), aligned(3, dtype=torch.float16)
    assert launch_key((a, None), 5) == launch_key((aligned(7), None), 5)
    assert len({launch_key(pair, 5) for pair in ((a, None), (None, a), (a, b), (b, a))}) == 4
    assert launch_key((a, b), 5) != launch_key((a, b), 6)
    assert launch_key((a, aligned(3, offset=4)), 5) is None
