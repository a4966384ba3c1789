"""The GPU runtime of Cosmos3: the whole loop from noise to data as one recorded graph."""

import threading
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from phyai.dispatch.bootstrap import get_kernel_selector
from phyai.dispatch.types import Profile
from phyai.models.cosmos3.branches import BoundBranches
from phyai.models.cosmos3.denoise import VelocityModel, denoise
from phyai.models.cosmos3.model import Cosmos3Transformer
from phyai.models.cosmos3.sampler import Sampling
from phyai.models.cosmos3.state import Conditions, Layout, Modalities
from phyai.runtime import graphs

MOST_TOKENS = 65_536
"""Media tokens over all forwards of a loop that is recorded. A policy's loop has 24,744; in longer
ones the device works long enough for the host to launch ahead, and a recording saves nothing."""

LoopKey = tuple[Layout, tuple[int, ...], Sampling]
"""What a graph is recorded for: the grid, the text tokens of each branch, steps and guidance."""


class Cosmos3Runtime:
    """Runs `denoise` by replaying CUDA graphs; an argument of `Cosmos3Pipeline`.

    A graph is recorded when a key is first seen, or beforehand by `warm_up`. It holds every step of
    every branch, so a replay is two copies and one launch. Text tokens are part of the key because
    attention to exactly the keys that exist needs no mask; a robot's instruction stays for an
    episode. The run before a recording answers the request, so a new instruction costs what
    launching the loop costs the host. On other devices, with ``graphs`` off, among ranks and beyond
    `MOST_TOKENS` the loop runs eagerly.

    Args:
        model: the transformer.
        graphs: whether to record on a CUDA device.
        kept: number of graphs to keep, those used last; each has room for keys and values.

    Raises:
        ValueError: for no graph to keep.
    """

    def __init__(self, model: Cosmos3Transformer, *, graphs: bool = True, kept: int = 4) -> None:
        if kept < 1:
            raise ValueError(f"kept is {kept}; it must be at least 1")
        place = model.parallel
        alone = place.branches == 1 and place.tp.size == 1
        self.model = model
        self.kept = kept
        self.records: bool = graphs and alone and model.device.type == "cuda"
        self._pool: Any = None
        self._loops: OrderedDict[LoopKey, RecordedLoop] = OrderedDict()
        self._started = False
        self._lock = threading.Lock()

    @torch.no_grad()
    def __call__(
        self,
        model: VelocityModel,
        state: Modalities,
        conditions: Sequence[Conditions],
        layout: Layout,
        sampling: Sampling,
    ) -> Modalities:
        """Does what `denoise` does.

        Raises:
            ValueError: for another model than that of the runtime, or what `denoise` refuses.
        """
        if model is not self.model:
            raise ValueError("this runtime holds graphs of another model; make one for this model")
        if not self._worth(layout, sampling):
            return denoise(model, state, conditions, layout, sampling)
        with self._lock:
            loop = self._known(conditions, layout, sampling)
            if loop is not None:
                return loop(state, conditions)
            return self._record(state, conditions, layout, sampling).take_first()

    @torch.no_grad()
    def warm_up(
        self, conditions: Sequence[Conditions], layout: Layout, sampling: Sampling
    ) -> "RecordedLoop | None":
        """Records the graph for texts of these lengths; returns it, or None where none is used."""
        if not self._worth(layout, sampling):
            return None
        with self._lock:
            loop = self._known(conditions, layout, sampling)
            if loop is None:
                start = _zeros(self.model, layout)
                loop = self._record(start, conditions, layout, sampling)
                loop.take_first()
            return loop

    def recorded(self) -> int:
        """Returns the number of graphs."""
        return len(self._loops)

    def _worth(self, layout: Layout, sampling: Sampling) -> bool:
        tokens = layout.tokens(self.model.config.latent_patch_size) * sampling.forwards
        return self.records and tokens <= MOST_TOKENS

    def _known(
        self, conditions: Sequence[Conditions], layout: Layout, sampling: Sampling
    ) -> "RecordedLoop | None":
        key = _key(conditions, layout, sampling)
        if key in self._loops:
            self._loops.move_to_end(key)
        return self._loops.get(key)

    def _record(
        self,
        state: Modalities,
        conditions: Sequence[Conditions],
        layout: Layout,
        sampling: Sampling,
    ) -> "RecordedLoop":
        tunes = get_kernel_selector().policy.profile is Profile.AUTOTUNE
        while len(self._loops) >= self.kept:
            self._loops.popitem(last=False)
        if not self._loops:  # a pool that lost its last graph cannot be used again
            self._pool = torch.cuda.graph_pool_handle()
        loop = RecordedLoop(
            self.model,
            state,
            conditions,
            layout,
            sampling,
            pool=self._pool,
            eager=tunes or not self._started,
        )
        self._started = True
        self._loops[_key(conditions, layout, sampling)] = loop
        return loop


class RecordedLoop:
    """One recorded loop with the buffers that it reads.

    Args:
        model: on a CUDA device.
        state: starting point of the runs before the recording.
        conditions: texts; later ones have their lengths.
        layout: of the media.
        sampling: steps and guidance.
        pool: memory that graphs share which never run at the same time.
        eager: see `CapturedCall`.

    Raises:
        ValueError: if guidance needs a second branch and there is none.
    """

    def __init__(
        self,
        model: Cosmos3Transformer,
        state: Modalities,
        conditions: Sequence[Conditions],
        layout: Layout,
        sampling: Sampling,
        *,
        pool: Any,
        eager: bool = True,
    ) -> None:
        self.bound: BoundBranches = model.room(conditions, layout)
        self._masks = model.masks(layout)  # the graph reads them; the model may drop them
        self.state: Modalities = state.map(torch.clone)
        buffers, bound = self.state, _Bound(model, self.bound)
        held, made = tuple(conditions), deque[Tensor](maxlen=2)

        # A function that held the loop would keep its memory until the garbage is collected.
        def run() -> Tensor:
            found = denoise(bound, buffers, held, layout, sampling)
            made.append(torch.cat([part.flatten() for part in _parts(found)]))
            return made[-1]

        self._call = graphs.CapturedCall(run, model.device, pool, eager=eager)
        # What was recorded last is computed by replays only, the run before it is an answer.
        self._first: Tensor | None = made[0]

    def take_first(self) -> Modalities:
        """Returns, once, what the run before the recording made of its state."""
        assert self._first is not None
        first, self._first = self._first, None
        if first.is_cuda:  # it was made on another stream
            first.record_stream(torch.cuda.current_stream(first.device))
        return self._split(first)

    @torch.inference_mode()
    def __call__(self, state: Modalities, conditions: Sequence[Conditions]) -> Modalities:
        """Replays the loop from ``state`` under other texts of the same lengths."""
        for buffer, part in zip(_parts(self.state), _parts(state), strict=True):
            buffer.copy_(part, non_blocking=True)
        if not self.bound.holds(conditions, self.bound.layout):
            self.bound.fill(conditions)
        return self._split(self.replay().clone())

    def _split(self, flat: Tensor) -> Modalities:
        parts = iter(flat.split([part.numel() for part in _parts(self.state)]))
        return self.state.map(lambda like: next(parts).view(like.shape))

    def replay(self) -> Tensor:
        """Runs the loop on what the buffers hold; returns all modalities in one flat buffer."""
        return self._call()


class FrameEncoder:
    """`WanVAE.encode_frame` as a recorded graph for each size of picture.

    Args:
        encode: maps pixels [3, H, W] to latents.
        records: whether to record; pictures must then be on a CUDA device.
    """

    def __init__(self, encode: Callable[[Tensor], Tensor], *, records: bool) -> None:
        self._encode = encode
        self.records = records
        self._loops: dict[tuple[int, ...], graphs.CapturedLoop] = {}

    @torch.no_grad()
    def __call__(self, pixels: Tensor) -> Tensor:
        """Returns what the function returns."""
        if not self.records:
            return self._encode(pixels)
        key = (*pixels.shape, pixels.element_size())
        if key not in self._loops:
            self._loops[key] = graphs.CapturedLoop(self._encode, [pixels])
        return self._loops[key](pixels)


def _key(conditions: Sequence[Conditions], layout: Layout, sampling: Sampling) -> LoopKey:
    return layout, tuple(one.length for one in conditions), sampling


class _Bound:
    """A model whose branches are in place already."""

    def __init__(self, model: Cosmos3Transformer, bound: BoundBranches) -> None:
        self._model, self._bound = model, bound

    def velocities(
        self,
        state: Modalities,
        timestep: int,
        branches: Sequence[Conditions],
        layout: Layout,  # noqa: ARG002  # that of the bound branches
    ) -> list[Modalities]:
        return self._model.velocities_of(self._bound, len(branches), state, timestep)


def _zeros(model: Cosmos3Transformer, layout: Layout) -> Modalities:
    config, device = model.config, model.device
    shape = (config.latent_channel, layout.frames, layout.height, layout.width)
    action = sound = None
    if layout.action is not None:
        action = torch.zeros(layout.action.rows, config.action_dim, device=device)
    if layout.sound_frames:
        sound = torch.zeros(config.sound_dim, layout.sound_frames, device=device)
    return Modalities(torch.zeros(shape, device=device), action, sound)


def _parts(state: Modalities) -> list[Tensor]:
    return [part for part in (state.video, state.action, state.sound) if part is not None]
