"""Times one step of a long video with each kernel of attention, on the same weights."""

import time
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from phyai.models.cosmos3.bench import CountedTokens, Policy, describe, kernels, synchronize
from phyai.models.cosmos3.model import Cosmos3Transformer
from phyai.models.cosmos3.state import Layout, Modalities

VIDEO_720P = Layout(48, 45, 80, fps=24.0)
"""189 frames of 720 x 1280: 44,160 media tokens."""

ATTENTION: dict[str, tuple[str, dict[str, Any]]] = {
    "cuDNN": ("sdpa.attention", {"sdpa_backend": "cudnn"}),
    "dense Piper": ("piper.attention", {}),
    "SageAttention2++": ("piper.attention.sage", {}),
    "Sparse Piper, keep 0.3": ("piper.attention.sparse", {"keep_ratio": 0.3}),
}
"""Rows and params of the generation tower's attention by name; the first is the reference."""

_REST = {
    "rmsnorm": "triton.rmsnorm",
    "rmsnorm_add": "triton.rmsnorm_add",
    "rope": "triton.rope",
    "activation": "triton.activation",
    "attention": "sdpa.attention",
}
"""Rows of everything else where they run, so that nothing is built with nvcc for minutes."""


def sqnr_db(found: Tensor, expected: Tensor) -> float:
    """Returns signal over noise in decibels, 200 at most."""
    signal = expected.double().square().sum()
    noise = (found.double() - expected.double()).square().sum()
    return float(10 * torch.log10(signal / torch.maximum(noise, 1e-20 * signal)))


def video_state(model: Cosmos3Transformer, layout: Layout, seed: int = 0) -> Modalities:
    """Returns fp32 noise of a video on the model's device."""
    generator = torch.Generator(model.device).manual_seed(seed)
    shape = (model.config.latent_channel, layout.frames, layout.height, layout.width)
    return Modalities(torch.randn(shape, generator=generator, device=model.device))


def time_video_step(
    model: Cosmos3Transformer,
    layout: Layout,
    policy: Policy,
    reference: Tensor | None = None,
    *,
    runs: int = 2,
) -> tuple[dict[str, Any], Tensor | None]:
    """Times one forward of one branch of a video, after one that is not timed.

    Args:
        model: built under a policy with the same quantization.
        layout: of the video.
        policy: kernel rules.
        reference: velocity to compare with.
        runs: timed forwards.

    Returns:
        Milliseconds and decibels to the reference, or the error that ended it; and the velocity.
    """
    ids = CountedTokens(model.config.vocab_size).encode("a robot")
    state = video_state(model, layout)
    try:
        with kernels(policy, str(model.device)), torch.no_grad():
            conditions = [model.prefill(torch.tensor(ids))]

            def step() -> Tensor:
                return model.velocities(state, 999, conditions, layout)[0].video

            video = step()
            spent = [_milliseconds(step, model.device) for _ in range(runs)]
    except Exception as error:  # others are still worth measuring
        return {"error": describe(error)}, None
    found: dict[str, Any] = {"ms": [round(value, 2) for value in spent]}
    if reference is not None:
        found["sqnr_db"] = round(sqnr_db(video, reference), 2)
    return found, video


def attention_rules(row: str, params: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a policy that gives the generation tower's attention to one row."""
    match = {"op": "attention", "role": "generation"}
    return {
        "rules": [{"id": op, "match": {"op": op}, "prefer": [name]} for op, name in _REST.items()],
        "overrides": [{"match": match, "use": row, "params": dict(params)}],
    }


def _milliseconds(run: Callable[[], Any], device: torch.device) -> float:
    synchronize(device)
    start = time.perf_counter()
    run()
    synchronize(device)
    return 1e3 * (time.perf_counter() - start)
