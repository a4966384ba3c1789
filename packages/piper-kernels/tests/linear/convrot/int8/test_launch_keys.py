"""Launches that compile different kernels have different keys, and repeated ones the same."""

from dataclasses import replace

import pytest
import torch
from aligned_memory import aligned

pytest.importorskip("triton", reason="Triton is not installed")

from piper_kernels.linear.convrot.int8 import _launch
from piper_kernels.linear.convrot.int8._nvidia import plan as nvidia


@pytest.fixture
def keys(monkeypatch):
    found = []
    for name in ("_prepare", "_prepare_wide"):
        monkeypatch.setattr(_launch, name, lambda *arguments: found.append(arguments[-1]))
    return found


def prepare(rows=3, features=256, dtype=torch.bfloat16, stride=0, offset=0, group=64,
            activation=None, static=False, limit=None):  # fmt: skip
    width = features * (2 if activation == "swiglu" else 1)
    source = aligned(rows, width + stride, dtype=dtype)[:, :width]
    qdata = aligned(rows, features, dtype=torch.int8, offset=offset)
    scale = torch.tensor(1.0) if static else None
    while scale is not None and scale.data_ptr() % 16:
        scale = scale.clone()
    _launch.prepare_rows(source, qdata, aligned(rows), group, activation, scale, limit)


def test_preparations(keys):
    changes = [{}, {"features": 512}, {"dtype": torch.float16}, {"stride": 1}, {"group": 16}]
    changes += [{"activation": "gelu_tanh"}, {"activation": "swiglu"}, {"static": True}]
    changes += [{"limit": 128}]
    for change in changes:
        prepare(**change)
    assert None not in keys
    assert len(set(keys)) == len(changes)
    prepare(rows=7)
    assert keys[-1] == keys[0]
    prepare(offset=4)
    assert keys[-1] is None


def products(multiply, keys, plans, ignored=None):
    """Check the keys of ``multiply(plan, **operands)`` for changes of its operands."""

    def run(rows=3, columns=32, depth=64, dtype=torch.bfloat16, stride=0, bias=None,
            bias_stride=1, paired=False, plan=plans[0], offset=0):  # fmt: skip
        x = aligned(rows, depth, dtype=torch.int8)
        weight = (aligned(columns, depth, dtype=torch.int8), aligned(columns, 1))
        vector = None
        if bias is not None:
            vector = aligned(columns * bias_stride, dtype=bias)[::bias_stride]
        width = columns * (2 if paired else 1)
        out = aligned(rows, width + stride, dtype=dtype, offset=offset)[:, :width]
        second = (*weight, None) if paired else None
        multiply(x, aligned(rows), (*weight, vector), second, out, plan)

    changes = [{}, {"columns": 48}, {"depth": 128}, {"dtype": torch.float16}, {"stride": 1}]
    changes += [{"bias": torch.float32}, {"bias": torch.float16}]
    changes += [{"bias": torch.float32, "bias_stride": 2}, {"paired": True}]
    changes += [{"plan": plan} for plan in plans[1:]]
    changes = [change for change in changes if ignored not in change]
    for change in changes:
        run(**change)
    assert None not in keys
    assert len(set(keys)) == len(changes)
    run(rows=100)
    assert keys[-1] == keys[0]
    run(offset=8)
    assert keys[-1] is None


def test_generic_products(monkeypatch):
    keys = []
    monkeypatch.setattr(_launch, "_matmul", lambda *arguments: keys.append(arguments[-1]))
    tile = nvidia.SMALL
    products(_launch.matmul, keys, [tile, nvidia.MEDIUM, replace(tile, group_m=2)])


def test_sums_of_parts(monkeypatch):
    keys = []
    monkeypatch.setattr(_launch, "_sum_parts", lambda *arguments: keys.append(arguments[-1]))

    def add(x, x_scale, first, second, out, split):
        parts = aligned(split, *out.shape, dtype=torch.int32)
        _launch.sum_parts(parts, x_scale, first, second, out)

    products(add, keys, [2, 3], ignored="depth")


def test_hopper_products(monkeypatch):
    hopper = pytest.importorskip("piper_kernels.linear.convrot.int8._nvidia.hopper")
    from piper_kernels.linear.convrot.int8._nvidia import hopper_plan

    keys = []
    monkeypatch.setattr(hopper, "_matmul", lambda *arguments: keys.append(arguments[-1]))
    monkeypatch.setattr(hopper, "sum_parts", lambda *arguments: None)

    def multiply(*arguments):
        hopper.matmul(*arguments, 132)

    plans = [hopper_plan.THIN, hopper_plan.SQUARE, replace(hopper_plan.THIN, group_m=2)]
    products(multiply, keys, plans)
