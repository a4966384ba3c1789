import io
import pickletools
import zipfile

import pytest
import torch

from piper_kernels.weights.convrot.int8 import ConvRotInt8Tensor
from piper_kernels.weights.convrot.int8.tensor import ConvRotInt8Tensor as FromModule

STATE_KEYS = {"qdata", "scale", "group_size", "act_per_tensor_scale", "transposed"}


def make(act=None, dtype=torch.float16):
    dense = torch.randn(7, 64, generator=torch.Generator().manual_seed(3)).to(dtype)
    return ConvRotInt8Tensor.from_hp(dense, group_size=16, act_per_tensor_scale=act)


def assert_equal(actual, expected):
    assert type(actual) is ConvRotInt8Tensor
    assert actual.dtype == expected.dtype
    assert actual.shape == expected.shape
    assert actual.stride() == expected.stride()
    assert actual.group_size == expected.group_size
    assert actual.transposed == expected.transposed
    assert torch.equal(actual.qdata, expected.qdata)
    assert torch.equal(actual.scale, expected.scale)
    if expected.act_per_tensor_scale is None:
        assert actual.act_per_tensor_scale is None
    else:
        assert torch.equal(actual.act_per_tensor_scale, expected.act_per_tensor_scale)


WEIGHTS = {
    "dynamic": make,
    "static": lambda: make(torch.tensor(0.5)),
    "transposed": lambda: make(torch.tensor(0.5)).t(),
    "conv3d": lambda: ConvRotInt8Tensor.from_hp(torch.randn(2, 64, 3, 3, 3), group_size=64),
}


@pytest.mark.parametrize("name", WEIGHTS)
@pytest.mark.parametrize("weights_only", [False, True])
def test_save_and_load(name, weights_only, tmp_path):
    weight = WEIGHTS[name]()
    path = tmp_path / "weight.pt"
    torch.save({"w": weight}, path)
    with torch.serialization.safe_globals([ConvRotInt8Tensor]):
        loaded = torch.load(path, weights_only=weights_only)["w"]
    assert_equal(loaded, weight)
    assert torch.equal(loaded.dequantize(), weight.dequantize())


def test_weights_only_needs_the_allow_list(tmp_path):
    path = tmp_path / "weight.pt"
    torch.save(make(), path)
    with pytest.raises(Exception, match="ConvRotInt8Tensor"):
        torch.load(path, weights_only=True)


def test_pickle_names_the_documented_class_path():
    buffer = io.BytesIO()
    torch.save(make(), buffer)
    with zipfile.ZipFile(buffer) as archive:
        name = next(entry for entry in archive.namelist() if entry.endswith("data.pkl"))
        names = {
            argument
            for opcode, argument, _ in pickletools.genops(archive.read(name))
            if opcode.name == "GLOBAL"
        }
    assert "piper_kernels.weights.convrot.int8.tensor ConvRotInt8Tensor" in names
    assert "torch._tensor _rebuild_from_type_v2" in names
    assert "torch._utils _rebuild_wrapper_subclass" in names
    assert FromModule is ConvRotInt8Tensor
    assert ConvRotInt8Tensor.__module__ == "piper_kernels.weights.convrot.int8.tensor"


def test_pickled_state_has_the_documented_keys():
    state = make(torch.tensor(1.0)).__reduce_ex__(2)[1][3]
    assert set(state) == STATE_KEYS


def test_old_state_without_optional_fields_loads():
    weight = make()
    function, (rebuild, cls, arguments, state) = weight.__reduce_ex__(2)
    old = {key: state[key] for key in ("qdata", "scale", "group_size")}
    loaded = function(rebuild, cls, arguments, old)
    assert_equal(loaded, weight)


def test_memory_mapped_load_is_not_copied(tmp_path):
    path = tmp_path / "weight.pt"
    torch.save({"weight": make(torch.tensor(0.5))}, path)
    with torch.serialization.safe_globals([ConvRotInt8Tensor]):
        state = torch.load(path, weights_only=True, mmap=True)
    loaded = state["weight"]
    for inner in (loaded.qdata, loaded.scale):
        assert not inner.untyped_storage().resizable()
    linear = torch.nn.Linear(64, 7, bias=False, device="meta", dtype=torch.float16)
    linear.load_state_dict(state, assign=True)
    assert isinstance(linear.weight, ConvRotInt8Tensor)
    assert linear.weight.qdata.data_ptr() == loaded.qdata.data_ptr()
    assert linear.weight.scale.data_ptr() == loaded.scale.data_ptr()
    wrapped = ConvRotInt8Tensor.from_quantized(loaded.qdata, loaded.scale, group_size=16)
    assert wrapped.qdata.data_ptr() == loaded.qdata.data_ptr()


def test_state_dict_copies_into_an_existing_weight():
    source, target = make(torch.tensor(0.5)), make(torch.tensor(1.0))
    source.qdata.neg_()
    modules = []
    for weight in (source, target):
        module = torch.nn.Linear(64, 7, bias=False)
        module.weight = torch.nn.Parameter(weight, requires_grad=False)
        modules.append(module)
    pointer = modules[1].weight.qdata.data_ptr()
    modules[1].load_state_dict(modules[0].state_dict())
    assert modules[1].weight.qdata.data_ptr() == pointer
    assert_equal(modules[1].weight.data, source)


def test_safetensors_style_fields_rebuild_the_weight():
    weight = make(torch.tensor(0.5))
    fields = {name: getattr(weight, name).clone() for name in ("qdata", "scale")}
    rebuilt = ConvRotInt8Tensor.from_quantized(
        **fields,
        group_size=weight.group_size,
        logical_dtype=weight.dtype,
        act_per_tensor_scale=weight.act_per_tensor_scale.clone(),
    )
    assert_equal(rebuilt, weight)
