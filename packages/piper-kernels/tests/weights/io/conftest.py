"""One weight of every format and variant that a file can hold."""

import pytest
import torch
from torchao.prototype.mx_formats.nvfp4_tensor import QuantizeTensorToNVFP4Kwargs

from piper_kernels.weights.convrot.int8 import ConvRotInt8Tensor
from piper_kernels.weights.convrot.nvfp4 import ConvRotNVFP4Tensor
from piper_kernels.weights.io import RowQuantizedWeight
from piper_kernels.weights.nvfp4 import PiperNVFP4Tensor


def dense(rows=7, features=64, dtype=torch.bfloat16):
    generator = torch.Generator().manual_seed(rows * 1000 + features)
    return torch.randn(rows, features, generator=generator).to(dtype)


def high_first(weight):
    fields = {name: getattr(weight, name) for name in ("qdata", "scale", "per_tensor_scale")}
    return type(weight)(
        **fields, block_size=16, orig_dtype=weight.dtype, is_swizzled_scales=True, high_first=True
    )


ACTIVATION = QuantizeTensorToNVFP4Kwargs(
    block_size=16, is_swizzled_scales=True, use_dynamic_per_tensor_scale=True
)
WEIGHTS = {
    "int8": lambda: ConvRotInt8Tensor.from_hp(dense(), group_size=16),
    "int8-static": lambda: ConvRotInt8Tensor.from_hp(
        dense(dtype=torch.float16), group_size=64, act_per_tensor_scale=torch.tensor(0.25)
    ),
    "int8-transposed": lambda: ConvRotInt8Tensor.from_hp(dense(), group_size=16).t(),
    "int8-conv3d": lambda: ConvRotInt8Tensor.from_hp(torch.randn(2, 64, 3, 3, 3), group_size=64),
    "nvfp4": lambda: PiperNVFP4Tensor.from_hp(dense(dtype=torch.float32)),
    "nvfp4-full": lambda: PiperNVFP4Tensor.from_hp(
        dense(131, 80),
        compute_per_tensor_scale=True,
        act_per_tensor_scale=torch.tensor(0.125),
        is_swizzled_scales=True,
        act_quant_kwargs=ACTIVATION,
    ),
    "nvfp4-transposed": lambda: PiperNVFP4Tensor.from_hp(dense(), is_swizzled_scales=True).t(),
    "nvfp4-high-first": lambda: high_first(
        PiperNVFP4Tensor.from_hp(dense(), compute_per_tensor_scale=True, is_swizzled_scales=True)
    ),
    "convrot-nvfp4": lambda: ConvRotNVFP4Tensor.from_hp(
        dense(130, 128), group_size=64, compute_per_tensor_scale=True, is_swizzled_scales=True
    ),
    "row-int8": lambda: RowQuantizedWeight.from_hp(
        dense(5, 23), act_per_tensor_scale=torch.tensor(0.5)
    ),
    "row-fp8": lambda: RowQuantizedWeight.from_hp(
        dense(5, 23, torch.float32), storage_dtype=torch.float8_e4m3fn
    ),
}


@pytest.fixture(params=list(WEIGHTS))
def named_weight(request):
    return request.param, WEIGHTS[request.param]()


@pytest.fixture
def weights():
    return {name: make() for name, make in WEIGHTS.items()}


@pytest.fixture
def path(tmp_path):
    return tmp_path / "weights.safetensors"


ROW_FIELDS = ("qdata", "scale", "act_per_tensor_scale")


def inner_tensors_of(weight):
    names = ROW_FIELDS if isinstance(weight, RowQuantizedWeight) else weight.__tensor_flatten__()[0]
    fields = {name: getattr(weight, name) for name in names}
    return {name: tensor for name, tensor in fields.items() if tensor is not None}


def attributes_of(weight):
    if isinstance(weight, RowQuantizedWeight):
        return {"dtype": weight.logical_dtype}
    return weight.__tensor_flatten__()[1]


def same(left, right):
    return left.dtype == right.dtype and torch.equal(
        left.contiguous().view(-1).view(torch.uint8), right.contiguous().view(-1).view(torch.uint8)
    )


@pytest.fixture
def same_bytes():
    return same


@pytest.fixture
def inner_tensors():
    return inner_tensors_of


@pytest.fixture
def assert_same_weight():
    def check(actual, expected):
        assert type(actual) is type(expected)
        assert tuple(actual.shape) == tuple(expected.shape)
        assert attributes_of(actual) == attributes_of(expected)
        tensors, wanted = inner_tensors_of(actual), inner_tensors_of(expected)
        assert tensors.keys() == wanted.keys()
        for name, tensor in tensors.items():
            assert tensor.shape == wanted[name].shape, name
            assert tensor.stride() == wanted[name].stride(), name
            assert same(tensor, wanted[name]), name
        assert torch.equal(actual.dequantize(), expected.dequantize())

    return check
