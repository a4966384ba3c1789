"""Times several devices against one: they share guidance branches, every layer, or both."""

import contextlib
import gc
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import distributed

from phyai.models.cosmos3.bench import CountedTokens, Policy, describe, kernels, synchronize
from phyai.models.cosmos3.config import Cosmos3Config
from phyai.models.cosmos3.denoise import denoise
from phyai.models.cosmos3.floor import layer_parameters
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
Data = dict[str, torch.Tensor]
"""What the loop makes, by modality."""

NAMES = {(2, 1): "branches", (1, 2): "layers"}


def weight_bytes(config: Cosmos3Config, parts: int) -> float:
    """Returns the bytes in 16 bits of the towers and the vocabulary that a rank holds.

    Args:
        config: sizes.
        parts: ranks that share a layer.
    """
    layers = 2 * config.num_hidden_layers * layer_parameters(config)
    return 2.0 * (layers + config.vocab_size * config.hidden_size) / parts


def grid_name(grid: Grid | None) -> str:
    """Returns what results of ``grid`` are stored under; None is one device."""
    if grid is None:
        return "one_device"
    return NAMES.get(grid, f"cfg {grid[0]} x tp {grid[1]}")


class Rank:
    """One of several ranks with the same random weights; it has no model before it is placed.

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
        self.together: Parallel = Parallel()
        self.model: Cosmos3Transformer | None = None
        self.conditions: list[Conditions] = []
        self.parts = 0

    def exact(self, sampling: Sampling) -> Data:
        """Returns the data of a whole model in fp32, which is not kept."""
        with kernels(None, str(self.device)), torch.no_grad():
            model, conditions = self._make(Parallel(), torch.float32)
            found = denoise(model, self._noise(), conditions, self.layout, sampling)
        return _data(found)

    def place(self, grid: Grid | None) -> None:
        """Joins the ranks, and makes the model anew where each gets another part of it.

        Args:
            grid: how they share the work; each has a whole model and does all of it if None.
        """
        branches, parts = (1, 1) if grid is None else grid
        self.together = Parallel() if grid is None else join(cfg_size=branches, tp_size=parts)
        builds = self.model is None or parts != self.parts
        if builds:
            self.model, self.conditions = None, []
            gc.collect()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats(self.device)
        if builds:
            with kernels(self.policy, str(self.device)):
                self.model, self.conditions = self._make(self.together, self.dtype)
            self.parts = parts

    def memory(self) -> list[int]:
        """Returns the most bytes that each rank has had in use since its model was placed."""
        cuda = self.device.type == "cuda"
        most = torch.cuda.max_memory_allocated(self.device) if cuda else 0
        found = [0] * distributed.get_world_size()
        distributed.all_gather_object(found, most)
        return found

    def _make(
        self, parallel: Parallel, dtype: torch.dtype
    ) -> tuple[Cosmos3Transformer, list[Conditions]]:
        model = random_transformer(
            self.config, params_dtype=dtype, device=self.device, parallel=parallel
        )
        tokens = CountedTokens(self.config.vocab_size)
        texts = [torch.tensor(tokens.encode(text)) for text in ("a robot", "")]
        return model, [model.prefill(text) for text in texts]

    def run(self, sampling: Sampling, runs: int) -> dict[str, Any]:
        """Times the loop from noise to data, as the ranks were placed.

        Args:
            sampling: steps and guidance.
            runs: timed ones.

        Returns:
            Milliseconds of each run, and the data.
        """
        model = self.model
        assert model is not None, "there is a model once the rank is placed"
        model.parallel = self.together
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
        return {"ms": spent, "data": _data(found)}

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
    exact: bool = False,
    report: Callable[[str, dict[str, Any]], None] | None = None,
) -> dict[str, Any]:
    """Times the loop on one device, and on several that share guidance branches or every layer.

    What fails has its reason as ``error`` in place of its results, and the rest goes on.

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
        exact: whether one device also computes the result in fp32, to tell the error of ``dtype``
            from that of sharing; it must hold the whole model in fp32.
        report: is told the name and the result of each part as soon as it has ended.

    Returns:
        By ``one_device``, and by ``branches``, ``layers`` or ``cfg C x tp T`` for all devices:
        milliseconds, the most bytes of each rank, and, where there is something to compare with,
        how much faster than one device, and by modality the relative difference of the data to
        one device's and to the data in fp32, the norm of the difference over that of the data.

    Raises:
        ValueError: for grids of different numbers of devices.
    """
    sizes = {branches * parts for branches, parts in grids}
    if len(sizes) != 1:
        raise ValueError(f"grids {[*grids]} have {sorted(sizes)} devices; they must have the same")
    backend = "nccl" if kind == "cuda" else "gloo"
    workers = Workers(sizes.pop(), Rank, config, layout, dtype, kind, policy, backend=backend)
    with contextlib.closing(workers):
        comparison = _Comparison(workers, sampling, runs)
        parts: dict[str, Callable[[], dict[str, Any]]] = {}
        if exact:
            parts["fp32"] = comparison.compute_in_fp32
        for grid in [None, *grids] if alone else grids:
            parts[grid_name(grid)] = partial(comparison.time_placed, grid)
        return _results(parts, report)


class _Comparison:
    """Times ranks, and compares them with one device and with fp32 where these came before."""

    def __init__(self, workers: Workers, sampling: Sampling, runs: int) -> None:
        self.workers, self.sampling, self.runs = workers, sampling, runs
        self.alone: dict[str, Any] | None = None
        self.exact: Data | None = None

    def compute_in_fp32(self) -> dict[str, Any]:
        """Keeps the data in fp32; there is nothing to report of it."""
        self.exact = self.workers.call("exact", self.sampling)
        return {}

    def time_placed(self, grid: Grid | None) -> dict[str, Any]:
        """Places the ranks and returns their times, differences and bytes."""
        self.workers.call("place", grid)
        timed = self.workers.call("run", self.sampling, self.runs)
        found: dict[str, Any] = {"ms": [round(value, 2) for value in timed["ms"]]}
        if self.alone is not None:
            found["speedup"] = round(min(self.alone["ms"]) / min(timed["ms"]), 3)
            found["difference"] = _differences(timed["data"], self.alone["data"])
        if self.exact is not None:
            found["difference_to_fp32"] = _differences(timed["data"], self.exact)
        if grid is None:
            self.alone = timed
        return found | {"most_bytes": self.workers.call("memory")}


def _results(
    parts: dict[str, Callable[[], dict[str, Any]]],
    report: Callable[[str, dict[str, Any]], None] | None,
) -> dict[str, Any]:
    """Returns what each part finds, or its error; parts that find nothing are left out."""
    found: dict[str, Any] = {}
    for name, measure in parts.items():
        try:
            result = measure()
        except Exception as error:  # the other parts are still worth measuring
            result = {"error": describe(error)}
        if result:
            found[name] = result
            if report is not None:
                report(name, result)
    return found


def _data(found: Modalities) -> Data:
    parts = {"video": found.video, "action": found.action, "sound": found.sound}
    return {name: part for name, part in parts.items() if part is not None}


def _differences(ours: Data, theirs: Data) -> dict[str, float]:
    return {
        name: float((part - theirs[name]).norm() / theirs[name].norm())
        for name, part in ours.items()
    }
