"""Fuzz of the linear and network operators: whole against composed, and against FP64."""

import pytest
import torch
from fuzz_cases import DTYPES, LAYOUTS, VALUES, lay_out, make_values
from fuzz_files import run_cases
from torch.nn import functional

from piper_kernels.fusions.convrot_int8_gelu_ffn._ops import gelu_ffn
from piper_kernels.fusions.convrot_int8_swiglu_ffn._ops import swiglu_ffn
from piper_kernels.linear.convrot import convrot_int8_linear
from piper_kernels.linear.convrot.nvfp4 import _ops as _convrot_nvfp4_operators  # noqa: F401
from piper_kernels.linear.nvfp4 import _ops as _nvfp4_operators  # noqa: F401
from piper_kernels.weights.convrot.int8 import ConvRotInt8Tensor
from piper_kernels.weights.convrot.nvfp4 import ConvRotNVFP4Tensor
from piper_kernels.weights.nvfp4 import PiperNVFP4Tensor

OPS = torch.ops.piper_kernels
ROWS = (0, 1, 2, 7, 31, 33, 64, 129)
OUTPUTS = (1, 3, 21, 64, 130)
ACTIVATIONS = {
    None: lambda x: x,
    "gelu_tanh": lambda x: functional.gelu(x, approximate="tanh"),
    "swiglu": lambda x: x.chunk(2, -1)[0] * functional.silu(x.chunk(2, -1)[1]),
}
ORDINARY = ("normal", "zeros", "integers", "outlier column", "sparse", "constant")
FAULTS = (
    "features", "dtype", "scalar", "bias length", "bias dtype", "bias type", "activation",
    "gradient", "transposed", "dense weight",
)  # fmt: skip


def seeded(draw):
    return torch.Generator().manual_seed(draw.randrange(2**32))


def make_bias(draw, rows):
    kind = draw.choice([None, torch.float16, torch.bfloat16, torch.float32])
    bias = None if kind is None else torch.randn(2 * rows, generator=seeded(draw)).to(kind)
    return bias if bias is None else draw.choice([bias[:rows], bias[::2]])


def assert_same(found, expected):
    """Check equal bits, NaN included."""
    torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=True)


def int8_case(draw):
    """Return an input, a weight, a bias and an activation."""
    dtype, group = DTYPES[draw.choice(sorted(DTYPES))], draw.choice([16, 64, 256])
    features, rows = group * draw.choice([1, 2, 3]), draw.choice(OUTPUTS)
    dense = torch.randn(rows, features, generator=seeded(draw)).to(dtype) / features**0.5
    static = torch.tensor(0.03) if draw.random() < 0.3 else None
    weight = ConvRotInt8Tensor.from_hp(dense, group_size=group, act_per_tensor_scale=static)
    activation, kind = draw.choice(sorted(ACTIVATIONS, key=str)), draw.choice(VALUES)
    width = features * (2 if activation == "swiglu" else 1)
    count = draw.choice(ROWS)
    x = make_values(kind, max(count, 1), width, dtype, seeded(draw))
    if draw.random() < 0.6 and count:
        layout = draw.choice(LAYOUTS[:-1])
        x = lay_out(x, layout)
    return x[:count], weight, make_bias(draw, rows), activation, kind


def test_whole_and_composed_int8_linears_agree():
    def check(draw):
        x, weight, bias, activation, kind = int8_case(draw)
        found = convrot_int8_linear(x, weight, bias, activation_fn=activation)
        assert found.dtype == x.dtype
        assert found.shape == (*x.shape[:-1], weight.shape[0])
        scale = weight.act_per_tensor_scale
        codes = OPS.convrot_int8_prepare_input(x, weight.group_size, activation, scale)
        storage = (weight.qdata, weight.scale, bias, x.dtype)
        assert_same(found, OPS.convrot_int8_linear_prepared(*codes, *storage))
        if kind not in ORDINARY or scale is not None or not x.numel():
            return
        wide = ACTIVATIONS[activation](x.double())
        dense = weight.dequantize(torch.float32).double()
        shift = 0 if bias is None else bias.double()
        expected = wide @ dense.t() + shift
        # A row is off by half a step of its rotated maximum, in every one of its codes.
        step = wide.norm(dim=-1, keepdim=True) * dense.norm(dim=-1) / 40
        slack = step + 4 * torch.finfo(x.dtype).eps * (expected.abs() + 1)
        assert ((found.double() - expected).abs() <= slack).all()

    run_cases("linear", 0.3, check, __file__)


def break_call(draw, x, weight, bias, activation):
    """Return the call with one thing wrong."""
    fault, rows = draw.choice(FAULTS), weight.shape[0]
    if fault == "features":
        x = torch.cat([x, x[..., :1]], -1)
    elif fault == "dtype":
        others = [dtype for dtype in (*DTYPES.values(), torch.float64) if dtype != x.dtype]
        x = x.to(draw.choice(others))
    elif fault == "scalar":
        x = torch.zeros((), dtype=x.dtype)
    elif fault == "bias length":
        bias = torch.zeros(rows + 1)
    elif fault == "bias dtype":
        bias = torch.zeros(rows, dtype=draw.choice([torch.int32, torch.float64, torch.bool]))
    elif fault == "bias type":
        bias = draw.choice([[0.0] * rows, 3, "bias"])
    elif fault == "activation":
        activation = draw.choice(["relu", "", "GELU"])
    elif fault == "gradient":
        x = x.detach().clone().requires_grad_()
    elif fault == "transposed":
        weight = weight.t()
    else:
        weight = weight.dequantize()
    return fault, x, weight, bias, activation


def test_int8_calls_that_do_not_fit_are_refused():
    errors = {
        "bias type": TypeError,
        "dense weight": TypeError,
        "gradient": RuntimeError,
        "transposed": NotImplementedError,
    }

    def check(draw):
        fault, x, weight, bias, activation = break_call(draw, *int8_case(draw)[:4])
        with pytest.raises(errors.get(fault, ValueError)) as caught:
            convrot_int8_linear(x, weight, bias, activation_fn=activation)
        assert len(str(caught.value)) > 25, fault

    run_cases("linear-faults", 0.4, check, __file__)


def test_whole_and_composed_nvfp4_linears_agree():
    """Preparing an input and multiplying it is the linear, bit for bit."""

    def check(draw):
        group, rows = draw.choice([0, 16, 64]), draw.choice(OUTPUTS)
        features = draw.choice([64, 128, 192])
        dense = torch.randn(rows, features, generator=seeded(draw)).bfloat16()
        options = {"compute_per_tensor_scale": True, "is_swizzled_scales": True}
        kind = ConvRotNVFP4Tensor if group else PiperNVFP4Tensor
        groups = (group,) if group else ()
        named = {"group_size": group} if group else {}
        weight = kind.from_hp(dense, **options, **named)
        x = make_values(draw.choice(ORDINARY), 33, features, torch.bfloat16, seeded(draw))
        x = lay_out(x, draw.choice(LAYOUTS))[: draw.choice([1, 5, 33])]
        bias = make_bias(draw, rows)
        static = torch.tensor(0.002) if draw.random() < 0.4 else None
        prefix = "convrot_" if group else ""
        storage = (weight.qdata, weight.scale, weight.per_tensor_scale.view(()))
        whole = getattr(OPS, f"{prefix}nvfp4_linear")
        prepare = getattr(OPS, f"{prefix}nvfp4_prepare_input")
        found = whole(x, *storage, static, bias, static is None, *groups)
        prepared = prepare(x, static, static is None, *groups)
        composed = OPS.nvfp4_linear_prepared(*prepared, *storage, bias, x.dtype)
        assert torch.equal(found, composed)
        assert found.isfinite().all()

    run_cases("linear-nvfp4", 0.2, check, __file__)


def test_networks_equal_their_linears():
    """Chunks of any height give the bits of the unfused network."""

    def check(draw):
        dtype = DTYPES[draw.choice(sorted(DTYPES))]
        features, inner, outputs = (16 * draw.choice([1, 2, 5]) for _ in range(3))
        scales = [draw.choice([None, torch.tensor(0.03)]) for _ in range(3)]
        shapes = ((inner, features), (inner, features), (outputs, inner))
        weights = [
            ConvRotInt8Tensor.from_hp(
                torch.randn(shape, generator=seeded(draw)).to(dtype) / shape[1] ** 0.5,
                group_size=16,
                act_per_tensor_scale=scale,
            )
            for shape, scale in zip(shapes, scales, strict=True)
        ]
        biases = [make_bias(draw, weight.shape[0]) for weight in weights]
        kind, count = draw.choice(VALUES), draw.choice(ROWS)
        x = make_values(kind, max(count, 1), features, dtype, seeded(draw))[:count]
        gate, value = (
            functional.linear(x, *pair) for pair in list(zip(weights, biases, strict=True))[:2]
        )
        is_gelu, first = draw.random() < 0.5, 0
        if is_gelu:
            hidden, activation, operator, first = value, "gelu_tanh", gelu_ffn, 1
        else:
            hidden, activation, operator = torch.cat((value, gate), -1), "swiglu", swiglu_ffn
        expected = convrot_int8_linear(hidden, weights[2], biases[2], activation_fn=activation)
        parts = list(zip(weights, biases, strict=True))[first:]
        operands = [item for w, b in parts for item in (w.qdata, w.scale, b, w.group_size)]
        rows = draw.choice([16, 32, 64, 4096])
        found = operator(x, *operands, rows, *scales[first:])
        assert_same(found, expected)

    run_cases("networks", 0.15, check, __file__)
