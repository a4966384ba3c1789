"""Times several devices against one: they share guidance branches, every layer, or both."""

import gc
import time
from collections.abc import Sequence
from typing import Any

import torch
from torch import distributed

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

Grid = tuple[int, int]
"""Guidance branches computed at a time, and ranks that share a layer."""

TWO: tuple[Grid, ...] = ((2, 1), (1, 2))
NAMES = {(2, 1): "branches", (1, 2): "layers"}


class Rank:
    """One of several ranks with the same random weights, at first each with a whole model.

    Args:
        rank: of this process.
        config: sizes.
        layout: of the media.
        dtype: of weights and activations.
        kind: ``cuda`` or ``cpu``.
        policy: kernel rules and quantization.
        alone: whether there is a whole model at first.
    """

    def __init__(
        self,
        rank: int,
        config: Cosmos3Config,
        layout: Layout,
        dtype: torch.dtype,
        kind: str,
        policy: Policy,
        alone: bool = True,
    ) -> None:
        self.device: torch.device = (
            torch.device(kind, rank) if kind == "cuda" else torch.device(kind)
        )
        self.config = config
        self.layout = layout
        self.dtype = dtype
        self.policy = policy
        self.together: Parallel = Parallel()
        self.model: Cosmos3Transformer | None = None
        self.conditions: list[Conditions] = []
        self.parts = 0
        if alone:
            self._build(self.together, 1)

    def place(self, grid: Grid) -> None:
        """Joins the ranks, and makes the model anew where each gets another part of it."""
        branches, parts = grid
        self.together = join(cfg_size=branches, tp_size=parts)
        builds = parts != self.parts
        if builds:
            self.model, self.conditions = None, []
            gc.collect()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats(self.device)
        if builds:
            self._build(self.together, parts)

    def memory(self) -> list[int]:
        """Returns the most bytes that each rank has had in use since its model was placed."""
        cuda = self.device.type == "cuda"
        most = torch.cuda.max_memory_allocated(self.device) if cuda else 0
        found = [0] * distributed.get_world_size()
        distributed.all_gather_object(found, most)
        return found

    def _build(self, parallel: Parallel, parts: int) -> None:
        self.parts = parts
        with kernels(self.policy, str(self.device)):
            self.model = model = random_transformer(
                self.config, params_dtype=self.dtype, device=self.device, parallel=parallel
            )
            tokens = CountedTokens(self.config.vocab_size)
            self.conditions = [
                model.prefill(torch.tensor(tokens.encode(text))) for text in ("a robot", "")
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
        assert model is not None, "there is a model once the rank is placed"
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
        config = self.config
        widths = (config.action_dim, config.sound_dim)
        noise = torch_noise(0, config.latent_channel, self.layout, widths)
        return noise.map(lambda part: part.to(self.device))


def time_ranks(
    config: Cosmos3Config,
    layout: Layout,
    sampling: Sampling,
    *,
    grids: Sequence[Grid] = TWO,
    dtype: torch.dtype = torch.bfloat16,
    kind: str = "cuda",
    policy: Policy = None,
    runs: int = 3,
    alone: bool = True,
) -> dict[str, Any]:
    """Times the loop on one device, and on several that share guidance branches or every layer.

    Args:
        config: sizes.
        layout: of the media.
        sampling: steps and guidance.
        grids: how the devices share the work, each of the same number of them.
        dtype: of weights and activations.
        kind: ``cuda``, or ``cpu`` for a rehearsal.
        policy: kernel rules and quantization.
        runs: timed ones of each.
        alone: whether one device is timed too; it must hold the whole model.

    Returns:
        Milliseconds of one device, and by ``branches``, ``layers`` or ``cfg C x tp T`` those of
        all, how much faster they are, the relative difference of the result, and the most bytes of
        each rank.

    Raises:
        ValueError: for grids of different numbers of devices.
    """
    sizes = {branches * parts for branches, parts in grids}
    if len(sizes) != 1:
        raise ValueError(f"grids {[*grids]} have {sorted(sizes)} devices; they must have the same")
    backend = "nccl" if kind == "cuda" else "gloo"
    ranks = (config, layout, dtype, kind, policy, alone)
    workers = Workers(sizes.pop(), Rank, *ranks, backend=backend)
    found: dict[str, Any] = {}
    try:
        one = workers.call("run", sampling, runs, together=False) if alone else None
        if one is not None:
            found["one_device_ms"] = _rounded(one["ms"])
        for grid in grids:
            workers.call("place", grid)
            shared = workers.call("run", sampling, runs, together=True)
            name = NAMES.get(grid, f"cfg {grid[0]} x tp {grid[1]}")
            found[name] = _compared(shared, one) | {"most_bytes": workers.call("memory")}
    finally:
        workers.close()
    return found


def _rounded(spent: Sequence[float]) -> list[float]:
    return [round(value, 2) for value in spent]


def _compared(found: dict[str, Any], alone: dict[str, Any] | None) -> dict[str, Any]:
    if alone is None:
        return {"ms": _rounded(found["ms"])}
    ours, theirs = torch.as_tensor(found["video"]), torch.as_tensor(alone["video"])
    return {
        "ms": _rounded(found["ms"]),
        "speedup": round(min(alone["ms"]) / min(found["ms"]), 3),
        "relative_difference": float((ours - theirs).norm() / theirs.norm()),
    }
