"""The reference row of every stored layout: chosen on the CPU, equal to what the format says."""

import pytest
import torch
from torch import nn
from torch.nn import functional

from phyai.dispatch import KernelQuery, Selector
from phyai_quant import Granularity, QDType, QuantScheme, TensorQuant, materialize
from phyai_quant.specs.base import AllocationRequest

BLOCK, CHANNEL = Granularity.BLOCK, Granularity.PER_CHANNEL
INT8_TOKENS = TensorQuant(QDType.INT8, CHANNEL, dynamic=True)
FP8_TOKENS = TensorQuant(QDType.FP8_E4M3, CHANNEL, dynamic=True)
NVFP4 = TensorQuant(QDType.NVFP4, BLOCK, micro_scaled=True, block_shape=(1, 16))
NVFP4_ROTATED = TensorQuant(
    QDType.NVFP4, BLOCK, micro_scaled=True, block_shape=(1, 16), rotation_group=16
)
NVFP4_INPUT = TensorQuant(QDType.NVFP4, BLOCK, dynamic=True, micro_scaled=True, block_shape=(1, 16))
ROWS, COLUMNS = 6, 64


def integers(low, high, *shape, dtype=torch.int8):
    return torch.randint(low, high, shape, generator=torch.Generator().manual_seed(1)).to(dtype)


def scales(*shape):
    return torch.rand(shape, generator=torch.Generator().manual_seed(2)) + 0.5


def dense():
    return torch.randn(ROWS, COLUMNS, generator=torch.Generator().manual_seed(3))


def nvfp4_tensors():
    return {
        "weight": integers(0, 256, ROWS, COLUMNS // 2, dtype=torch.uint8),
        "weight_scale": scales(ROWS, COLUMNS // 16).to(torch.float8_e4m3fn),
        "weight_scale_2": torch.tensor(0.3),
    }


def fp8(dtype, stored, act=None):
    return (
        QuantScheme(TensorQuant(dtype, CHANNEL), act),
        {"weight": dense().to(stored), "weight_scale": scales(ROWS, 1)},
    )


GROUPS = TensorQuant(QDType.INT4, BLOCK, block_shape=(1, 32))
INT8_ROWS = {"weight": integers(-128, 128, ROWS, COLUMNS), "weight_scale": scales(ROWS, 1)}
CASES = {
    "fp8_dequant": fp8(QDType.FP8_E4M3, torch.float8_e4m3fn),
    "fp8_dequant-tokens": fp8(QDType.FP8_E4M3, torch.float8_e4m3fn, FP8_TOKENS),
    "fp8_dequant-e5m2": fp8(QDType.FP8_E5M2, torch.float8_e5m2),
    "int8_rows": (QuantScheme(TensorQuant(QDType.INT8, CHANNEL)), INT8_ROWS),
    "int8_rows-tokens": (QuantScheme(TensorQuant(QDType.INT8, CHANNEL), INT8_TOKENS), INT8_ROWS),
    "int_packed": (
        QuantScheme(GROUPS),
        {
            "weight_packed": integers(-(2**31), 2**31, ROWS, COLUMNS // 8, dtype=torch.int32),
            "weight_scale": scales(ROWS, COLUMNS // 32),
        },
    ),
    "nvfp4_linear": (QuantScheme(NVFP4), nvfp4_tensors()),
    "nvfp4_linear-nvfp4": (QuantScheme(NVFP4, NVFP4_INPUT), nvfp4_tensors()),
    "nvfp4_128x4": (QuantScheme(NVFP4, NVFP4_INPUT), nvfp4_tensors()),
    "mxfp4_linear": (
        QuantScheme(TensorQuant(QDType.MXFP4, BLOCK, micro_scaled=True, block_shape=(1, 32))),
        {
            "weight_packed": integers(0, 256, ROWS, COLUMNS // 2, dtype=torch.uint8),
            "weight_scale": integers(120, 132, ROWS, COLUMNS // 32, dtype=torch.uint8),
        },
    ),
    "convrot_int8": (
        QuantScheme(TensorQuant(QDType.INT8, CHANNEL, rotation_group=16), INT8_TOKENS),
        INT8_ROWS,
    ),
    "convrot_nvfp4": (QuantScheme(NVFP4_ROTATED, NVFP4_INPUT), nvfp4_tensors()),
    "convrot_nvfp4-online": (QuantScheme(NVFP4_ROTATED, online=True), {"weight": dense()}),
    "humming_raw": (QuantScheme(GROUPS, online=True), {"weight": dense()}),
    "humming_raw-tokens": (QuantScheme(GROUPS, INT8_TOKENS, online=True), {"weight": dense()}),
}


class Layer(nn.Module):
    def __init__(self, spec, tensors, dtype):
        super().__init__()
        self.prefix, self.spec = "layer", spec
        spec.allocate(self, AllocationRequest((ROWS, COLUMNS), dtype))
        for name, tensor in tensors.items():
            spec.load_weight(self, name, tensor)
        spec.process_after_loading(self)


def rounded(x, scheme):
    """What integer and fp8 inputs with a scale per token are read back as, in fp64."""
    rows = x.double()
    top = {QDType.INT8: 127.0, QDType.FP8_E4M3: 448.0}[scheme.input.dtype]
    scale = (rows.abs().amax(-1, keepdim=True) / top).clamp_min(1e-12)
    if scheme.input.dtype is QDType.INT8:
        return (rows / scale).round() * scale
    return (rows / scale).float().to(torch.float8_e4m3fn).double() * scale


def hadamard(x):
    """Rotates groups of 16 along K by the Kronecker square of the regular Hadamard matrix of 4."""
    four = torch.ones(4, 4, dtype=torch.float64) - 2 * torch.eye(4, dtype=torch.float64).flip(1)
    matrix = torch.kron(four, four) / 4
    return (x.double().unflatten(-1, (-1, 16)) @ matrix).flatten(-2)


@pytest.fixture(params=CASES)
def case(request):
    scheme, tensors = CASES[request.param]
    kernel = request.param.partition("-")[0]
    layer = Layer(
        materialize(scheme, 100 if kernel == "nvfp4_128x4" else None), tensors, torch.float32
    )
    return f"torch.gemm.{kernel}", scheme, layer


def test_each_layout_has_its_reference_row(case):
    kernel, _, layer = case
    query = KernelQuery.build(
        "gemm",
        device="cpu",
        dtype={"input": "fp32", "output": "fp32"},
        quant=layer.spec.physical_signature,
        dims={"M": 3, "N": ROWS, "K": COLUMNS},
    )
    trace = Selector(device="cpu").explain(query)
    usable = {row.kernel_id for row in trace.candidates if row.kernel_id.startswith("torch.")}
    assert kernel in usable
    assert trace.selected == ("piper.gemm.convrot_int8" if "convrot_int8" in kernel else kernel)


@pytest.mark.parametrize("lead", [(1,), (7,), (2, 3)])
def test_the_row_computes_what_the_format_means(case, row, strided, relative_error, lead):
    kernel, scheme, layer = case
    x = strided(*lead, COLUMNS)
    x[..., 0, :] *= 1e4
    bias = torch.randn(ROWS, generator=torch.Generator().manual_seed(5))
    weight = layer.spec.dequantize_weight(layer)
    seen = x.double()
    if kernel.endswith("convrot_int8"):
        seen = hadamard(rounded(hadamard(x), scheme))
    elif scheme.input is not None and scheme.input.dtype is not QDType.NVFP4:
        seen = rounded(x, scheme)
    elif scheme.input is not None:
        seen = layer.spec.fake_quantize_activation(x, layer)
    out = row(kernel)(layer, x, bias)
    expected = functional.linear(seen.double(), weight.double(), bias.double())
    assert relative_error(out, expected) < 2e-6
    exact = functional.linear(x.double(), weight.double(), bias.double())
    assert (relative_error(exact, expected) > 1e-4) is (scheme.input is not None)


def test_a_zero_row_gives_the_bias_and_no_row_gives_none(case, row):
    kernel, _, layer = case
    bias = torch.randn(ROWS)
    out = row(kernel)(layer, torch.zeros(2, COLUMNS), bias)
    assert torch.equal(out, bias.expand(2, ROWS))
    empty = row(kernel)(layer, torch.zeros(0, 3, COLUMNS, dtype=torch.bfloat16), None)
    assert (empty.shape, empty.dtype) == ((0, 3, ROWS), torch.bfloat16)
