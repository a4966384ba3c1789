import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

from piper_kernels.linear.convrot.int8 import _ops, reference
from piper_kernels.weights.convrot.int8 import ConvRotInt8Tensor

ops = torch.ops.piper_kernels


def operands(dtype=torch.float32, lead=(5,), bias_dtype=torch.float32):
    generator = torch.Generator().manual_seed(9)
    weight = ConvRotInt8Tensor.from_hp(
        torch.randn(7, 64, generator=generator).to(dtype), group_size=16
    )
    x = torch.randn(*lead, 64, generator=generator).to(dtype)
    bias = None if bias_dtype is None else torch.randn(7, generator=generator).to(bias_dtype)
    return x, weight, bias


@pytest.mark.parametrize("lead", [(), (5,), (2, 3), (0,)])
@pytest.mark.parametrize("options", [{}, {"bias_dtype": None}, {"dtype": torch.bfloat16}])
def test_opcheck_linear(lead, options):
    x, weight, bias = operands(lead=lead, **options)
    args = (x, weight.qdata, weight.scale, bias, 16)
    torch.library.opcheck(_ops.linear, args)
    torch.library.opcheck(_ops.linear, (*args, "gelu_tanh", torch.tensor(0.5)))


@pytest.mark.parametrize("activation", [None, "gelu_tanh", "swiglu"])
@pytest.mark.parametrize("scale", [None, torch.tensor(0.5)])
def test_opcheck_prepare_input(activation, scale):
    for x in (torch.randn(3, 64), torch.randn(128), torch.randn(64, 6).t()):
        torch.library.opcheck(_ops.prepare_input, (x, 16, activation, scale))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_opcheck_linear_prepared(dtype):
    x, weight, bias = operands()
    codes, scale = reference.prepare_input(x, 16)
    args = (codes, scale, weight.qdata, weight.scale, bias, dtype)
    torch.library.opcheck(_ops.linear_prepared, args)


@pytest.mark.parametrize("blocks", [None, torch.tensor([64, 3], dtype=torch.int32)])
def test_opcheck_dequantized_input_mean(blocks):
    codes, scale = reference.prepare_input(torch.randn(2, 128, 64), 16)
    torch.library.opcheck(_ops.dequantized_input_mean, (codes, scale, blocks))
    mean = ops.convrot_int8_dequantized_input_mean(codes, scale, blocks)
    assert torch.equal(mean, reference.dequantized_input_mean(codes, scale, blocks))


def test_prepared_projections_equal_the_linear():
    x, weight, bias = operands(torch.bfloat16, (2, 3))
    codes, scale = ops.convrot_int8_prepare_input(x, 16)
    prepared = ops.convrot_int8_linear_prepared(
        codes, scale, weight.qdata, weight.scale, bias, torch.bfloat16
    )
    whole = ops.convrot_int8_linear(x, weight.qdata, weight.scale, bias, 16)
    assert torch.equal(prepared, whole)
    assert torch.equal(whole, functional.linear(x, weight, bias))


class Recorder(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.functions = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.functions.append(func)
        return func(*args, **(kwargs or {}))


def test_eager_linear_is_one_operator():
    x, weight, bias = operands()
    with Recorder() as recorder:
        functional.linear(x, weight, bias)
    assert ops.convrot_int8_linear.default in recorder.functions


class Marked:
    """A backend whose results can be told apart."""

    def __init__(self, value):
        self.value = value

    def linear(self, x, qdata, *rest):
        return x.new_full((*x.shape[:-1], qdata.shape[0]), self.value)


def test_backend_is_resolved_at_every_execution(monkeypatch):
    x, weight, _ = operands()
    compiled = torch.compile(functional.linear, backend="aot_eager", fullgraph=True)
    first = compiled(x, weight)
    assert torch.equal(first, functional.linear(x, weight))
    for value in (1.0, 2.0):
        monkeypatch.setattr(_ops, "select_linear_backend", lambda device, v=value: Marked(v))
        assert compiled(x, weight).unique().tolist() == [value]


def test_fakes_select_no_backend(monkeypatch):
    def refuse(device):
        raise AssertionError("a fake asked for a backend")

    monkeypatch.setattr(_ops, "select_linear_backend", refuse)
    with FakeTensorMode():
        x = torch.empty(2, 3, 128, dtype=torch.bfloat16)
        qdata = torch.empty(7, 64, dtype=torch.int8)
        scale, bias = torch.empty(7, 1), torch.empty(7)
        y = ops.convrot_int8_linear(x, qdata, scale, bias, 16, "swiglu", torch.empty(()))
        assert (y.shape, y.dtype) == ((2, 3, 7), torch.bfloat16)
        codes, rows = ops.convrot_int8_prepare_input(x, 16, "swiglu")
        assert (codes.shape, codes.dtype) == ((2, 3, 64), torch.int8)
        assert (rows.shape, rows.dtype) == ((2, 3), torch.float32)
        z = ops.convrot_int8_linear_prepared(codes, rows, qdata, scale, None, torch.float16)
        assert (z.shape, z.dtype) == ((2, 3, 7), torch.float16)
        mean = ops.convrot_int8_dequantized_input_mean(codes, rows)
        assert (mean.shape, mean.dtype) == ((2, 64), torch.float32)


@pytest.mark.parametrize("scale", [None, torch.tensor(0.5)])
@pytest.mark.parametrize("lead", [(), (1,), (0,)])
def test_results_never_alias_inputs(scale, lead):
    x, weight, bias = operands(lead=lead)
    inputs = [x, weight.qdata, weight.scale, bias] + ([] if scale is None else [scale])
    codes, rows = ops.convrot_int8_prepare_input(x, 16, None, scale)
    y = ops.convrot_int8_linear(x, weight.qdata, weight.scale, bias, 16, None, scale)
    storages = {tensor.untyped_storage()._cdata for tensor in inputs}
    for result in (codes, rows, y):
        assert result.untyped_storage()._cdata not in storages
    assert codes.untyped_storage()._cdata != rows.untyped_storage()._cdata
