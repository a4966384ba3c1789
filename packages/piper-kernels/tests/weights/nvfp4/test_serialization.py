import io
import pickletools
import zipfile

import pytest
import torch
from torchao.prototype.mx_formats.nvfp4_tensor import QuantizeTensorToNVFP4Kwargs

from piper_kernels.weights.convrot.nvfp4 import ConvRotNVFP4Tensor
from piper_kernels.weights.nvfp4 import PiperNVFP4Tensor

CLASSES = [PiperNVFP4Tensor, ConvRotNVFP4Tensor]
PATHS = {
    "nvfp4": "piper_kernels.weights.nvfp4.tensor PiperNVFP4Tensor",
    "convrot": "piper_kernels.weights.convrot.nvfp4.tensor ConvRotNVFP4Tensor",
}
STATE_KEYS = {
    "qdata",
    "scale",
    "block_size",
    "orig_dtype",
    "per_tensor_scale",
    "act_per_tensor_scale",
    "is_swizzled_scales",
    "use_triton_kernel",
    "act_quant_kwargs",
    "high_first",
}


def assert_equal(actual, expected):
    assert type(actual) is type(expected)
    assert actual.dtype == expected.dtype
    assert (actual.shape, actual.stride()) == (expected.shape, expected.stride())
    assert actual.__tensor_flatten__() == expected.__tensor_flatten__()
    assert actual.transposed == expected.transposed
    for name in expected.__tensor_flatten__()[0]:
        left, right = getattr(actual, name), getattr(expected, name)
        assert left.stride() == right.stride()
        assert torch.equal(left.float(), right.float())


@pytest.mark.parametrize("weights_only", [False, True])
@pytest.mark.parametrize("transposed", [False, True])
def test_save_and_load(make_weight, weights_only, transposed, tmp_path):
    weight = make_weight(dtype=torch.float16, act_per_tensor_scale=torch.tensor(0.5))
    weight = weight.t() if transposed else weight
    torch.save({"w": weight}, tmp_path / "weight.pt")
    with torch.serialization.safe_globals(CLASSES):
        loaded = torch.load(tmp_path / "weight.pt", weights_only=weights_only)["w"]
    assert_equal(loaded, weight)
    assert torch.equal(loaded.dequantize(), weight.dequantize())


def test_input_quantization_loads(plain, tmp_path):
    kwargs = QuantizeTensorToNVFP4Kwargs(use_dynamic_per_tensor_scale=True)
    weight = plain(act_quant_kwargs=kwargs)
    torch.save(weight, tmp_path / "weight.pt")
    with torch.serialization.safe_globals([PiperNVFP4Tensor, QuantizeTensorToNVFP4Kwargs]):
        loaded = torch.load(tmp_path / "weight.pt", weights_only=True)
    assert loaded.act_quant_kwargs == kwargs


@pytest.mark.parametrize("name", PATHS)
def test_pickle_names_the_documented_class_path(plain, name):
    buffer = io.BytesIO()
    torch.save(plain(name=name), buffer)
    with zipfile.ZipFile(buffer) as archive:
        entry = next(entry for entry in archive.namelist() if entry.endswith("data.pkl"))
        names = {
            argument
            for opcode, argument, _ in pickletools.genops(archive.read(entry))
            if opcode.name == "GLOBAL"
        }
    assert PATHS[name] in names
    assert "torch._tensor _rebuild_from_type_v2" in names
    assert "torch._utils _rebuild_wrapper_subclass" in names


@pytest.mark.parametrize("name", PATHS)
def test_pickled_state_has_the_documented_keys(plain, name):
    state = plain(name=name).__reduce_ex__(2)[1][3]
    assert set(state) == STATE_KEYS | ({"group_size"} if name == "convrot" else set())


@pytest.mark.parametrize("name", PATHS)
def test_old_state_without_optional_fields_loads(plain, name):
    weight = plain(name=name, two_level=False)
    function, (rebuild, cls, arguments, state) = weight.__reduce_ex__(2)
    required = ("qdata", "scale", "block_size", "orig_dtype", "group_size")
    old = {key: value for key, value in state.items() if key in required}
    loaded = function(rebuild, cls, arguments, old)
    assert_equal(loaded, weight)
    assert loaded.is_swizzled_scales is False
    assert loaded.high_first is False
    assert torch.equal(loaded.dequantize(), weight.dequantize())


def test_memory_mapped_load_is_not_copied(make_weight, tmp_path):
    torch.save({"weight": make_weight()}, tmp_path / "weight.pt")
    with torch.serialization.safe_globals(CLASSES):
        state = torch.load(tmp_path / "weight.pt", weights_only=True, mmap=True)
    loaded = state["weight"]
    for inner in (loaded.qdata, loaded.scale):
        assert not inner.untyped_storage().resizable()
    linear = torch.nn.Linear(64, 7, bias=False, device="meta")
    linear.load_state_dict(state, assign=True)
    assert type(linear.weight.data) is type(loaded)
    assert linear.weight.qdata.data_ptr() == loaded.qdata.data_ptr()
    assert linear.weight.scale.data_ptr() == loaded.scale.data_ptr()


def test_state_dict_copies_into_an_existing_weight(make_weight):
    source, target = make_weight(), make_weight()
    source.qdata.bitwise_not_()
    modules = []
    for weight in (source, target):
        module = torch.nn.Linear(64, 7, bias=False)
        module.weight = torch.nn.Parameter(weight, requires_grad=False)
        modules.append(module)
    pointer = modules[1].weight.qdata.data_ptr()
    modules[1].load_state_dict(modules[0].state_dict())
    assert modules[1].weight.qdata.data_ptr() == pointer
    assert_equal(modules[1].weight.data, source)
