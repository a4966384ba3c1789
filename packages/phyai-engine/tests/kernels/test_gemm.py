from types import SimpleNamespace

import pytest
import torch
from torch import nn

from phyai.dispatch import CallSite, KernelQuery, PolicyError, Selector, policy_from_mapping
from phyai.dispatch.catalog import build_catalog
from phyai_quant.plan import QuantPlan  # noqa: F401 - the quantization wheel must be importable
from phyai_quant.scheme import Granularity, QDType, QuantScheme, TensorQuant

TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 5e-3, torch.float16: 7e-4}


class Layer(nn.Module):
    """A layer as weight formats see it."""

    def __init__(self, spec, weight, dtype):
        from phyai_quant.specs.base import AllocationRequest

        super().__init__()
        self.prefix, self.spec = "layer", spec
        spec.allocate(
            self,
            AllocationRequest(weight_shape=tuple(weight.shape), params_dtype=dtype, device="cpu"),
        )
        for name, tensor in self.tensors(weight).items():
            spec.load_weight(self, name, tensor)
        spec.process_after_loading(self)

    def tensors(self, weight):
        return {"weight": weight}


def linear64(x, weight, bias=None):
    out = x.double() @ weight.double().T
    return out if bias is None else out + bias.double()


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("with_bias", [True, False])
def test_dense(row, strided, relative_error, dtype, with_bias):
    x, weight = strided(2, 3, 17, dtype=dtype), strided(5, 17, dtype=dtype, seed=1)
    bias = strided(5, dtype=dtype, seed=2) if with_bias else None
    out = row("torch.gemm.bf16")(SimpleNamespace(weight=weight), x, bias)
    assert out.shape == (2, 3, 5)
    assert relative_error(out, linear64(x, weight, bias)) < TOLERANCE[dtype]


def convrot_layer(n, k, dtype):
    from phyai_quant.materialize import materialize

    per_channel = Granularity.PER_CHANNEL
    scheme = QuantScheme(
        TensorQuant(QDType.INT8, per_channel, rotation_group=16),
        TensorQuant(QDType.INT8, per_channel, dynamic=True),
        online=True,
    )
    weight = torch.randn(n, k, generator=torch.Generator().manual_seed(1))
    return Layer(materialize(scheme, None), weight, dtype), weight


@pytest.mark.parametrize(
    ("kernel", "limit"), [("torch.gemm.convrot_int8", 0.02), ("piper.gemm.convrot_int8", 0.03)]
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_convrot(row, strided, relative_error, kernel, limit, dtype):
    layer, weight = convrot_layer(7, 48, dtype)
    x = strided(3, 2, 48, dtype=dtype)
    bias = torch.randn(7, generator=torch.Generator().manual_seed(3)).to(dtype)
    out = row(kernel)(layer, x, bias)
    assert out.dtype == dtype
    assert 0 < relative_error(out, linear64(x, weight, bias)) < limit
    if kernel.startswith("torch"):
        seen = layer.spec.fake_quantize_activation(x, layer)
        exact = linear64(seen, layer.spec.dequantize_weight(layer), bias)
        assert relative_error(out, exact) < TOLERANCE[dtype]


def test_convrot_is_chosen_from_the_signature():
    layer, _ = convrot_layer(7, 48, torch.float32)
    catalog = build_catalog()
    selector = Selector(catalog, device="cpu")
    query = KernelQuery.build(
        "gemm",
        device="cpu",
        dtype={"input": "fp32", "output": "fp32", "weight": layer.spec.weight_dtype},
        quant=layer.spec.physical_signature,
        dims={"M": 3, "N": 7, "K": 48},
    )
    assert selector.select(query).kernel_id == "piper.gemm.convrot_int8"
    dense = policy_from_mapping(
        {"overrides": [{"use": "torch.gemm.convrot_int8"}]}, catalog=catalog
    )
    assert (
        Selector(catalog, dense, device="cpu").select(query).kernel_id == "torch.gemm.convrot_int8"
    )


class Fp8Layer(Layer):
    def tensors(self, weight):
        weight_quant = self.spec.weight
        if weight_quant.granularity is Granularity.BLOCK:
            bn, bk = weight_quant.block_shape
            scale = torch.rand(-(-weight.shape[0] // bn), -(-weight.shape[1] // bk)) + 0.5
        elif weight_quant.granularity is Granularity.PER_TENSOR:
            scale = torch.tensor([0.7])
        else:
            scale = torch.rand(weight.shape[0], 1) + 0.5
        self.scale = scale
        return {"weight": weight.to(torch.float8_e4m3fn), "weight_scale": scale}

    def expected_weight(self, weight):
        codes = weight.to(torch.float8_e4m3fn).double()
        scale = self.scale.double()
        if self.spec.weight.block_shape is not None:
            bn, bk = self.spec.weight.block_shape
            scale = scale.repeat_interleave(bn, 0).repeat_interleave(bk, 1)
            scale = scale[: codes.shape[0], : codes.shape[1]]
        return codes * scale


@pytest.mark.parametrize(
    ("granularity", "block"),
    [("per_tensor", None), ("per_channel", None), ("block", (4, 8))],
)
def test_fp8_dequantized(row, strided, relative_error, granularity, block):
    from phyai_quant.specs.fp8 import Fp8Spec

    torch.manual_seed(0)
    weight = torch.randn(6, 20)
    quant = TensorQuant(QDType.FP8_E4M3, Granularity(granularity), block_shape=block)
    layer = Fp8Layer(Fp8Spec(quant), weight, torch.float32)
    x, bias = strided(3, 20), torch.randn(6)
    expected = linear64(x, layer.expected_weight(weight), bias)
    for kernel in ("torch.gemm.fp8_dequant", "torch.gemm.fp8_block"):
        assert relative_error(row(kernel)(layer, x, bias), expected) < 2e-6
    site = CallSite("gemm", dims={"N": 6, "K": 20})
    selection = site.select(
        device=torch.device("cpu"),
        dtype={"input": x.dtype, "output": x.dtype},
        quant=layer.spec.physical_signature,
    )
    assert selection.kernel_id == "torch.gemm.fp8_dequant"


@pytest.mark.parametrize("granularity", ["per_tensor", "per_channel"])
def test_fp8_products_need_sm89_and_a_quantized_input(granularity):
    selector = Selector(device="cpu")

    def ask(device="nvidia:sm90", activation="fp8_e4m3", n=64, dtype="bf16"):
        quant = {
            "format": "fp8_e4m3",
            "granularity": granularity,
            "fields": {"activation": activation, "input_granularity": "per_channel"},
        }
        dims = {"M": 3, "N": n, "K": 64}
        query = KernelQuery.build("gemm", device=device, dtype=dtype, quant=quant, dims=dims)
        return selector.explain(query).selected

    assert ask() == f"torch.gemm.fp8_{granularity}"
    for change in ({"device": "nvidia:sm80"}, {"activation": "a16"}, {"n": 60}, {"dtype": "fp32"}):
        assert ask(**change) == "torch.gemm.fp8_dequant"


def test_humming_needs_a_prepared_layer(row):
    pytest.importorskip("humming.forward")
    run = row("humming.gemm.w4a16", **{"shape.N": 64})
    layer = nn.Linear(64, 64)
    layer.prefix = "expert.mlp"
    with pytest.raises(RuntimeError, match=r"'expert\.mlp' has no humming_config.*quantiz"):
        run(layer, torch.zeros(1, 64), None)


@pytest.mark.parametrize(
    "params",
    [
        {"compute_config": {"use_batch_invariant": True, "gemm_type": "dense"}},
        {"tuning_config": {"block_m": 16}},
        {"tuning_config": [[0, 64, {"block_m": 16}], [64, 4096, {}]]},
        {"tuning_config": {"num_ctas_per_sm": 32, "use_stream_k": False}},
        {"tuning_config": {"num_ctas_per_sm": 19}},
        {
            "compute_config": {"use_batch_invariant": True},
            "tuning_config": {"num_ctas_per_sm": 32},
        },
    ],
)
def test_humming_params_are_accepted(params):
    rule = {"restrict_to": "humming.gemm.*", "params": params}
    assert policy_from_mapping({"rules": [rule]}).rules[0].params == params


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"compute_config": {"gemm_type": "grouped"}}, "gemm_type is 'grouped'; allowed: dense"),
        ({"compute_config": [1]}, "compute_config must be a mapping"),
        ({"compute_config": {"use_f16_accum": 1}}, "must be true or false, got 1"),
        ({"tuning_config": 5}, "tuning_config must be a mapping or a list"),
        ({"tuning_config": [[0, -1, {}]]}, "bounds must be non-negative integers"),
        (
            {"tuning_config": {"num_ctas_per_sm": 20}},
            r"tuning_config needs 4224 locks .* a layer holds 4096; lower num_ctas_per_sm \(20\)",
        ),
        (
            {"tuning_config": [[0, 64, {}], [64, 128, {"num_ctas_per_sm": 32}]]},
            r"tuning_config\[1\] needs 6758 locks .* set use_stream_k to false",
        ),
        (
            {"tuning_config": {"num_ctas_per_sm": "4"}},
            "tuning_config num_ctas_per_sm must be a positive integer, got '4'",
        ),
        (
            {"tuning_config": {"block_shape": [64, 128], "warp_shape": [64, 16, 64]}},
            r"tuning_config block_shape must be three sizes \[M, N, K\], got \[64, 128\]",
        ),
    ],
)
def test_bad_humming_params(params, message):
    rule = {"restrict_to": "humming.gemm.*", "params": params}
    with pytest.raises(PolicyError, match=message):
        policy_from_mapping({"rules": [rule]})
