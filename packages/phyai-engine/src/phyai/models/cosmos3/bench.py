"""Times policy requests stage by stage against the floor."""

import random
import time
from collections.abc import Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import numpy as np
import torch

from phyai.dispatch.config import KernelConfig
from phyai.layers import Linear
from phyai.models.cosmos3.config import Cosmos3Config
from phyai.models.cosmos3.droid import PolicyContract
from phyai.models.cosmos3.floor import H200_8BIT, H200_BF16, STAGES, floor_ms
from phyai.models.cosmos3.pipeline import Cosmos3Pipeline
from phyai.models.cosmos3.plans import Plan
from phyai.models.cosmos3.random_weights import random_transformer
from phyai.models.cosmos3.requests import PolicyRequest
from phyai.models.cosmos3.results import PolicyResult
from phyai.models.cosmos3.runtime import Cosmos3Runtime, FrameEncoder
from phyai.models.cosmos3.vae import WanVAE
from phyai.models.cosmos3.vae.config import WanVAEConfig
from phyai.models.cosmos3.vae.random_weights import fill
from phyai.models.measuring import kernel_times, policy_in_force, quantiles

TEXT_TOKENS = (82, 10)
"""Tokens of an instruction in the policy's prompt, and of the empty prompt."""

DROID_DOMAIN = 8

Policy = Path | Mapping[str, Any] | None
"""A policy: its file, or what stands in it."""


class CountedTokens:
    """Stands for a tokenizer: random ids that depend on the text, as many as a real one makes.

    Args:
        vocab_size: number of ids.
        tokens: ids of a text, and of the empty text.
    """

    source: Path = Path("random")

    def __init__(self, vocab_size: int, tokens: tuple[int, int] = TEXT_TOKENS) -> None:
        self.vocab_size = vocab_size
        self.tokens = tokens

    def encode(self, text: str, *, system: str | None = None) -> tuple[int, ...]:
        """Returns token ids of a prompt."""
        generator = random.Random(f"{system}|{text}")  # noqa: S311  # stands for a tokenizer
        count = self.tokens[0 if text else 1]
        return tuple(generator.randrange(self.vocab_size) for _ in range(count))


def kernels(policy: Policy, device: str) -> AbstractContextManager[None]:
    """Puts a policy's kernel rules and quantization in force; none if None."""
    if isinstance(policy, Path):
        config = KernelConfig(config_path=policy)
    else:
        config = KernelConfig(policy_config=policy)
    return policy_in_force(config, device, "cosmos3")


def random_pipeline(
    config: Cosmos3Config,
    vae_config: WanVAEConfig,
    *,
    dtype: torch.dtype,
    device: str,
    contract: PolicyContract | None = None,
    graphs: bool = True,
) -> tuple[Cosmos3Pipeline, Cosmos3Runtime]:
    """Builds a pipeline of random weights, VAE decoder included, under the policy in force.

    Args:
        config: sizes of the transformer.
        vae_config: sizes of the VAE.
        dtype: of weights and activations.
        device: where to build.
        contract: of the policy; that of Nano if None.
        graphs: whether to record on a GPU.

    Returns:
        The pipeline, and what runs its loop.
    """
    place = torch.device(device)
    transformer = random_transformer(
        config, params_dtype=dtype, device=place, domains=[DROID_DOMAIN]
    )
    vae = fill(WanVAE(vae_config, dtype=dtype, device=place))
    tokenizer: Any = CountedTokens(config.vocab_size)
    runtime = Cosmos3Runtime(transformer, graphs=graphs)
    pipeline = Cosmos3Pipeline(
        transformer,
        vae,
        tokenizer,
        device=place,
        contract=contract,
        run_denoise=runtime,
        encode_frame=FrameEncoder(vae.encode_frame, records=runtime.records),
    )
    return pipeline, runtime


def droid_request(seed: int = 0) -> PolicyRequest:
    """Returns a random observation of the DROID robot; equal seeds give equal observations.

    The noise is that of the pipeline's stream of seeds, as a server draws it: ahead of time, and
    for pipelines that answer as many requests the same.
    """
    numbers = np.random.default_rng(seed)

    def picture(height: int, width: int) -> np.ndarray:
        return numbers.integers(0, 256, (height, width, 3), np.uint8)

    return PolicyRequest(
        prompt="put the red cup on the plate",
        wrist=picture(360, 640),
        exteriors=[picture(360, 640), picture(360, 640)],
        joint_position=numbers.uniform(-1, 1, 7),
        gripper_position=0.5,
    )


def time_requests(pipeline: Cosmos3Pipeline, count: int) -> dict[str, Any]:
    """Times requests whose text was read before, after two that record and read.

    Returns:
        Milliseconds by stage with ``total``, ``request`` from pictures on the host to actions on
        the host, and actions [count, chunk, 8], equal for equal pipelines.
    """
    for seed in range(2):
        pipeline.run(droid_request(seed))
    stages: dict[str, list[float]] = {}
    wall: list[float] = []
    actions: list[np.ndarray] = []
    for seed in range(count):
        request = droid_request(seed)
        synchronize(pipeline.device)
        start = time.perf_counter()
        result = pipeline.run(request)
        wall.append(1e3 * (time.perf_counter() - start))
        assert isinstance(result, PolicyResult)
        actions.append(result.actions)
        for name, spent in result.timing_ms.items():
            stages.setdefault(name, []).append(spent)
    found = {name: quantiles(values) for name, values in stages.items()}
    return {"ms": found | {"request": quantiles(wall)}, "actions": np.stack(actions)}


def measure_policy(
    config: Cosmos3Config,
    vae_config: WanVAEConfig,
    policy: Policy,
    *,
    device: str,
    dtype: torch.dtype = torch.bfloat16,
    contract: PolicyContract | None = None,
    requests: int = 8,
    listed: int = 0,
    overlaps: bool = True,
) -> dict[str, Any]:
    """Builds a pipeline of random weights under a policy and times the DROID contract.

    Args:
        config: sizes of the transformer.
        vae_config: sizes of the VAE.
        policy: kernel rules and quantization; none if None.
        device: where to run.
        dtype: of weights and activations.
        contract: of the policy; that of Nano if None.
        requests: timed ones.
        listed: kernels of the denoising loop to list, by time.
        overlaps: whether the attention of both branches overlaps.

    Returns:
        What `time_requests` does, with seconds of building, floors, ratios to them, bytes of the
        weights and most bytes in use, and the longest kernels.
    """
    on_gpu = torch.device(device).type == "cuda"
    if on_gpu:
        torch.cuda.reset_peak_memory_stats()
    start = time.perf_counter()
    with kernels(policy, device):
        pipeline, runtime = random_pipeline(
            config, vae_config, dtype=dtype, device=device, contract=contract
        )
        for layer in runtime.model.generation.layers:
            layer.overlaps = overlaps
        synchronize(pipeline.device)
        built = time.perf_counter() - start
        weights = torch.cuda.memory_allocated() if on_gpu else 0
        found = time_requests(pipeline, requests)
        plan = pipeline.plan(droid_request())
        if listed:
            found["longest"] = _longest(pipeline, runtime, plan)[:listed]
    narrow = any(
        isinstance(module, Linear) and module.scheme is not None
        for module in runtime.model.modules()
    )
    floors = policy_floor(config, plan, eight_bit=narrow)
    medians = {name: found["ms"][name]["p50"] for name in (*STAGES, "total")}
    return found | {
        "built_s": round(built, 1),
        "floor_ms": {name: round(value, 6) for name, value in floors.items()},
        "ratio": {name: round(medians[name] / floor, 3) for name, floor in floors.items() if floor},
        "weight_bytes": weights,
        "most_bytes": torch.cuda.max_memory_allocated() if on_gpu else 0,
        "tokens": plan.layout.tokens(config.latent_patch_size),
    }


def policy_floor(config: Cosmos3Config, plan: Plan, *, eight_bit: bool) -> dict[str, float]:
    """Returns the floor of a planned request whose text was read before."""
    assert plan.pixels is not None
    canvas = plan.pixels.shape[-2], plan.pixels.shape[-1]
    return floor_ms(
        config,
        plan.layout,
        plan.sampling,
        TEXT_TOKENS,
        canvas=canvas,
        rates=H200_8BIT if eight_bit else H200_BF16,
    )


def _longest(
    pipeline: Cosmos3Pipeline, runtime: Cosmos3Runtime, plan: Plan
) -> list[tuple[str, int, float]]:
    """Returns (kernel, launches, microseconds) of a recorded loop; none without one."""
    loop = runtime.warm_up(pipeline.conditions(plan), plan.layout, plan.sampling)
    return [] if loop is None else kernel_times(loop.replay)


def cosines(actions: np.ndarray, reference: np.ndarray) -> dict[str, float]:
    """Compares actions [requests, chunk, 8] with those of the same seeds.

    Returns:
        Least and mean cosine over requests, and the largest difference of a joint in radians.
    """
    ours, theirs = (x.reshape(len(x), -1).astype(np.float64) for x in (actions, reference))
    found = (ours * theirs).sum(1) / np.linalg.norm(ours, axis=1) / np.linalg.norm(theirs, axis=1)
    joints = np.abs(actions[..., :7] - reference[..., :7])
    return {
        "least_cosine": round(float(found.min()), 6),
        "mean_cosine": round(float(found.mean()), 6),
        "largest_radians": round(float(joints.max()), 5),
    }


def describe(error: Exception) -> str:
    """Returns the kind of an error and its first line."""
    return f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"


def synchronize(device: torch.device) -> None:
    """Waits for the device if it is a GPU."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
