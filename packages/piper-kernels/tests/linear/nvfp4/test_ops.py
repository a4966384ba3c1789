import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional
from torchao.prototype.mx_formats.nvfp4_tensor import QuantizeTensorToNVFP4Kwargs

from piper_kernels.linear.convrot.nvfp4 import _ops as convrot_ops
from piper_kernels.linear.nvfp4 import _backend, _ops, reference
from piper_kernels.linear.nvfp4._portable import PortableBackend
from piper_kernels.weights.convrot.nvfp4 import ConvRotNVFP4Tensor
from piper_kernels.weights.nvfp4 import PiperNVFP4Tensor

FLOATS = [torch.float16, torch.bfloat16, torch.float32]


def randn(*shape, seed=1, dtype=torch.float32):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.fixture
def weight():
    return PiperNVFP4Tensor.from_hp(
        randn(7, 64, seed=2), compute_per_tensor_scale=True, is_swizzled_scales=True
    )


@pytest.fixture
def operands(weight):
    return weight.qdata, weight.scale, weight.per_tensor_scale


def prepared(rows=3, features=64):
    return reference.prepare_input(randn(rows, features), None, True)


def calls(operands):
    """Return ``(operator, arguments)`` of every operator, in several modes."""
    x, swiglu = randn(2, 3, 64, dtype=torch.bfloat16), randn(5, 128)
    static, bias = torch.tensor(0.003), randn(7, 2)[:, 0]
    qdata, scale, _ = operands
    return [
        (_ops.linear, (x, *operands, None, bias, True)),
        (_ops.linear, (x[0, 0], qdata, scale, None, static, None, False, True)),
        (_ops.prepare_input, (x, None, True)),
        (_ops.prepare_input, (swiglu, static, False, "swiglu", True)),
        (_ops.prepare_input, (x, None, False, "gelu_tanh")),
        (_ops.linear_prepared, (*prepared(), *operands, bias, torch.bfloat16)),
        (_ops.linear_prepared, (*prepared(0), qdata, scale, None, None, torch.float32)),
        (_ops.weight_only_linear, (x, *operands, bias, 0, True)),
        (_ops.weight_only_linear, (x.float(), *operands, None, 16, True, True)),
        (convrot_ops.linear, (x, *operands, None, bias, True, 64)),
        (convrot_ops.linear, (x[:, :0], *operands, static, None, False, 16, True)),
        (convrot_ops.prepare_input, (x, None, True, 64)),
        (convrot_ops.prepare_input, (swiglu, static, False, 16, "swiglu", True)),
    ]


@pytest.mark.parametrize("index", range(13))
def test_opcheck(operands, index):
    operator, arguments = calls(operands)[index]
    # PyTorch cannot compare float8 on the CPU, which the test of schemas does; see below.
    utils = ["test_autograd_registration", "test_faketensor"]
    if operator not in (_ops.prepare_input, convrot_ops.prepare_input):
        utils.append("test_aot_dispatch_dynamic")
    torch.library.opcheck(operator, arguments, test_utils=utils)


@pytest.mark.parametrize("index", range(13))
def test_operands_are_neither_changed_nor_aliased(operands, index):
    operator, arguments = calls(operands)[index]
    tensors = [value for value in arguments if isinstance(value, torch.Tensor)]
    before = [value.clone() for value in tensors]
    results = operator(*arguments)
    results = results if isinstance(results, tuple) else (results,)
    for value, old in zip(tensors, before, strict=True):
        assert torch.equal(value.float(), old.float())
    pointers = [value.untyped_storage().data_ptr() for value in (*tensors, *results)]
    given = {pointer for pointer in pointers[: len(tensors)] if pointer}
    assert not given.intersection(pointers[len(tensors) :])


@pytest.mark.parametrize("index", range(13))
def test_fakes_have_the_shapes_of_results(operands, index):
    operator, arguments = calls(operands)[index]
    real = operator(*arguments)
    with FakeTensorMode() as mode:
        fakes = (
            mode.from_tensor(value) if isinstance(value, torch.Tensor) else value
            for value in arguments
        )
        fake = operator(*fakes)
    for got, wanted in zip(
        fake if isinstance(fake, tuple) else (fake,),
        real if isinstance(real, tuple) else (real,),
        strict=True,
    ):
        assert (got.shape, got.dtype, got.stride()) == (wanted.shape, wanted.dtype, wanted.stride())


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("group_size", [0, 16])
@pytest.mark.parametrize("high_first", [False, True])
def test_operators_execute_the_reference(operands, dtype, dynamic, group_size, high_first):
    x, bias = randn(2, 3, 64, dtype=dtype), randn(7)
    static = None if dynamic else torch.tensor(0.003)
    expected = reference.linear(
        x, *operands, static, bias, dynamic, high_first, group_size=group_size
    )
    arguments = (x, *operands, static, bias, dynamic)
    if group_size:
        actual = convrot_ops.linear(*arguments, group_size, high_first)
        halves = convrot_ops.prepare_input(x, static, dynamic, group_size, None, high_first)
    else:
        actual = _ops.linear(*arguments, high_first)
        halves = _ops.prepare_input(x, static, dynamic, None, high_first)
    assert torch.equal(actual, expected)
    composed = _ops.linear_prepared(*halves, *operands, bias, dtype)
    assert torch.equal(composed.view(2, 3, 7), expected)


@pytest.mark.parametrize("activation", ["gelu_tanh", "swiglu"])
def test_preparation_activates(activation):
    x = randn(3, 128)
    actual = convrot_ops.prepare_input(x, None, True, 16, activation)
    expected = reference.prepare_input(x, None, True, activation, group_size=16)
    assert all(torch.equal(a.float(), b.float()) for a, b in zip(actual, expected, strict=True))


def test_a_static_scale_is_not_aliased():
    static = torch.tensor(0.003)
    for rows in (0, 3):
        level = _ops.prepare_input(randn(rows, 64), static, False)[2]
        assert level.data_ptr() != static.data_ptr()
        assert torch.equal(level, static)


def test_portable_results_can_go_into_given_memory(operands):
    backend, x = PortableBackend(), randn(3, 64)
    expected = backend.prepare_input(x, None, True)
    out = tuple(torch.empty_like(part) for part in expected)
    assert backend.prepare_input(x, None, True, out=out) is out
    assert all(torch.equal(a.float(), b.float()) for a, b in zip(out, expected, strict=True))
    result = backend.linear_prepared(*out, *operands, None, torch.float32)
    wide = torch.full((3, 14), 7.0)
    given = backend.linear_prepared(*out, *operands, None, torch.float32, out=wide[:, :7])
    assert given.data_ptr() == wide.data_ptr()
    assert torch.equal(wide, torch.cat((result, torch.full((3, 7), 7.0)), 1))


@pytest.mark.parametrize("swizzled", [False, True])
@pytest.mark.parametrize("high_first", [False, True])
@pytest.mark.parametrize("group_size", [0, 64])
def test_weight_only_is_the_linear_of_the_weight(swizzled, high_first, group_size):
    from piper_kernels.weights.nvfp4._layout import swap_packed_pairs

    cls, options = PiperNVFP4Tensor, {}
    if group_size:
        cls, options = ConvRotNVFP4Tensor, {"group_size": group_size}
    weight = cls.from_hp(
        randn(130, 64), compute_per_tensor_scale=True, is_swizzled_scales=swizzled, **options
    )
    x, bias = randn(2, 64), randn(130)
    expected = functional.linear(x, weight, bias)
    qdata = swap_packed_pairs(weight.qdata) if high_first else weight.qdata
    actual = _ops.weight_only_linear(
        x, qdata, weight.scale, weight.per_tensor_scale, bias, group_size, swizzled, high_first
    )
    assert torch.equal(actual, expected)


class Recorder(PortableBackend):
    def __init__(self):
        self.called = 0

    def linear(self, *operands, **options):
        self.called += 1
        return super().linear(*operands, **options)


@pytest.mark.parametrize("group_size", [0, 64])
def test_a_compiled_graph_has_one_node_and_follows_the_backend(monkeypatch, group_size):
    kwargs = QuantizeTensorToNVFP4Kwargs(is_swizzled_scales=True, use_dynamic_per_tensor_scale=True)
    options = {"compute_per_tensor_scale": True, "act_quant_kwargs": kwargs}
    if group_size:
        weight = ConvRotNVFP4Tensor.from_hp(randn(7, 64), group_size=group_size, **options)
    else:
        weight = PiperNVFP4Tensor.from_hp(randn(7, 64), is_swizzled_scales=True, **options)
    graphs = []

    def backend(graph, inputs):
        from functorch.compile import make_boxed_func
        from torch._dynamo.backends.common import aot_autograd

        def keep(graph, _inputs):
            graphs.append(graph)
            return make_boxed_func(graph.forward)

        return aot_autograd(fw_compiler=keep)(graph, inputs)

    torch._dynamo.reset()
    compiled = torch.compile(functional.linear, backend=backend, fullgraph=True)
    x = randn(3, 64)
    with torch.no_grad():
        expected = functional.linear(x, weight)
        assert torch.equal(compiled(x, weight), expected)
        name = "convrot_nvfp4_linear" if group_size else "nvfp4_linear"
        nodes = [str(node.target) for node in graphs[0].graph.nodes]
        assert nodes.count(f"piper_kernels.{name}.default") == 1
        recorder = Recorder()
        for module in (_ops, convrot_ops):
            monkeypatch.setattr(module, "select_linear_backend", lambda _device: recorder)
        assert torch.equal(compiled(x, weight), expected)
    assert recorder.called == 1
    assert len(graphs) == 1


def test_selection_names_its_reason():
    usable, reason = _backend.support_of_kernels(torch.device("cpu"))
    assert not usable
    assert "cpu" in reason
    assert isinstance(_backend.select_linear_backend(torch.device("cpu")), PortableBackend)


def refusals():
    x = torch.zeros(3, 64)
    return {
        "scalar": ({"input": torch.zeros(())}, ValueError, "must have a feature dimension"),
        "dtype": ({"input": x.double()}, ValueError, "float16, bfloat16 or float32"),
        "sparse": ({"input": x.to_sparse()}, ValueError, "strided layout"),
        "width": ({"input": torch.zeros(3, 40)}, ValueError, "positive multiple of 16"),
        "empty": ({"input": torch.zeros(3, 0)}, ValueError, "positive multiple of 16"),
        "features": ({"input": torch.zeros(3, 32)}, ValueError, "expected 64 input features"),
        "qdata": ({"qdata": torch.zeros(7, 32)}, ValueError, "uint8 codes"),
        "scale": ({"scale": torch.zeros(32, 16)}, ValueError, "float8_e4m3fn scales"),
        "plain": (
            {"scale": torch.zeros(7, 4).to(torch.float8_e4m3fn)},
            ValueError,
            r"swizzled scales of shape \(32, 16\)",
        ),
        "strided": (
            {"qdata": torch.zeros(32, 7, dtype=torch.uint8).t()},
            ValueError,
            "must be contiguous",
        ),
        "level": ({"level": torch.ones(1)}, ValueError, "FP32 scalar"),
        "level dtype": ({"level": torch.ones(()).double()}, ValueError, "FP32 scalar"),
        "static": ({"static": torch.ones(2)}, ValueError, "FP32 scalar"),
        "device": ({"level": torch.ones((), device="meta")}, ValueError, "share a device"),
        "bias": ({"bias": torch.zeros(8)}, ValueError, "bias must have shape"),
        "bias dtype": ({"bias": torch.zeros(7).double()}, ValueError, "FP16, BF16, or FP32"),
    }


@pytest.mark.parametrize("case", refusals())
@pytest.mark.parametrize("fake", [False, True])
def test_refusals(weight, case, fake):
    if fake and case == "sparse":
        pytest.skip("fake tensors have no such layout here")
    changes, error, match = refusals()[case]
    values = {
        "input": torch.zeros(3, 64), "qdata": weight.qdata, "scale": weight.scale,
        "level": weight.per_tensor_scale, "static": None, "bias": None,
    } | changes  # fmt: skip
    if fake:
        mode = FakeTensorMode()
        values = {k: None if v is None else mode.from_tensor(v) for k, v in values.items()}
    arguments = (values[k] for k in ("input", "qdata", "scale", "level", "static", "bias"))
    with pytest.raises((error, RuntimeError), match=match):
        _ops.linear(*arguments, False)


def test_refusals_of_the_other_operators(operands):
    x = torch.zeros(3, 64)
    with pytest.raises(ValueError, match="group size"):
        convrot_ops.linear(x, *operands, None, None, True, 32)
    with pytest.raises(ValueError, match="not divisible by group size 256"):
        convrot_ops.prepare_input(x, None, True, 256)
    with pytest.raises(ValueError, match="group size"):
        convrot_ops.prepare_input(x, None, True, 0)
    with pytest.raises(ValueError, match="multiple of 32 with activation_fn='swiglu'"):
        _ops.prepare_input(torch.zeros(3, 48), None, True, "swiglu")
    with pytest.raises(ValueError, match="activation_fn must be"):
        _ops.prepare_input(x, None, True, "relu")
    with pytest.raises(ValueError, match="logical dtype must be"):
        _ops.linear_prepared(*prepared(), *operands, None, torch.float64)
    with pytest.raises(ValueError, match="expected 64 input features, got 32"):
        _ops.linear_prepared(*prepared(3, 32), *operands, None, torch.float32)
    with pytest.raises(ValueError, match="needs scales of shape"):
        _ops.weight_only_linear(x, *operands, None, 0, False)
