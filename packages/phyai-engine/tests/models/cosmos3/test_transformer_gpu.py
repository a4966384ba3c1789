"""The transformer on a device: against diffusers, against the CPU, and in full-size layers."""

import dataclasses
import json
from pathlib import Path

import pytest
import torch
from safetensors import safe_open

from phyai.layers import TensorParallel
from phyai.models.cosmos3.config import Cosmos3Config
from phyai.models.cosmos3.loading import load_transformer
from phyai.models.cosmos3.parallel import Parallel
from phyai.models.cosmos3.random_weights import random_transformer
from phyai.models.cosmos3.state import ActionLayout, Conditions, Layout, Modalities

pytestmark = pytest.mark.gpu

FIXTURES = Path(__file__).parent / "fixtures"
MODALITIES = ("video", "action", "sound")
DROID = Layout(9, 33, 40, (0,), 15.0, ActionLayout(33, 0, (0,), 8, 8))


def cosine(one, other):
    flat = (part.flatten().double().cpu() for part in (one, other))
    return float(torch.nn.functional.cosine_similarity(*flat, dim=0))


def draw(config, layout, device, seed=0):
    generator = torch.Generator().manual_seed(seed)
    shape = config.latent_channel, layout.frames, layout.height, layout.width
    action = torch.randn(layout.action.rows, config.action_dim, generator=generator)
    video = torch.randn(shape, generator=generator)
    return Modalities(video.to(device), action.to(device))


@pytest.mark.parametrize("variant", ["qwen", "edge"])
def test_velocities_equal_diffusers(variant):
    model = load_transformer(
        FIXTURES / f"transformer_{variant}", device="cuda", params_dtype=torch.float32
    )
    with safe_open(FIXTURES / f"transformer_{variant}.safetensors", framework="pt") as file:
        cases = json.loads(file.metadata()["cases"])
        tensors = {name: file.get_tensor(name).cuda() for name in file.keys()}  # noqa: SIM118
    for name, case in cases.items():
        fields = {k: v for k, v in case.items() if k not in ("timestep", "action")}
        action = ActionLayout(**case["action"]) if "action" in case else None
        layout = Layout(**fields, action=action)
        state, expected = (
            Modalities(*(tensors.get(f"{name}.{kind}.{modality}") for modality in MODALITIES))
            for kind in ("state", "velocity")
        )
        conditions = [model.prefill(tensors[f"{name}.ids"])]
        (found,) = model.velocities(state, case["timestep"], conditions, layout)
        for modality in MODALITIES:
            theirs = getattr(expected, modality)
            if theirs is not None:
                error = (getattr(found, modality) - theirs).abs().max()
                assert error <= 2e-5 * theirs.abs().max().clamp(min=1e-30), (name, modality)


@pytest.mark.parametrize("variant", ["qwen", "edge"])
def test_half_precision_equals_the_cpu_in_full_precision(variant):
    """Heads of 128, as published, so that the kernels of published sizes run."""
    sizes = {"head_dim": 128, "mrope_section": (24, 20, 20), "hidden_size": 256}
    config = Cosmos3Config.tiny(variant, intermediate_size=384, **sizes)
    layout = dataclasses.replace(
        DROID, frames=3, action=dataclasses.replace(DROID.action, domain_id=2)
    )
    wide = random_transformer(config, params_dtype=torch.float32, device="cpu")
    half = random_transformer(config, params_dtype=torch.bfloat16, device="cuda")
    with torch.no_grad():
        for ours, theirs in zip(half.parameters(), wide.parameters(), strict=True):
            ours.copy_(theirs)
    answers = []
    for model in (wide, half):
        texts = [model.prefill(torch.arange(length)) for length in (37, 10)]
        state = draw(config, layout, model.device)
        answers.append(model.velocities(state, 833, texts, layout))
    for exact, rounded in zip(*answers, strict=True):
        assert cosine(exact.video, rounded.video) > 0.999
        assert cosine(exact.action, rounded.action) > 0.999


@pytest.mark.parametrize("preset", ["nano", "super_", "edge"])
def test_full_size_layers_at_the_size_of_the_policy(preset):
    """Two layers of published widths; one batch of branches equals each branch alone."""
    config = dataclasses.replace(
        getattr(Cosmos3Config, preset)(), num_hidden_layers=2, vocab_size=256
    )
    model = random_transformer(config, params_dtype=torch.bfloat16, device="cuda", domains=[8])
    texts = [model.prefill(torch.arange(length)) for length in (82, 10)]
    state = draw(config, DROID, "cuda")
    together = model.velocities(state, 937, texts, DROID)
    for text, found in zip(texts, together, strict=True):
        (alone,) = model.velocities(state, 937, [text], DROID)
        assert found.video.isfinite().all()
        assert cosine(found.video, alone.video) > 0.9999
        assert cosine(found.action, alone.action) > 0.9999


def test_parts_of_the_heads_add_up(monkeypatch):
    """Two ranks one after the other: sums are taken apart, layer by layer, in fp32 on one GPU."""
    config = dataclasses.replace(
        Cosmos3Config.nano(), num_hidden_layers=1, vocab_size=256, sound_gen=False, sound_dim=0
    )
    layout = dataclasses.replace(DROID, frames=2)
    parts = []
    monkeypatch.setattr(
        torch.distributed, "all_reduce", lambda x, group=None: parts[-1].append(x.clone())
    )
    state = draw(config, layout, "cuda")
    whole = random_transformer(config, params_dtype=torch.bfloat16, device="cuda", domains=[8])
    text = whole.prefill(torch.arange(5))
    inputs = []
    whole.generation.layers[0].to_out.register_forward_hook(
        lambda module, args, out: inputs.append(out)
    )
    whole.velocities(state, 833, [text], layout)
    for rank in range(2):
        parts.append([])
        ours = random_transformer(
            config,
            params_dtype=torch.bfloat16,
            device="cuda",
            domains=[8],
            parallel=Parallel(TensorParallel(rank, 2)),
        )
        heads = slice(4 * rank, 4 * rank + 4)
        mine = Conditions(text.keys[:, :, heads], text.values[:, :, heads])
        ours.velocities(state, 833, [mine], layout)
    total = parts[0][0].float() + parts[1][0].float()
    assert cosine(total, inputs[0]) > 0.9999
    assert cosine(parts[0][0], inputs[0]) < 0.95


def test_a_full_size_model_is_made_on_the_device():
    """Edge in its published size: no copy on the host, and no more memory than its weights."""
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    model = random_transformer(
        Cosmos3Config.edge(), params_dtype=torch.bfloat16, device="cuda", domains=[8]
    )
    weights = sum(p.numel() * p.element_size() for p in model.parameters())
    assert torch.cuda.memory_allocated() - before < 1.01 * weights + (1 << 20)
    assert torch.cuda.max_memory_allocated() - before < 1.1 * weights
    state = draw(model.config, DROID, "cuda")
    (found,) = model.velocities(state, 999, [model.prefill(torch.arange(82))], DROID)
    assert found.video.isfinite().all()
    assert found.action[1:, :8].all()
