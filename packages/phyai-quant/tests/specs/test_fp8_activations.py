import math

import pytest
import torch

from phyai_quant import Granularity, QuantConfigError, TensorQuant
from phyai_quant.specs.fp8 import Fp8Spec

E4M3 = torch.float8_e4m3fn
TENSOR = TensorQuant("fp8_e4m3", "per_tensor")
CHANNEL = TensorQuant("fp8_e4m3", "per_channel")
TOKEN = TensorQuant("fp8_e4m3", "per_channel", dynamic=True)


def loop_scale(values):
    return max(max(abs(float(v)) for v in values) / 448, 1e-12)


@pytest.mark.parametrize("shape", [(1, 1), (2, 3, 7), (5, 9)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_token_activations(allocated, shape, dtype):
    spec = Fp8Spec(CHANNEL, TOKEN)
    layer = allocated(spec, (4, shape[-1]))
    x = torch.randn(shape).to(dtype)
    x.view(-1, shape[-1])[0] = 0
    x.view(-1, shape[-1])[-1] *= 1e4
    view = spec.quantize_activation(x, layer)
    rows = x.reshape(-1, shape[-1]).float()
    assert view.granularity is Granularity.PER_CHANNEL
    assert view.x.dtype == E4M3
    for m, row in enumerate(rows):
        scale = torch.tensor(loop_scale(row))
        assert view.x_scale[m] == pytest.approx(scale.item(), rel=1e-6)
        expected = (row / view.x_scale[m]).clamp(-448, 448).to(E4M3)
        assert torch.equal(view.x[m].float(), expected.float())
    assert view.x.float().isfinite().all()


def test_static_activations_saturate(allocated):
    spec = Fp8Spec(TENSOR, TENSOR)
    layer = allocated(spec, (4, 3))
    spec.load_weight(layer, "input_scale", torch.tensor(0.5))
    view = spec.quantize_activation(torch.tensor([[1.0, 1e6, -torch.inf]]), layer)
    assert view.x.float().tolist() == [[2.0, 448.0, -448.0]]
    assert view.x_scale.tolist() == [0.5]
    assert view.granularity is Granularity.PER_TENSOR


@pytest.mark.parametrize("columns", [8, 9, 15])
def test_group_activations(allocated, columns):
    act = TensorQuant("fp8_e4m3", "block", dynamic=True, block_shape=(1, 4))
    spec = Fp8Spec(TensorQuant("fp8_e4m3", "block", block_shape=(4, 4)), act)
    layer = allocated(spec, (4, columns))
    x = torch.randn(3, columns * 2)[:, ::2]  # strided input
    view = spec.quantize_activation(x, layer)
    assert view.x_scale.shape == (3, math.ceil(columns / 4))
    for m in range(3):
        for k in range(columns):
            group = x[m, k // 4 * 4 : k // 4 * 4 + 4]
            scale = view.x_scale[m, k // 4]
            assert scale.item() == pytest.approx(loop_scale(group), rel=1e-6)
            assert view.x[m, k].float() == (x[m, k] / scale).clamp(-448, 448).to(E4M3).float()


@pytest.mark.parametrize("rows", [0, 1, 3])
def test_dynamic_tensor_activations(allocated, rows):
    spec = Fp8Spec(TENSOR, TensorQuant("fp8_e4m3", "per_tensor", dynamic=True))
    layer = allocated(spec, (4, 5))
    x = torch.randn(rows, 5)
    view = spec.quantize_activation(x, layer)
    assert view.x.shape == (rows, 5)
    expected = loop_scale([0, *x.flatten()])
    assert view.x_scale.tolist() == pytest.approx([expected], rel=1e-6)


def test_inputs_are_not_changed_and_empty_batches_work(allocated):
    spec = Fp8Spec(CHANNEL, TOKEN)
    layer = allocated(spec, (4, 5))
    x = torch.randn(2, 5)
    before = x.clone()
    spec.quantize_activation(x, layer)
    assert torch.equal(x, before)
    view = spec.quantize_activation(torch.empty(0, 5), layer)
    assert view.x.shape == (0, 5)
    assert view.x_scale.shape == (0,)


def test_weight_only_layers_do_not_quantize_inputs(allocated):
    spec = Fp8Spec(CHANNEL)
    layer = allocated(spec, (4, 5))
    assert not spec.needs_act_quant
    with pytest.raises(QuantConfigError, match=r"a\.down_proj: fp8_per_channel is weight-only"):
        spec.quantize_activation(torch.zeros(1, 5), layer)


@pytest.mark.parametrize(
    "act",
    [
        TENSOR,
        TensorQuant("fp8_e4m3", "per_tensor", dynamic=True),
        TOKEN,
        TensorQuant("fp8_e4m3", "block", dynamic=True, block_shape=(1, 4)),
    ],
    ids=TensorQuant.describe,
)
def test_fake_quantization_reads_the_codes_back(allocated, act):
    spec = Fp8Spec(CHANNEL, act)
    layer = allocated(spec, (4, 9))
    if not act.dynamic:
        spec.load_weight(layer, "input_scale", torch.tensor(0.01))
    x = torch.randn(2, 3, 9).bfloat16()
    view = spec.quantize_activation(x, layer)
    fake = spec.fake_quantize_activation(x, layer)
    assert fake.shape == x.shape
    assert fake.dtype == torch.float32
    for m in range(6):
        for k in range(9):
            index = {1: (0 if view.x_scale.numel() == 1 else m,), 2: (m, k // 4)}
            scale = view.x_scale[index[view.x_scale.ndim]]
            assert fake.view(6, 9)[m, k] == view.x[m, k].float() * scale
    assert ((fake - x.float()).abs() <= x.float().abs() / 16 + 0.01).all()
