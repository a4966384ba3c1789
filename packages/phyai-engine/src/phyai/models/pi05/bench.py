"""Times the runtime stage by stage against the floor."""

import time
from collections.abc import Callable, Iterator, Sequence
from copy import copy
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from phyai.dispatch.config import KernelConfig
from phyai.models.measuring import kernel_times, policy_in_force, quantiles
from phyai.models.pi05.floor import H200_BF16, STAGES, Rates, floor_ms
from phyai.models.pi05.model import PI05Model
from phyai.models.pi05.random_weights import full_size_config, random_model
from phyai.models.pi05.runtime import PI05Runtime
from phyai.models.pi05.staging import Staged
from phyai.processing.inputs import ModelInputs


@dataclass(frozen=True)
class Setting:
    """A workload.

    Attributes:
        name: what to call it.
        views: images of a request.
        prompt: prompt tokens of a request.
        chunk: actions of a chunk.
        batch: requests at once.
        steps: Euler steps.
    """

    name: str
    views: int
    prompt: int
    chunk: int = 50
    batch: int = 1
    steps: int = 10


ANCHORS = (
    Setting("3 views, 968 tokens", 3, 200),
    Setting("3 views, 784 tokens", 3, 16),
    Setting("2 views, 512 tokens, chunk 63", 2, 0, chunk=63),
)
"""The settings in which latencies of π0.5 are published: openpi's, PhyAI's and Dexmal's."""


def request(model: PI05Model, setting: Setting, seed: int = 0) -> ModelInputs:
    """Returns random inputs of a setting on the CPU."""
    config, batch = model.config, setting.batch
    generator = torch.Generator().manual_seed(seed)
    slots = torch.arange(config.tokenizer_max_length).expand(batch, -1)
    mask = slots < setting.prompt
    tokens = torch.randint(1, config.language.vocab, mask.shape, generator=generator) * mask
    cameras = len(config.cameras)
    images = torch.rand(batch, cameras, 3, *config.image_resolution, generator=generator) * 2 - 1
    present = (torch.arange(cameras) < setting.views).expand(batch, -1)
    state = torch.randn(batch, config.max_state_dim, generator=generator)
    state = state if config.family == "pi0" else None
    return ModelInputs(images, present, tokens, mask, state, ("",) * batch)


def _stages(
    runtime: PI05Runtime, setting: Setting, inputs: ModelInputs
) -> tuple[dict[str, Callable[[], Tensor]], Staged]:
    """Returns the replay of each stage of a new runtime, after a request has recorded them."""
    runtime.sample_actions(inputs, seed=0, num_steps=setting.steps)
    lane = runtime.lane(setting.batch)
    staged = lane.stage(inputs)
    (loop,) = lane.loop_graphs.values()
    graphs = (
        lane.vision_graphs[staged.views],
        lane.prefix_graphs[staged.views, staged.tokens],
        loop,
    )
    return dict(zip(STAGES, graphs, strict=True)), staged


@torch.inference_mode()
def time_stages(
    runtime: PI05Runtime, setting: Setting, *, replays: int = 200, kernels: int = 0
) -> dict[str, Any]:
    """Times the device's work of a chunk and whole requests.

    Args:
        runtime: a new one, of a model with the setting's chunk.
        setting: what to time.
        replays: of the graphs; requests are a quarter as many.
        kernels: number of kernels to list for each stage, by time.

    Returns:
        Milliseconds by stage, ``chunk`` for all of them (device time, p10 to p99), ``request``
        from inputs on the host to actions on the host, rows, kernels of a chunk by stage, and the
        ``longest``: (kernel, launches, microseconds).
    """
    device = runtime.model.device
    inputs = request(runtime.model, setting)
    stages, staged = _stages(runtime, setting, inputs)
    spent: dict[str, list[float]] = {name: [] for name in (*STAGES, "chunk")}
    for _ in range(replays):
        marks = [torch.cuda.Event(enable_timing=True) for _ in range(len(STAGES) + 1)]
        marks[0].record()
        for mark, replay in zip(marks[1:], stages.values(), strict=True):
            replay()
            mark.record()
        marks[-1].synchronize()
        for index, name in enumerate(STAGES):
            spent[name].append(marks[index].elapsed_time(marks[index + 1]))
        spent["chunk"].append(marks[0].elapsed_time(marks[-1]))
    whole: list[float] = []
    for seed in range(max(1, replays // 4)):
        torch.cuda.synchronize(device)
        start = time.perf_counter()
        runtime.sample_actions(inputs, seed=seed, num_steps=setting.steps).cpu()
        whole.append(1e3 * (time.perf_counter() - start))
    launched = {name: kernel_times(replay) for name, replay in stages.items()}
    return {
        "ms": {name: quantiles(values) for name, values in spent.items()}
        | {"request": quantiles(whole)},
        "kernels": {name: sum(count for _, count, _ in rows) for name, rows in launched.items()},
        "longest": {name: rows[:kernels] for name, rows in launched.items()},
        "prefix_rows": staged.views * runtime.model.config.vision.tokens + staged.tokens,
    }


def measure(
    runtime: PI05Runtime,
    setting: Setting,
    *,
    replays: int = 200,
    kernels: int = 0,
    rates: Rates = H200_BF16,
) -> dict[str, Any]:
    """Times a setting and relates each stage to its floor in bf16.

    Returns:
        What `time_stages` returns, with ``setting``, ``floor_ms`` and ``ratio`` by stage.
    """
    found = time_stages(runtime, setting, replays=replays, kernels=kernels)
    floors = floor_ms(
        runtime.model.config,
        views=setting.views,
        prompt=setting.prompt,
        batch=setting.batch,
        steps=setting.steps,
        rates=rates,
    )
    medians = {name: found["ms"][name]["p50"] for name in STAGES}
    medians["total"] = found["ms"]["chunk"]["p50"]
    return {
        "setting": asdict(setting),
        **found,
        "floor_ms": {name: round(value, 4) for name, value in floors.items()},
        "ratio": {name: round(value / floors[name], 3) for name, value in medians.items()},
    }


def measure_all(
    settings: Sequence[Setting],
    device: str,
    policy: Path | None = None,
    *,
    replays: int = 200,
    kernels: int = 0,
) -> Iterator[dict[str, Any]]:
    """Builds a full-size model of random weights under a policy and measures every setting.

    Args:
        settings: what to time; one model is built for all.
        device: a CUDA device.
        policy: file with kernel rules and quantization; none if None.
        replays: of each graph for one request; fewer for larger batches.
        kernels: number of kernels to list for each stage, by time.

    Yields:
        What `measure` returns.
    """
    with policy_in_force(KernelConfig(config_path=policy), device, "pi05"):
        model = random_model(
            full_size_config(), params_dtype=torch.bfloat16, device=torch.device(device)
        )
        for setting in settings:
            runtime = PI05Runtime(with_chunk(model, setting.chunk))
            # Long batches vary little.
            count = max(min(replays, 20), replays // setting.batch)
            yield measure(runtime, setting, replays=count, kernels=kernels)


def with_chunk(model: PI05Model, chunk: int) -> PI05Model:
    """Returns the model for another chunk size; it shares all weights."""
    if model.config.chunk_size == chunk:
        return model
    other = copy(model)
    other.config = replace(model.config, chunk_size=chunk)
    return other
