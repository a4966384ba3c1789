"""Times one step of a long video with each kernel of attention, on the same weights."""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from phyai.models.cosmos3.bench import CountedTokens, describe, kernels, synchronize
from phyai.models.cosmos3.model import Cosmos3Transformer
from phyai.models.cosmos3.state import Conditions, Layout, Modalities

VIDEO_720P = Layout(48, 45, 80, fps=24.0)
"""189 frames of 720 x 1280: 44,160 media tokens."""

ATTENTION: dict[str, tuple[str, dict[str, Any]]] = {
    "cuDNN": ("sdpa.attention", {"sdpa_backend": "cudnn"}),
    "FlashAttention-2": ("sdpa.attention", {"sdpa_backend": "flash"}),
    "dense Piper": ("piper.attention", {}),
    "SageAttention2++": ("piper.attention.sage", {}),
    "Sparse Piper, keep 0.3": ("piper.attention.sparse", {"keep_ratio": 0.3}),
}
"""Rows and params of the generation tower's attention by name; the first is the reference."""


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
    rows: Mapping[str, tuple[str, Mapping[str, Any]]] = ATTENTION,
    *,
    text: Sequence[int] | None = None,
    runs: int = 2,
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Times one forward of one branch of a video with each row of attention.

    Args:
        model: whose weights are in bf16.
        layout: of the video.
        rows: of attention with their params, by name; the first is the reference of the others.
        text: token ids; random ones of the length of an instruction if None.
        runs: timed forwards of each.

    Yields:
        Name, and milliseconds and decibels to the reference, or the error that ended it.
    """
    ids = CountedTokens(model.config.vocab_size).encode("a robot") if text is None else text
    state, expected = video_state(model, layout), None
    with torch.no_grad():
        conditions = [model.prefill(torch.tensor(ids))]
        for name, (row, params) in rows.items():
            match = {"op": "attention", "role": "generation"}
            rule = {"match": match, "use": row, "params": dict(params)}
            try:
                with kernels({"overrides": [rule]}, str(model.device)):
                    spent, video = _time_forward(model, state, conditions, layout, runs)
            except Exception as error:  # the others are still worth measuring
                yield name, {"error": describe(error)}
                continue
            expected = video if expected is None else expected
            found: dict[str, Any] = {"ms": [round(value, 2) for value in spent]}
            if video is not expected:
                found["sqnr_db"] = round(sqnr_db(video, expected), 2)
            yield name, found


def _time_forward(
    model: Cosmos3Transformer,
    state: Modalities,
    conditions: Sequence[Conditions],
    layout: Layout,
    runs: int,
) -> tuple[list[float], Tensor]:
    """Returns milliseconds of each run after one that is not timed, and the video's velocity."""

    def step() -> None:
        model.velocities(state, 999, conditions, layout)

    video = model.velocities(state, 999, conditions, layout)[0].video
    return [_milliseconds(step, model.device) for _ in range(runs)], video


def _milliseconds(run: Callable[[], None], device: torch.device) -> float:
    synchronize(device)
    start = time.perf_counter()
    run()
    synchronize(device)
    return 1e3 * (time.perf_counter() - start)
