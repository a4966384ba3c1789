"""The exception types and message fragments that callers of the weight classes match."""

import pytest
import torch

from piper_kernels.gguf import GGUFQuantizationType
from piper_kernels.weights.convrot.int8 import ConvRotInt8Tensor, _update
from piper_kernels.weights.convrot.nvfp4 import ConvRotNVFP4Tensor
from piper_kernels.weights.nvfp4 import PiperNVFP4Tensor
from piper_kernels.weights.sharding import shard_quantized_weight

CODES, SCALE = torch.zeros(8, 64, dtype=torch.int8), torch.ones(8, 1)
NVFP4_CODES = torch.zeros(8, 32, dtype=torch.uint8)
BLOCK_SCALE = torch.ones(8, 4).to(torch.float8_e4m3fn)
PACKED = torch.zeros(4, 68, dtype=torch.uint8)  # Two Q8_0 blocks in a row.
QUANTIZE = ConvRotInt8Tensor.from_hp
Q8_0 = GGUFQuantizationType.Q8_0


def int8(dtype=torch.float32):
    return ConvRotInt8Tensor.from_hp(torch.ones(8, 64, dtype=dtype), group_size=64)


def nvfp4():
    return PiperNVFP4Tensor.from_hp(torch.ones(8, 64), is_swizzled_scales=True)


def rotated():
    return ConvRotNVFP4Tensor.from_hp(torch.ones(8, 64), group_size=16, is_swizzled_scales=True)


CLASSES = {"int8": int8, "nvfp4": nvfp4, "convrot-nvfp4": rotated}


def strided_apart():
    weight = int8()
    weight.qdata = torch.zeros(64, 8, dtype=torch.int8).t()
    return weight


def static(scale):
    return ConvRotInt8Tensor(CODES, SCALE, 16, act_per_tensor_scale=scale)


def stored(**changes):
    fields = {"qdata": CODES, "scale": SCALE, "group_size": 16} | changes
    return ConvRotInt8Tensor(**fields)


def update(rows=8, features=64, dtype=torch.float32, **options):
    return int8().add_(torch.ones(rows, features, dtype=dtype), **options)


def conv_update():
    codes = torch.zeros(2, 3, 3, 3, 64, dtype=torch.int8)
    options = {"group_size": 64, "logical_dtype": torch.float32, "alpha": 1, "rounding_seed": None}
    return _update.add_(codes, torch.ones(2, 1), torch.ones(2, 64), **options)


def needs_grad():
    return int8().add_(torch.ones(8, 64, requires_grad=True))


def shard(weight, **options):
    return shard_quantized_weight(weight, **({"dim": 0, "start": 0, "length": 4} | options))


def from_hp(**options):
    return PiperNVFP4Tensor.from_hp(torch.ones(8, 64), **options)


PACKED_STORAGE = ConvRotInt8Tensor.from_quantized
WRONG_ROWS = torch.zeros(5, 68, dtype=torch.uint8)

TABLE = [
    # Construction
    (lambda: stored(group_size=32), ValueError, "group size must be one of"),
    (lambda: QUANTIZE(torch.ones(8, 64), group_size=8), ValueError, "group size must be one of"),
    (
        lambda: ConvRotNVFP4Tensor.from_hp(torch.ones(8, 64), group_size=32),
        ValueError,
        "group size must be one of",
    ),
    (lambda: stored(group_size=256), ValueError, "is not divisible by group size"),
    (lambda: QUANTIZE(torch.ones(8, 24), group_size=16), ValueError, "is not divisible by group"),
    (
        lambda: stored(scale=SCALE.view(-1)),
        ValueError,
        r"scale must be float32 with shape \(8, 1\)",
    ),
    (lambda: stored(scale=SCALE.half()), ValueError, r"scale must be float32 with shape \(8, 1\)"),
    (
        lambda: PACKED_STORAGE(CODES, torch.ones(1, 8), group_size=16),
        ValueError,
        "from_quantized scale must have shape",
    ),
    (
        lambda: stored(qdata=torch.zeros(64, 8, dtype=torch.int8).t()),
        ValueError,
        "qdata and scale must be contiguous",
    ),
    (lambda: strided_apart().dequantize(), ValueError, "qdata and scale must be contiguous"),
    (
        lambda: torch.nn.functional.linear(torch.ones(2, 64), strided_apart()),
        ValueError,
        "qdata and scale must be contiguous",
    ),
    (
        lambda: strided_apart().add_(torch.ones(8, 64)),
        ValueError,
        "qdata and scale must be contiguous",
    ),
    (lambda: QUANTIZE(torch.ones(2, 8, 64), group_size=16), ValueError, "must be 2-D"),
    (
        lambda: QUANTIZE(torch.ones(8, 64, dtype=torch.float64), group_size=16),
        ValueError,
        "must use float16, bfloat16, or float32",
    ),
    (
        lambda: QUANTIZE(torch.ones(8, 64, device="meta"), group_size=16),
        ValueError,
        "cannot quantize a meta tensor",
    ),
    (
        lambda: PiperNVFP4Tensor.from_hp(torch.ones(8, 64, device="meta")),
        ValueError,
        "cannot quantize a meta tensor",
    ),
    (lambda: static(torch.ones(1)), ValueError, "FP32 scalar"),
    (lambda: static(torch.tensor(1.0).half()), ValueError, "FP32 scalar"),
    (
        lambda: PiperNVFP4Tensor(NVFP4_CODES, BLOCK_SCALE, 16, torch.float32, high_first=1),
        TypeError,
        "high_first must be bool",
    ),
    (
        lambda: from_hp(compute_per_tensor_scale=True, per_tensor_scale=torch.tensor(1.0)),
        ValueError,
        "both compute and receive",
    ),
    (
        lambda: ConvRotNVFP4Tensor.from_hp(torch.ones(8, 64)),
        TypeError,
        "requires a group size",
    ),
    (lambda: ConvRotNVFP4Tensor.from_torchao(nvfp4()), TypeError, "requires a group size"),
    (
        lambda: ConvRotNVFP4Tensor.from_torchao(rotated(), group_size=64),
        ValueError,
        "uses group size 16, not 64",
    ),
    # Updates
    (lambda: update(rows=7), ValueError, "shape mismatch"),
    (lambda: int8().addmm_(torch.ones(8, 2), torch.ones(3, 64)), ValueError, "shape mismatch"),
    (
        lambda: int8().addmm_(torch.ones(8), torch.ones(2, 64)),
        ValueError,
        "matrices must be 2-D",
    ),
    (lambda: update(dtype=torch.float16), ValueError, "logical dtype"),
    (lambda: int8().add_(torch.ones(8, 64).to_sparse()), ValueError, "strided layout"),
    (conv_update, ValueError, "requires 2-D qdata"),
    (lambda: update(rounding_seed=-1), ValueError, "unsigned 64-bit integer"),
    (lambda: update(rounding_seed=2**64), ValueError, "unsigned 64-bit integer"),
    (lambda: update(rounding_seed=1.5), TypeError, "unsigned 64-bit integer"),
    (lambda: update(rounding_seed=True), TypeError, "unsigned 64-bit integer"),
    (needs_grad, RuntimeError, "does not support autograd"),
    # GGUF
    (
        lambda: ConvRotInt8Tensor.from_gguf(PACKED, quant_type=Q8_0, group_size=64),
        ValueError,
        "requires a supported Triton accelerator",
    ),
    (
        lambda: int8().copy_from_gguf_(WRONG_ROWS, quant_type=Q8_0, allow_cpu=True),
        ValueError,
        "output storage is incompatible",
    ),
    (
        lambda: rotated().copy_from_gguf_(WRONG_ROWS, quant_type=Q8_0, allow_cpu=True),
        ValueError,
        "output storage is incompatible",
    ),
    (
        lambda: ConvRotInt8Tensor.from_gguf(PACKED, group_size=64, allow_cpu=True),
        TypeError,
        "requires quant_type",
    ),
    # Shards
    (lambda: shard(torch.ones(8, 64)), TypeError, "requires a Piper quantized weight"),
    (lambda: shard(int8(), start=0.0), TypeError, "integers"),
    (lambda: shard(int8(), dim=2), IndexError, "dimension"),
    (lambda: shard(int8(), length=0), ValueError, "nonempty"),
    (lambda: shard(int8(), start=6), ValueError, "within"),
    (lambda: shard(nvfp4(), dim=1, length=8), ValueError, "align"),
    (lambda: shard(int8(), dim=1, length=16), ValueError, "rotation group size 64"),
    (lambda: shard(int8().t()), NotImplementedError, "transposed"),
]
EVERY_CLASS = [
    (lambda weight: weight.view(-1), NotImplementedError, "only supports same-shape views"),
    (
        lambda weight: weight.as_strided((4, 64), (64, 1)),
        NotImplementedError,
        "unchanged layout or a matrix transpose",
    ),
    (lambda weight: torch.ones(2, 8).mm(weight), NotImplementedError, "transposed"),
    (
        lambda weight: torch.nn.functional.linear(torch.ones(2, 8), weight.t()),
        NotImplementedError,
        "transposed",
    ),
    (lambda weight: weight.t().add_(torch.ones(64, 8)), NotImplementedError, "transposed"),
    (
        lambda weight: torch.addmm(torch.ones(8), torch.ones(2, 64), weight.t(), beta=2),
        NotImplementedError,
        "quantized addmm requires",
    ),
    (
        lambda weight: torch.addmm(torch.ones(2, 8), torch.ones(2, 64), weight.t()),
        NotImplementedError,
        "quantized addmm requires",
    ),
    (lambda weight: weight.add_(torch.ones(7, 64)), ValueError, "shape mismatch"),
    (lambda weight: weight.add_(torch.ones(8, 64).half()), ValueError, "logical dtype"),
    (
        lambda weight: weight.add_(torch.ones(8, 64), rounding_seed=-1),
        ValueError,
        "unsigned 64-bit integer",
    ),
    (
        lambda weight: weight.addmm_(torch.ones(8, 1, requires_grad=True), torch.ones(1, 64)),
        RuntimeError,
        "does not support autograd",
    ),
]


@pytest.mark.parametrize(
    ("call", "error", "fragment"),
    TABLE,
    ids=[f"{index}-{fragment}" for index, (_, _, fragment) in enumerate(TABLE)],
)
def test_fragment(call, error, fragment):
    with pytest.raises(error, match=fragment):
        call()


@pytest.mark.parametrize("name", CLASSES)
@pytest.mark.parametrize(
    ("call", "error", "fragment"),
    EVERY_CLASS,
    ids=[f"{index}-{fragment}" for index, (_, _, fragment) in enumerate(EVERY_CLASS)],
)
def test_fragment_of_every_class(name, call, error, fragment):
    weight = CLASSES[name]()
    with pytest.raises(error, match=fragment):
        call(weight)


@pytest.mark.parametrize("shape", [(0, -1), (-1, 0)])
def test_ambiguous_view(shape):
    weight = ConvRotInt8Tensor(
        torch.zeros(0, 64, dtype=torch.int8), torch.ones(0, 1), 16, torch.float32
    )
    with pytest.raises(RuntimeError, match="ambiguous"):
        weight.view(shape)
