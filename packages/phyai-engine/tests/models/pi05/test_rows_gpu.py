"""π0.5 through FlashInfer's and Humming's rows, eager and captured, against fp32 references.

The reach checkpoint is compared with the CPU, a full-size model of random weights with the
reference rows in fp32 on the GPU. FlashInfer compiles five modules and Humming 18 kernels. The
tests without a mark run small models on the CPU, so that the comparison itself is tested.
"""

from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from zlib import crc32

import pytest
import torch
from ruamel.yaml import YAML

from phyai.dispatch import CallSite, Selector, kernel_selector_scope
from phyai.dispatch.catalog import build_catalog
from phyai.dispatch.library import library_available
from phyai.dispatch.policy_load import policy_from_mapping
from phyai.dispatch.types import ModelContext
from phyai.kernels.humming_product import warm_up
from phyai.layers import Linear
from phyai.models.pi05.captured import CapturedDenoise
from phyai.models.pi05.config import OPENPI_CAMERAS, PI05Config
from phyai.models.pi05.loading import load_pi05
from phyai.models.pi05.model import PI05Model
from phyai.models.pi05.prefix import plan_prefix
from phyai.models.pi05.sizes import DecoderSizes, VisionSizes
from phyai.processing import ModelInputs
from phyai.runtime.paged import PagedPlan
from phyai_quant import materialize, use_quant_plan
from phyai_quant.specs.base import AllocationRequest

PI05 = next(parent for parent in Path(__file__).parents if (parent / "examples").is_dir())
PI05 = PI05 / "examples" / "pi05"
REACH = PI05 / "reach" / "checkpoint"
PRESET = YAML(typ="safe").load(PI05 / "kernel_policies" / "humming_w4a16.yaml")
CATALOG = build_catalog()
GPU = torch.cuda.is_available() and torch.version.cuda is not None
gpu = [
    pytest.mark.gpu,
    pytest.mark.skipif(not GPU, reason="needs an NVIDIA GPU"),
    pytest.mark.skipif(not (GPU and library_available("flashinfer")), reason="needs flashinfer"),
    pytest.mark.skipif(not (GPU and library_available("humming")), reason="needs humming-kernels"),
]
on_gpu = [pytest.param(name, marks=gpu) for name in ("reach", "full")]

# Relative errors of the way from noise to actions, over up to 18 layers and ten steps. Measured on
# the CPU: bf16 0.0008 (reach) and 0.005 (small), int4 weights 0.007 and 0.09.
BF16_ERROR = {"reach": 5e-3, "small": 1.5e-2, "full": 3e-2}
INT4_ERROR = {"reach": 3e-2, "small": 0.3, "full": 0.5}
# The same kernels launched in another way; only split sums of Humming may round differently.
CAPTURE_ERROR = {"reach": 1e-3, "full": 1e-2}


def pin(name, target, **match):
    return {"id": name, "priority": 1, "match": match, "restrict_to": target}


# FA2 is one module for prefix and expert; dense products and the vision tower need no compilation.
FEW_MODULES = [
    pin("paged", "flashinfer.attention_paged.fa2", op="attention_paged"),
    pin("vision", "sdpa.attention", op="attention"),
    pin("dense", "torch.gemm.bf16", op="gemm", **{"quant.format": "bf16"}),
]
REFERENCE = [
    pin(op, next(row.kernel_id for row in CATALOG.impls(op) if row.reference), op=op)
    for op in CATALOG.ops()
    if op not in ("gemm", "activation")
] + [pin(op, f"torch.{op}.*", op=op) for op in ("gemm", "activation")]
POLICIES = {
    "reference": {"rules": REFERENCE},
    "flashinfer": {"rules": FEW_MODULES},
    "humming": {**PRESET, "rules": [*PRESET["rules"], *FEW_MODULES]},
}
FLASHINFER_ROWS = {
    ("attention_paged", "prefix"): {"flashinfer.attention_paged.fa2"},
    ("attention_paged", "expert"): {"flashinfer.attention_paged.fa2"},
    ("rope", "rope"): {"flashinfer.rope"},
    ("rmsnorm", "norm"): {"flashinfer.rmsnorm"},
    ("rmsnorm_add", "norm"): {"triton.rmsnorm_add"},
    ("layernorm", "layernorm"): {"flashinfer.layernorm"},
    ("layernorm_add", "layernorm"): {"triton.layernorm_add"},
    ("adarmsnorm", "adarmsnorm"): {"triton.adarmsnorm"},
    ("adarmsnorm_add", "adarmsnorm"): {"triton.adarmsnorm_add"},
    ("activation", "mlp.activation"): {
        "flashinfer.activation.gelu_tanh_and_mul",
        "triton.activation",
    },
}


def sizes(vision, language, expert):
    side = round(vision.tokens**0.5) * vision.patch
    widths = dict.fromkeys(("state_dim", "action_dim", "max_state_dim", "max_action_dim"), 32)
    return PI05Config(
        family="pi05",
        layout="openpi",
        cameras=OPENPI_CAMERAS,
        chunk_size=50,
        num_steps=10,
        tokenizer_max_length=200,
        image_resolution=(side, side),
        empty_cameras=0,
        min_period=4e-3,
        max_period=4.0,
        vision=vision,
        language=language,
        expert=expert,
        **widths,
    )


FULL = sizes(
    VisionSizes(width=1152, layers=27, heads=16, mlp=4304, patch=14, tokens=256),
    DecoderSizes(2048, layers=18, heads=8, kv_heads=1, head_dim=256, mlp=16384, vocab=257152),
    DecoderSizes(1024, layers=18, heads=8, kv_heads=1, head_dim=256, mlp=4096),
)
SMALL = sizes(
    VisionSizes(width=64, layers=2, heads=2, mlp=96, patch=14, tokens=4),
    DecoderSizes(256, layers=18, heads=4, kv_heads=1, head_dim=64, mlp=512, vocab=300),
    DecoderSizes(128, layers=18, heads=4, kv_heads=1, head_dim=64, mlp=256),
)
RANDOM = {"full": FULL, "small": SMALL}


def draw(name, shape, device):
    generator = torch.Generator(device).manual_seed(crc32(name.encode()))
    return torch.randn(tuple(shape), generator=generator, device=device)


def fill(model, device, store_as=None):
    """Fills a model with random bf16 values; names are seeds, so equal names get equal values."""
    for name, module in model.named_modules():
        if isinstance(module, Linear):
            fill_linear(module, device, store_as)
            continue
        for key, parameter in module.named_parameters(recurse=False):
            value = 0.1 * draw(f"{name}.{key}", parameter.shape, device)
            # layer norms multiply by the weight, RMS norms by one plus it
            value += key == "weight" and type(module).__name__ == "LayerNorm"
            parameter.data.copy_(value.to(torch.bfloat16))
    return model.eval()


def fill_linear(layer, device, store_as):
    weights = {}
    for leg in layer.legs:
        drawn = draw(f"{layer.prefix}.{leg.name}", (leg.width, layer.in_features), device)
        weights[leg.shard_id] = (drawn * layer.in_features**-0.5).to(torch.bfloat16)
    names = [leg.name for leg in layer.legs] if len(layer.legs) > 1 else None
    scheme = store_as and store_as.resolve(layer.prefix, Linear, legs=names)
    if scheme:
        weights = {None: rounded(layer, scheme, weights, device)}
    for shard_id, weight in weights.items():
        layer.spec.load_weight(layer, "weight", weight, shard_id)
    if layer.bias is not None:
        bias = 0.1 * draw(f"{layer.prefix}.bias", layer.bias.shape, device)
        layer.bias.data.copy_(bias.to(torch.bfloat16))
    layer.post_load()


def rounded(layer, scheme, weights, device):
    """Returns the numbers that a scheme makes of the weights, in fp32."""
    holder, spec = torch.nn.Module(), materialize(scheme, None)
    widths, ids = zip(*((leg.width, leg.shard_id) for leg in layer.legs), strict=True)
    shape = (layer.out_features, layer.in_features)
    spec.allocate(holder, AllocationRequest(shape, torch.bfloat16, widths, ids, device))
    for shard_id, weight in weights.items():
        spec.load_weight(holder, "weight", weight, shard_id)
    spec.process_after_loading(holder)
    return spec.dequantize_weight(holder)


@contextmanager
def rows(name, device):
    """Puts a policy in force; yields it."""
    policy = policy_from_mapping(POLICIES[name], catalog=CATALOG)
    selector = Selector(CATALOG, policy, device=device, model=ModelContext(family="pi05"))
    with kernel_selector_scope(selector):
        yield policy


def build(model, device, dtype, plan=None, *, store_as=None):
    if model == "reach":
        with use_quant_plan(plan or store_as):
            return load_pi05(REACH, device=device, params_dtype=dtype)
    with use_quant_plan(plan):
        empty = PI05Model(RANDOM[model], params_dtype=dtype, device=device)
    return fill(empty, device, store_as)


def question(config, seed=0):
    """Returns inputs whose last camera is absent, and noise; the layout is always the same."""
    generator = torch.Generator().manual_seed(seed)
    lengths, slots = torch.tensor([[7], [12]]), torch.arange(config.tokenizer_max_length)
    cameras = len(config.cameras)
    images = torch.rand(2, cameras, 3, *config.image_resolution, generator=generator) * 2 - 1
    image_mask = torch.ones(2, cameras, dtype=torch.bool)
    image_mask[:, -1] = False
    token_mask = slots < lengths
    tokens = torch.randint(config.language.vocab, token_mask.shape, generator=generator)
    noise = torch.randn(2, config.chunk_size, config.max_action_dim, generator=generator)
    return ModelInputs(images, image_mask, tokens * token_mask, token_mask, None, ("", "")), noise


def answers(model):
    """Returns the way from noise to actions for two questions, on the CPU."""
    asked = (question(model.config, seed) for seed in (0, 1))
    return [model.sample_actions(inputs, noise=noise).cpu() - noise for inputs, noise in asked]


@torch.inference_mode()
def captured_answers(model):
    """Returns the same from one graph, asked the second question first."""
    asked = [question(model.config, seed) for seed in (0, 1)]
    graph = CapturedDenoise(model, *model.encode_prefix(asked[0][0]))
    replayed = [
        graph(*model.encode_prefix(inputs), noise.to(model.device)).cpu() - noise
        for inputs, noise in reversed(asked)
    ]
    return replayed[::-1]


def error(actual, expected):
    pairs = zip(actual, expected, strict=True)
    return max(float((one - other).norm() / other.norm()) for one, other in pairs)


def used_rows(model):
    """Returns the rows that each operation and role used, in every mode."""
    used = {}
    for module in model.modules():
        for site in vars(module).values():
            if isinstance(site, CallSite):
                chosen = {trace.selected for trace in site.traces()}
                used.setdefault((site.op, site.role), set()).update(chosen)
    return used


def reference(model, *, stored="flashinfer"):
    """Answers in fp32 of the reference rows, with the weights that a policy stores."""
    device = "cpu" if model != "full" else "cuda"
    plan = policy_from_mapping(POLICIES[stored], catalog=CATALOG).quant_plan
    with rows("reference", device):
        return answers(build(model, device, torch.float32, store_as=plan))


@pytest.fixture(scope="module")
def compiled():
    """Compiles FlashInfer's modules in parallel."""

    half = {"dtype": torch.bfloat16, "device": "cuda"}
    x, weight = torch.zeros(4, 64, **half), torch.zeros(64, **half)

    def paged(head_dim):
        pages, q = torch.zeros(8, 1, 1, head_dim, **half), torch.zeros(4, 8, head_dim, **half)
        plan = PagedPlan.from_slots([4], [torch.arange(8)], "cuda")
        row("attention_paged.fa2")(q, pages, pages, plan, scale=1.0)

    def row(name, **facts):
        return CATALOG.impl(f"flashinfer.{name}").prepare(facts, {})

    def rope():
        cache = torch.zeros(4, 64, device="cuda")
        row("rope")(torch.arange(4, device="cuda"), x.view(4, 1, 64), x.view(4, 1, 64), cache)

    tasks = [
        partial(paged, 64),
        partial(paged, 256),
        rope,
        lambda: row("rmsnorm", **{"attrs.variant": "gemma"})(x, weight, 1e-6),
        lambda: row("activation.gelu_tanh_and_mul")(x),
    ]
    with ThreadPoolExecutor() as pool:
        for task in [pool.submit(task) for task in tasks]:
            task.result()


def compile_humming(model):
    """Compiles one kernel per shape of a quantized layer, in parallel."""
    config = model.config
    layout = plan_prefix(
        question(config)[0], config.vision.tokens, drop_absent=True, pack_prompt=True
    )
    by_shape = {}
    for layer in model.modules():
        if isinstance(layer, Linear) and hasattr(layer, "humming_config"):
            count = 2 * config.suffix_len if "gemma_expert" in layer.prefix else layout.total
            by_shape[layer.out_features, layer.in_features] = (layer, [count])
    with ThreadPoolExecutor(12) as pool:
        list(pool.map(lambda task: warm_up(*task), by_shape.values()))


@pytest.mark.parametrize("model", on_gpu)
def test_flashinfer_rows(model, compiled):
    with rows("flashinfer", "cuda"):
        loaded = build(model, "cuda", torch.bfloat16)
        eager, captured = answers(loaded), captured_answers(loaded)
        used = used_rows(loaded)
    del loaded
    assert {key: used[key] for key in FLASHINFER_ROWS} == FLASHINFER_ROWS
    assert error(eager, reference(model)) < BF16_ERROR[model]
    assert error(captured, eager) < CAPTURE_ERROR[model]


@pytest.mark.parametrize("model", on_gpu)
def test_humming_rows(model, compiled, monkeypatch):
    # under pytest Humming would choose other kernels than outside
    monkeypatch.setenv("HUMMING_TEST_TUNING_SOURCE", "none")
    with rows("humming", "cuda") as policy:
        loaded = build(model, "cuda", torch.bfloat16, policy.quant_plan)
        compile_humming(loaded)
        eager, captured = answers(loaded), captured_answers(loaded)
        used = used_rows(loaded)
    del loaded
    assert used["gemm", "language"] == used["gemm", "expert"] == {"humming.gemm.w4a16"}
    assert {key: used[key] for key in FLASHINFER_ROWS} == FLASHINFER_ROWS
    stored = error(eager, reference(model, stored="humming"))
    assert stored < BF16_ERROR[model]
    assert stored < error(eager, reference(model)) < INT4_ERROR[model]
    assert error(captured, eager) < CAPTURE_ERROR[model]


@pytest.mark.parametrize("model", ["reach", "small"])
def test_bf16_is_near_the_reference(model):
    """What rounding alone does, so that the bounds above are about the rows."""
    with rows("reference", "cpu"):
        rounded_answers = answers(build(model, "cpu", torch.bfloat16))
    assert 1e-4 < error(rounded_answers, reference(model)) < BF16_ERROR[model]


@pytest.mark.parametrize("model", ["reach", "small"])
def test_int4_weights_are_near_their_reference(model):
    with rows("reference", "cpu"):
        plan = policy_from_mapping(POLICIES["humming"], catalog=CATALOG).quant_plan
        quantized = answers(build(model, "cpu", torch.bfloat16, plan))
    stored = error(quantized, reference(model, stored="humming"))
    assert stored < BF16_ERROR[model]
    assert 5 * stored < error(quantized, reference(model)) < INT4_ERROR[model]


def test_equal_names_get_equal_values():
    wide, narrow = (build("small", "cpu", dtype) for dtype in (torch.float32, torch.bfloat16))
    for name, parameter in narrow.named_parameters():
        assert torch.equal(parameter.float(), wide.get_parameter(name).float()), name
