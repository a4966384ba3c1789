"""Every Humming scheme packed and run on this GPU, against the portable numbers of the scheme.

All kernels are compiled first, in parallel, so the file takes minutes the first time; set
``HUMMING_CACHE_DIR`` to keep them.
"""

from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest
import torch

from phyai.dispatch.library import library_available
from phyai.kernels.humming_product import warm_up
from phyai.layers.linear import Leg, Linear
from phyai_quant import QuantConfigError, QuantScheme, TensorQuant, materialize
from phyai_quant.specs import _packing, _rtn
from phyai_quant.specs.base import AllocationRequest
from phyai_quant.specs.humming import HummingSpec

GPU = torch.cuda.is_available() and torch.version.cuda is not None
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not GPU, reason="needs an NVIDIA GPU"),
    pytest.mark.skipif(not (GPU and library_available("humming")), reason="needs humming-kernels"),
]
# One kernel each, for every scheme; the second shape has more K than N.
SIZES = {(512, 256): (1, 17, 200), (256, 512): (65,)}
WORKERS = 12


def stored(dtype, block=None, granularity="per_channel"):
    micro = dtype in ("nvfp4", "mxfp4")
    granularity = granularity if block is None else "block"
    return TensorQuant(dtype, granularity, block_shape=block, micro_scaled=micro)


def online(weight, activation=None):
    token = None if activation is None else TensorQuant(activation, "per_channel", dynamic=True)
    return QuantScheme(weight, token, online=True)


SCHEMES = {
    "w4a16": online(stored("int4", (1, 128))),
    "w8a16": online(stored("int8", (1, 128))),
    "w4a8_int8": online(stored("int4", (1, 128)), "int8"),
    "w4a8_fp8_e4m3": online(stored("int4", (1, 128)), "fp8_e4m3"),
    "w8a8_int8": online(stored("int8", (1, 128)), "int8"),
    "fp8_e4m3_a16": online(stored("fp8_e4m3")),
    "fp8_e4m3_a8": online(stored("fp8_e4m3"), "fp8_e4m3"),
    "fp8_e4m3_block_a8": online(stored("fp8_e4m3", (128, 128)), "fp8_e4m3"),
    "fp8_e5m2_a16": online(stored("fp8_e5m2")),
    "fp8_e5m2_a8": online(stored("fp8_e5m2"), "fp8_e5m2"),
    "fp8_e5m2_block_a8": online(stored("fp8_e5m2", (128, 128)), "fp8_e5m2"),
    "mxfp4_a16": online(stored("mxfp4", (1, 32))),
    "nvfp4_a16": online(stored("nvfp4", (1, 16))),
    "w8a16_tensor": online(stored("int8", granularity="per_tensor")),
    "ckpt_int4": QuantScheme(stored("int4", (1, 128))),
    "ckpt_nvfp4": QuantScheme(stored("nvfp4", (1, 16))),
    "ckpt_mxfp4": QuantScheme(stored("mxfp4", (1, 32))),
}
CASES = [(name, shape) for name in SCHEMES for shape in SIZES]
OWN_QUANTIZER = ("w4a16", "w8a16_tensor", "fp8_e4m3_a16", "fp8_e5m2_block_a8", "mxfp4_a16")
every_case = pytest.mark.parametrize(
    ("name", "shape"),
    CASES,
    ids=lambda value: value if isinstance(value, str) else "x".join(map(str, value)),
)


def source(rows, columns):
    values = torch.randn(rows, columns, generator=torch.Generator().manual_seed(rows))
    values[0] = 0
    values[1] *= 50
    return values.to(torch.bfloat16)


def tensors_of(name, shape):
    """Returns what a checkpoint holds: the source, or two legs with their own scales."""
    weight = source(*shape)
    if not name.startswith("ckpt"):
        return {None: {"weight": weight}}
    quant, legs = SCHEMES[name].weight, {}
    for leg, part in enumerate(weight.split(shape[0] // 2)):
        made = _rtn.quantize(part * 2.0**leg, quant, scale_dtype=torch.bfloat16)
        if quant.dtype == "int4":
            packed = _packing.pack_words(_packing.to_unsigned(made.codes, 4), 4)
        else:
            packed = _packing.pack_nibbles(made.codes)
        legs[leg] = {"weight_packed": packed, "weight_scale": made.scale}
        if made.global_scale is not None:
            legs[leg]["weight_scale_2"] = made.global_scale
    return legs


def load(spec, layer, tensors):
    for shard_id, leg in tensors.items():
        for key, tensor in leg.items():
            spec.load_weight(layer, key, tensor, shard_id)
    spec.process_after_loading(layer)


def reference_of(name, shape):
    """Returns the portable format of a case and its layer, on the CPU."""
    spec, layer = materialize(SCHEMES[name], None), torch.nn.Module()
    tensors = tensors_of(name, shape)
    ids = tuple(tensors)
    widths = tuple(shape[0] // len(ids) for _ in ids)
    spec.allocate(layer, AllocationRequest(shape, torch.bfloat16, widths, ids))
    load(spec, layer, tensors)
    return spec, layer


def prepare(case):
    """Packs a case on the GPU and compiles its kernels; returns the layer or the error."""
    name, shape = case
    tensors = tensors_of(name, shape)
    legs = shape[0]
    if len(tensors) > 1:
        legs = [Leg(f"leg{leg}", shape[0] // len(tensors), leg) for leg in tensors]
    try:
        layer = Linear(
            shape[1],
            legs,
            bias=True,
            prefix=f"layers.{name}",
            params_dtype=torch.bfloat16,
            device="cuda",
            scheme=SCHEMES[name],
        )
        layer.bias.data.copy_(torch.linspace(-1, 1, shape[0]))
        load(layer.spec, layer, tensors)
        if hasattr(layer, "humming_refusal"):
            return AssertionError(layer.humming_refusal)
        warm_up(layer, SIZES[shape])
    except Exception as error:
        return error
    return layer


def quantize_with_humming(name):
    """Returns what Humming's own quantizer makes of the first shape, or the error."""
    from humming.schema import HummingWeightSchema

    from phyai_quant.specs.humming_format import format_of
    from phyai_quant.specs.humming_pack import build_schemas

    try:
        schema, _ = build_schemas(format_of(SCHEMES[name]))
        weight = source(*next(iter(SIZES))).cuda()
        return HummingWeightSchema.quant_tensor(weight, schema, torch.bfloat16)
    except Exception as error:
        return error


@pytest.fixture(scope="module")
def prepared():
    with pytest.MonkeyPatch.context() as patch, ThreadPoolExecutor(WORKERS) as pool:
        # under pytest Humming would choose other kernels than outside
        patch.setenv("HUMMING_TEST_TUNING_SOURCE", "none")
        tasks = {case: pool.submit(prepare, case) for case in CASES}
        tasks |= {name: pool.submit(quantize_with_humming, name) for name in OWN_QUANTIZER}
        yield {key: task.result() for key, task in tasks.items()}


@pytest.fixture
def ready(prepared):
    def get(key):
        if isinstance(prepared[key], Exception):
            raise prepared[key]
        return prepared[key]

    return get


def inputs(rows, columns, seed=0):
    values = torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed))
    return values.to(torch.bfloat16)


def product(name, shape, x):
    """Returns the scheme's exact product, in fp64 on the CPU."""
    spec, layer = reference_of(name, shape)
    weight = spec.dequantize_weight(layer).double()
    seen = spec.fake_quantize_activation(x, layer) if SCHEMES[name].input else x
    return seen.double() @ weight.T + torch.linspace(-1, 1, shape[0]).bfloat16().double()


def check(actual, expected):
    """Checks rows and columns apart: a wrong tile must not hide behind the largest values."""
    actual = actual.double().cpu()
    assert actual.isfinite().all()
    for dim, bound in ((1, 2e-2), (0, 5e-2)):
        size = expected.norm(dim=dim)
        # a single value may cancel to nearly nothing
        error = (actual - expected).norm(dim=dim) / size.maximum(size.median())
        assert error.max() < bound, (dim, error.max(), int(error.argmax()))


@every_case
def test_products(name, shape, ready):
    layer = ready((name, shape))
    for rows in SIZES[shape]:
        x = inputs(rows, shape[1])
        check(layer(x.cuda()), product(name, shape, x))


@every_case
def test_products_in_a_graph(name, shape, ready):
    layer, rows = ready((name, shape)), SIZES[shape][-1]
    x = inputs(rows, shape[1]).cuda()
    layer(x)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = layer(x)
    for seed in (1, 2):
        fresh = inputs(rows, shape[1], seed)
        x.copy_(fresh)
        out.fill_(torch.nan)
        graph.replay()
        torch.cuda.synchronize()
        check(out, product(name, shape, fresh))


@every_case
def test_packed_layers_take_no_rows_and_are_not_saved(name, shape, ready):
    layer = ready((name, shape))
    empty = torch.zeros(2, 0, shape[1], device="cuda", dtype=torch.bfloat16)
    assert layer(empty).shape == (2, 0, shape[0])
    with pytest.raises(QuantConfigError, match="cannot be saved"):
        layer.state_dict()
    with pytest.raises(QuantConfigError, match="cannot be read back"):
        layer.spec.dequantize_weight(layer)


@pytest.mark.parametrize("name", [name for name in SCHEMES if not name.startswith("ckpt")])
def test_the_portable_quantizer_gives_the_same_codes_on_the_gpu(name):
    spec, layers = HummingSpec(SCHEMES[name]), []
    for device in ("cpu", "cuda"):
        layer = torch.nn.Module()
        spec.allocate(layer, AllocationRequest((512, 256), torch.bfloat16, device=device))
        load(spec, layer, {None: {"weight": source(512, 256)}})
        layers.append(layer)
    on_cpu, on_gpu = (dict(layer.named_parameters()) for layer in layers)
    for key, tensor in on_cpu.items():
        assert torch.equal(on_gpu[key].cpu().view(torch.uint8), tensor.view(torch.uint8)), key


@pytest.mark.parametrize("name", OWN_QUANTIZER)
def test_the_portable_quantizer_agrees_with_hummings(name, ready):
    theirs = {key: tensor.cpu() for key, tensor in ready(name).items()}
    spec, layer = reference_of(name, next(iter(SIZES)))
    ours = dict(layer.named_parameters())
    # row 0 is zero: its scale is arbitrary
    scale = slice(1, None) if theirs["weight_scale"].shape[0] > 1 else slice(None)
    torch.testing.assert_close(
        ours["weight_scale"].float()[scale],
        theirs["weight_scale"].float()[scale],
        rtol=2**-7,
        atol=0,
    )
    bits = spec.stored.bits
    codes = [_packing.unpack_words(raw["weight"].detach()[1:], bits) for raw in (ours, theirs)]
    # fast division may move a value across the middle of two codes
    assert (codes[0] != codes[1]).float().mean() < 1e-3


def test_loading_allocates_one_chunk_and_packing_one_layer(ready):
    ready(("w4a16", (512, 256)))
    torch.cuda.empty_cache()
    weight = source(4096, 2048)
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    layer = torch.nn.Module()
    spec = materialize(SCHEMES["w4a16"], 90)
    spec.allocate(layer, AllocationRequest((4096, 2048), torch.bfloat16, device="cuda"))
    spec.load_weight(layer, "weight", weight)
    assert torch.cuda.memory_allocated() - before <= 1024
    chunk_peak = torch.cuda.max_memory_allocated() - before
    assert chunk_peak < 160 * 2**20
    torch.cuda.reset_peak_memory_stats()
    spec.process_after_loading(layer)
    packed = sum(tensor.numel() * tensor.element_size() for tensor in layer.parameters())
    assert packed < weight.numel() * 0.6
    assert torch.cuda.memory_allocated() - before <= 1.1 * packed
    assert torch.cuda.max_memory_allocated() - before <= 4 * packed


@pytest.mark.skipif(
    not GPU or torch.cuda.get_device_capability() != (9, 0), reason="SM90 has no such tile"
)
def test_a_layer_that_no_tile_divides_is_an_error():
    spec = HummingSpec(SCHEMES["fp8_e4m3_a16"], 90)
    layer = torch.nn.Module()
    spec.allocate(layer, AllocationRequest((64, 32), torch.bfloat16, device="cuda"))
    spec.load_weight(layer, "weight", source(64, 32))
    with pytest.raises(QuantConfigError, match="N = 64, K = 32"):
        spec.process_after_loading(layer)


def test_capturing_before_warm_up_is_an_error(ready):
    layer = ready(("w4a16", (512, 256)))
    x = inputs(3000, 256).cuda()
    torch.cuda.synchronize()
    capture = partial(torch.cuda.graph, torch.cuda.CUDAGraph())
    with pytest.raises(RuntimeError, match="never run with M = 3000"), capture():
        layer(x)
