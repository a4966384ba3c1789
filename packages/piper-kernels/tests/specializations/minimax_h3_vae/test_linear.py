"""The decoder's linears: which shapes get a schedule, and that nothing else changes."""

import pytest
import torch
from torch import nn
from torch.nn import functional

from piper_kernels._triton.targets import AcceleratorTarget
from piper_kernels.linear.convrot import convrot_int8_compile_options
from piper_kernels.specializations.minimax_h3_vae import (
    _compile,
    _schedules,
    minimax_h3_vae_convrot_int8_compile_options,
)
from piper_kernels.weights.convrot.int8 import ConvRotInt8Tensor

OPTION = "post_grad_custom_pre_pass"
SM120, GFX1201 = AcceleratorTarget("cuda", "sm_120"), AcceleratorTarget("hip", "gfx1201")
SCHEDULED = "minimax_h3_vae_convrot_int8_linear_prepared"


def test_schedules():
    square, shallow = (128, 128, 128, 4, 2), (128, 128, 64, 8, 3)
    for rows in (1797, 3594, 7188):
        for weight in ((2048, 2048), (16384, 2048), (2048, 8192)):
            expected = square if rows != 3594 and weight != (16384, 2048) else shallow
            assert _schedules.find_schedule(SM120, (rows, *weight)) == expected
    found = {
        shape: _schedules.find_schedule(GFX1201, shape)
        for shape in ((1797, 2048, 2048), (1797, 2048, 8192), (3594, 2048, 8192))
    }
    assert set(found.values()) == {(128, 128, 64, 8, 2)}
    for target, shape in (
        (SM120, (1796, 2048, 2048)),
        (SM120, (1797, 8192, 2048)),
        (GFX1201, (3594, 2048, 2048)),
        (GFX1201, (1797, 16384, 2048)),
        (AcceleratorTarget("cuda", "sm_90"), (1797, 2048, 2048)),
        (None, (1797, 2048, 2048)),
    ):
        assert _schedules.find_schedule(target, shape) is None


class Decoder(nn.Module):
    """Two linears of one input, one of another shape, and an attention."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(5)
        for name, outputs in (("first", 48), ("second", 48), ("third", 32)):
            weight = ConvRotInt8Tensor.from_hp(torch.randn(outputs, 64).half(), group_size=64)
            linear = nn.Linear(64, outputs, device="meta")
            linear.weight = nn.Parameter(weight, requires_grad=False)
            linear.bias = nn.Parameter(torch.randn(outputs).half(), requires_grad=False)
            setattr(self, name, linear)

    def forward(self, x):
        attended = functional.scaled_dot_product_attention(x, x, x)
        return self.first(x), self.second(x), self.third(attended)


@pytest.fixture
def small_schedules(monkeypatch):
    """A device that has a schedule for the small decoder."""
    monkeypatch.setattr(_compile, "accelerator_target", lambda device: SM120)
    table = {(18, 48, 64): (16, 16, 32, 4, 2), (18, 32, 64): (32, 16, 32, 4, 2)}
    monkeypatch.setitem(_schedules._TABLES, "sm_120", table)


def test_exact_shapes_get_their_schedule(graph_capture, small_schedules):
    model, x = Decoder(), torch.randn(2, 9, 64).half()
    result, capture = graph_capture.run(
        model, x, options=minimax_h3_vae_convrot_int8_compile_options()
    )
    assert capture.targets.count(SCHEDULED) == 3
    assert capture.targets.count("convrot_int8_prepare_input") == 2
    assert "convrot_int8_linear" not in capture.targets
    graph = capture.graph_modules[-1].graph
    # Attention of PyTorch is one operator, or what it was decomposed into.
    names = " ".join(str(node.target) for node in graph.nodes)
    assert any(word in names for word in ("attention", "softmax", "aten.exp"))
    schedules = [n.args[-1] for n in graph.nodes if SCHEDULED in str(n.target)]
    assert sorted(schedules) == [[16, 16, 32, 4, 2]] * 2 + [[32, 16, 32, 4, 2]]
    with torch.no_grad():
        for left, right in zip(result, model(x), strict=True):
            assert torch.equal(left, right)


@pytest.mark.parametrize("rows", [8, 9])
def test_other_shapes_and_devices_keep_the_ordinary_pass(graph_capture, monkeypatch, rows):
    if rows == 8:
        monkeypatch.setattr(_compile, "accelerator_target", lambda device: SM120)
    model, x = Decoder(), torch.randn(2, rows, 64).half()
    ordinary = graph_capture.run(model, x, options=convrot_int8_compile_options())[1]
    options = minimax_h3_vae_convrot_int8_compile_options()
    assert graph_capture.run(model, x, options=options)[1].targets == ordinary.targets


def test_symbolic_rows_keep_the_ordinary_schedule(graph_capture, small_schedules):
    model, x = Decoder(), torch.randn(2, 9, 64).half()
    options = minimax_h3_vae_convrot_int8_compile_options()
    capture = graph_capture.run(model, x, options=options, dynamic=True)[1]
    assert SCHEDULED not in capture.targets


def test_options():
    def before(graph, is_inference=None): ...
    def after(graph, is_inference=None): ...

    base = convrot_int8_compile_options()[OPTION]
    options = minimax_h3_vae_convrot_int8_compile_options({OPTION: (before, base, after)})
    special = options[OPTION][-1]
    assert tuple(options[OPTION]) == (before, base, after, special)
    again = minimax_h3_vae_convrot_int8_compile_options(options)
    assert tuple(again[OPTION]) == tuple(options[OPTION])
    alone = minimax_h3_vae_convrot_int8_compile_options({"max_autotune": True})
    assert tuple(alone[OPTION]) == (base, special)
    assert alone["max_autotune"] is True
    assert special.uuid() != base.uuid()


def test_a_wrong_schedule():
    codes, rows = torch.zeros(2, 64, dtype=torch.int8), torch.ones(2)
    weight = torch.zeros(4, 64, dtype=torch.int8), torch.ones(4, 1)
    operator = getattr(torch.ops.piper_kernels, SCHEDULED)
    for schedule in ([128, 128, 64, 8], [128, 128, 64, 8, 0]):
        with pytest.raises(ValueError, match="five positive integers"):
            operator(codes, rows, *weight, None, torch.float16, schedule)
