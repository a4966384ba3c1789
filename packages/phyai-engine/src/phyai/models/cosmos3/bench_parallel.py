"""Times two devices against one: a guidance branch on each, or half of every layer on each."""

import gc
import time
from typing import Any

import torch

from phyai.models.cosmos3.bench import CountedTokens, Policy, kernels, synchronize
from phyai.models.cosmos3.config import Cosmos3Config
from phyai.models.cosmos3.denoise import denoise
from phyai.models.cosmos3.model import Cosmos3Transformer
from phyai.models.cosmos3.noise import torch_noise
from phyai.models.cosmos3.parallel import Parallel, join
from phyai.models.cosmos3.random_weights import random_transformer
from phyai.models.cosmos3.sampler import Sampling
from phyai.models.cosmos3.state import ActionLayout, Conditions, Layout, Modalities
from phyai.runtime.workers import Workers

DROID_LAYOUT = Layout(
    9, 33, 40, clean_frames=(0,), fps=15.0, action=ActionLayout(33, 0, (0,), 8, 8)
)
"""The media of the DROID policy's request."""


class Rank:
    """One of two ranks with the same random weights, at first each with a whole model.

    Args:
        rank: of this process.
        config: sizes.
        layout: of the media.
        dtype: of weights and activations.
        kind: ``cuda`` or ``cpu``.
        policy: kernel rules and quantization.
    """

    def __init__(
        self,
        rank: int,
        config: Cosmos3Config,
        layout: Layout,
        dtype: torch.dtype,
        kind: str,
        policy: Policy,
    ) -> None:
        self.device: torch.device = (
            torch.device(kind, rank) if kind == "cuda" else torch.device(kind)
        )
        self.config = config
        self.layout = layout
        self.dtype = dtype
        self.policy = policy
        self.together: Parallel = join(cfg_size=2)
        self._build(Parallel())

    def shard(self) -> None:
        """Replaces the model by this rank's half of every layer."""
        del self.model, self.conditions
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
        self.together = join(tp_size=2)
        self._build(self.together)

    def _build(self, parallel: Parallel) -> None:
        with kernels(self.policy, str(self.device)):
            self.model: Cosmos3Transformer = random_transformer(
                self.config, params_dtype=self.dtype, device=self.device, parallel=parallel
            )
            tokens = CountedTokens(self.config.vocab_size)
            self.conditions: list[Conditions] = [
                self.model.prefill(torch.tensor(tokens.encode(text))) for text in ("a robot", "")
            ]

    def run(self, sampling: Sampling, runs: int, *, together: bool) -> dict[str, Any]:
        """Times the loop from noise to data.

        Args:
            sampling: steps and guidance.
            runs: timed ones.
            together: whether ranks share the work, or each does all of it.

        Returns:
            Milliseconds of each run, and the video latents.
        """
        model = self.model
        model.parallel = self.together if together else Parallel()
        state = self._noise()
        spent: list[float] = []
        with kernels(self.policy, str(self.device)), torch.no_grad():
            found = denoise(model, state, self.conditions, self.layout, sampling)
            for _ in range(runs):
                synchronize(self.device)
                start = time.perf_counter()
                found = denoise(model, state, self.conditions, self.layout, sampling)
                synchronize(self.device)
                spent.append(1e3 * (time.perf_counter() - start))
        return {"ms": spent, "video": found.video}

    def _noise(self) -> Modalities:
        config = self.model.config
        widths = (config.action_dim, config.sound_dim)
        noise = torch_noise(0, config.latent_channel, self.layout, widths)
        return noise.map(lambda part: part.to(self.device))


def time_ranks(
    config: Cosmos3Config,
    layout: Layout,
    sampling: Sampling,
    *,
    dtype: torch.dtype = torch.bfloat16,
    kind: str = "cuda",
    policy: Policy = None,
    runs: int = 3,
) -> dict[str, Any]:
    """Times the loop on one device, and on two that share guidance branches or every layer.

    Args:
        config: sizes.
        layout: of the media.
        sampling: steps and guidance.
        dtype: of weights and activations.
        kind: ``cuda``, or ``cpu`` for a rehearsal.
        policy: kernel rules and quantization.
        runs: timed ones of each.

    Returns:
        Milliseconds of one device, and for ``branches`` and ``layers`` those of two, how much
        faster they are, and the relative difference of the result.
    """
    backend = "nccl" if kind == "cuda" else "gloo"
    workers = Workers(2, Rank, config, layout, dtype, kind, policy, backend=backend)
    try:
        alone = workers.call("run", sampling, runs, together=False)
        branches = workers.call("run", sampling, runs, together=True)
        workers.call("shard")
        layers = workers.call("run", sampling, runs, together=True)
    finally:
        workers.close()
    return {
        "one_device_ms": [round(value, 2) for value in alone["ms"]],
        "branches": _compared(branches, alone),
        "layers": _compared(layers, alone),
    }


def _compared(found: dict[str, Any], alone: dict[str, Any]) -> dict[str, Any]:
    ours, theirs = torch.as_tensor(found["video"]), torch.as_tensor(alone["video"])
    return {
        "ms": [round(value, 2) for value in found["ms"]],
        "speedup": round(min(alone["ms"]) / min(found["ms"]), 3),
        "relative_difference": float((ours - theirs).norm() / theirs.norm()),
    }
