"""Times guidance branches on two devices against both on one."""

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


class BranchRank:
    """One of two ranks, each with a whole model of the same random weights.

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
        self.layout = layout
        self.policy = policy
        with kernels(policy, str(self.device)):
            self.model: Cosmos3Transformer = random_transformer(
                config, params_dtype=dtype, device=self.device
            )
            tokens = CountedTokens(config.vocab_size)
            self.conditions: list[Conditions] = [
                self.model.prefill(torch.tensor(tokens.encode(text))) for text in ("a robot", "")
            ]
        self.together: Parallel = join(cfg_size=2)

    def run(self, sampling: Sampling, runs: int, *, together: bool) -> dict[str, Any]:
        """Times the loop from noise to data.

        Args:
            sampling: steps and guidance.
            runs: timed ones.
            together: whether each rank computes one branch, or both both.

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


def time_branches(
    config: Cosmos3Config,
    layout: Layout,
    sampling: Sampling,
    *,
    dtype: torch.dtype = torch.bfloat16,
    kind: str = "cuda",
    policy: Policy = None,
    runs: int = 3,
) -> dict[str, Any]:
    """Times the loop on two devices, one guidance branch each, and both branches on one device.

    Args:
        config: sizes.
        layout: of the media.
        sampling: steps and guidance.
        dtype: of weights and activations.
        kind: ``cuda``, or ``cpu`` for a rehearsal.
        policy: kernel rules and quantization.
        runs: timed ones of each.

    Returns:
        Milliseconds of both, how much faster two devices are, and the relative difference of
        their results.
    """
    backend = "nccl" if kind == "cuda" else "gloo"
    workers = Workers(2, BranchRank, config, layout, dtype, kind, policy, backend=backend)
    try:
        alone = workers.call("run", sampling, runs, together=False)
        both = workers.call("run", sampling, runs, together=True)
    finally:
        workers.close()
    ours, theirs = torch.as_tensor(both["video"]), torch.as_tensor(alone["video"])
    least = min(alone["ms"]) / min(both["ms"])
    return {
        "one_device_ms": [round(value, 2) for value in alone["ms"]],
        "two_devices_ms": [round(value, 2) for value in both["ms"]],
        "speedup": round(least, 3),
        "relative_difference": float((ours - theirs).norm() / theirs.norm()),
    }
