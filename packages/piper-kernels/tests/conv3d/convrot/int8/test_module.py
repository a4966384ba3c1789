"""The module: parameters, state dicts, memory maps and compilation."""

import io

import pytest
import torch
from safetensors.torch import load_file, save_file

from piper_kernels.conv3d.convrot.int8 import ConvRotInt8Conv3d, conv3d
from piper_kernels.weights.convrot.int8 import ConvRotInt8Tensor


def make(outputs=5, bias=True, **options):
    generator = torch.Generator().manual_seed(4)
    dense = torch.randn((outputs, 64, 3, 3, 3), generator=generator).half() * 0.05
    weight = ConvRotInt8Tensor.from_hp(
        dense, group_size=64, act_per_tensor_scale=torch.tensor(0.03)
    )
    values = torch.randn(outputs, generator=generator).half() if bias else None
    return ConvRotInt8Conv3d(weight, values, **{"padding": "reflect"} | options)


def test_forward_is_the_function():
    module = make(stride=(2, 1, 2), padding="reflect_right")
    x, stride = torch.randn(1, 64, 3, 4, 5).half(), (2, 1, 2)
    expected = conv3d(x, module.weight, module.bias, stride=stride, padding="reflect_right")
    assert torch.equal(module(x), expected)
    residual = torch.randn(expected.shape).half()
    with_residual = conv3d(
        x, module.weight, module.bias, stride=stride, padding="reflect_right", residual=residual
    )
    assert torch.equal(module(x, residual), with_residual)
    assert not torch.equal(with_residual, expected)


def test_parameters():
    module = make()
    assert {name: p.requires_grad for name, p in module.named_parameters()} == {
        "weight": False,
        "bias": False,
    }
    assert isinstance(module.weight, ConvRotInt8Tensor)
    assert [name for name, _ in make(bias=False).named_parameters()] == ["weight"]
    assert module.extra_repr() == "64, 5, stride=(1, 1, 1), padding=reflect"
    assert "padding=reflect" in repr(module)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"stride": (1, 1)}, "three positive integers"),
        ({"stride": (1, 1, 0)}, "three positive integers"),
        ({"padding": "same"}, "padding must be one of"),
    ],
)
def test_wrong_options(options, message):
    with pytest.raises(ValueError, match=message):
        make(**options)


def test_a_wrong_bias():
    with pytest.raises(ValueError, match="bias must be float16"):
        ConvRotInt8Conv3d(make().weight, torch.zeros(5), padding="none")


def test_state_dicts_are_assigned():
    source, x = make(), torch.randn(1, 64, 2, 3, 3).half()
    buffer = io.BytesIO()
    torch.save(source.state_dict(), buffer)
    buffer.seek(0)
    state = torch.load(buffer, weights_only=False)
    target = make()
    with torch.no_grad():
        target.bias.zero_()
    target.load_state_dict(state, assign=True)
    assert target.weight.qdata.data_ptr() == state["weight"].qdata.data_ptr()
    assert torch.equal(target(x), source(x))


def test_mapped_storage_is_not_copied(tmp_path):
    weight = make().weight
    path = tmp_path / "weights.safetensors"
    save_file({"qdata": weight.qdata, "scale": weight.scale.view(-1)}, path)
    mapped = load_file(path)
    loaded = ConvRotInt8Tensor.from_quantized(
        mapped["qdata"], mapped["scale"], group_size=64, act_per_tensor_scale=torch.tensor(0.03)
    )
    module = ConvRotInt8Conv3d(loaded, padding="none")
    assert module.weight.qdata.data_ptr() == mapped["qdata"].data_ptr()
    assert module.weight.scale.data_ptr() == mapped["scale"].data_ptr()


def test_compiles_as_one_graph():
    module, x = make(), torch.randn(1, 64, 2, 3, 4).half()
    residual = torch.randn(1, 5, 2, 3, 4).half()
    compiled = torch.compile(module, backend="aot_eager", fullgraph=True)
    with torch.no_grad():
        assert torch.equal(compiled(x, residual), module(x, residual))
        module.weight.act_per_tensor_scale.mul_(2)
        assert torch.equal(compiled(x, residual), module(x, residual))
