"""Static buffers and recorded graphs for batches of one size.

A chunk is three graphs: the vision tower by number of views, the language model by number of views
and bucket of prompt tokens, and the whole Euler loop. Lengths, positions and visible slots lie on
the device, so requests of any composition replay the same graphs.
"""

from collections import OrderedDict
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from phyai.guidance import Guidance
from phyai.models.pi05.model import PI05Model
from phyai.models.pi05.staging import Staged, most_padding, stage_batch
from phyai.models.pi05.stream import Place
from phyai.processing.inputs import ModelInputs
from phyai.runtime import graphs
from phyai.runtime.paged import PagedKVCache
from phyai.runtime.segments import FIELDS, SegmentPlan

MOST_LOOPS = 8
"""Recorded Euler loops of a lane, each for a number of steps, guided or not."""


class Lane:
    """One batch at a time through buffers of its own, on the current stream.

    Args:
        model: on the device, with cameras dropped and prompts packed.
        batch: requests of a batch.
        pool: graph memory of this lane.
        reuse: compare images and prompts with the last batch's, and compute only views that
            changed, and no prefix where nothing changed.
    """

    def __init__(self, model: PI05Model, batch: int, *, pool: Any, reuse: bool) -> None:
        config, device = model.config, model.device
        self.model = model
        self.batch = batch
        self.reuse = reuse
        self._pool = pool
        self._rows = batch * config.longest_prefix
        self._groups = batch * (1 + (config.family == "pi0"))
        self.cache: PagedKVCache = PagedKVCache.allocate(
            layers=config.language.layers,
            slots=self._rows + batch * config.suffix_len,
            kv_heads=config.language.kv_heads,
            head_dim=config.language.head_dim,
            dtype=model.params_dtype,
            device=device,
        )
        views = batch * len(config.cameras)
        count = batch * config.suffix_len + FIELDS * (self._groups + batch)
        count += views + batch * config.tokenizer_max_length + 2 * self._rows
        height, width = config.image_resolution
        pinned = device.type == "cuda"
        self._numbers = torch.zeros(count, dtype=torch.int32, device=device)
        self._images = torch.zeros(views, 3, height, width, device=device)
        self._host_numbers = torch.zeros(count, dtype=torch.int32, pin_memory=pinned)
        self._host_images = torch.zeros(self._images.shape, pin_memory=pinned)
        self._features = torch.zeros(
            views * config.vision.tokens,
            config.language.width,
            dtype=model.params_dtype,
            device=device,
        )
        chunk = (batch, config.chunk_size, config.max_action_dim)
        self._noise, self._previous = (torch.zeros(chunk, device=device) for _ in range(2))
        self._weights = torch.zeros(batch, config.chunk_size, 1, device=device)
        self._most = torch.zeros(batch, 1, 1, device=device)
        self._state = torch.zeros(batch, config.max_state_dim, device=device)
        self._copied = torch.cuda.Event() if pinned else None
        self._last: Staged | None = None
        self.vision_graphs: dict[int, graphs.CapturedCall] = {}
        self.prefix_graphs: dict[tuple[int, int], graphs.CapturedCall] = {}
        self.loop_graphs: OrderedDict[tuple[int, bool], graphs.CapturedCall] = OrderedDict()

    def _fixed(self) -> list[Tensor]:
        """Splits the numbers into suffix positions, suffix table, prefix table, and the rest."""
        sizes = [
            self.batch * self.model.config.suffix_len,
            FIELDS * self._groups,
            FIELDS * self.batch,
        ]
        sizes.append(self._numbers.numel() - sum(sizes))
        return list(self._numbers.split(sizes))

    def stage(self, inputs: ModelInputs) -> Staged:
        """Decides layout and bucket, and gathers what the device needs; see `stage_batch`."""
        staged = stage_batch(self.model, inputs, first_slot=self._rows)
        if self.reuse:  # callers may fill the same tensor again
            staged = replace(staged, images=[image.clone() for image in staged.images])
        return staged

    def encode(self, staged: Staged) -> None:
        """Copies a batch to the device and runs vision tower and language model."""
        changed = self._changed(staged)
        if changed is None:
            return
        self._last = None  # until all of this batch is there
        if self._copied is not None:
            self._copied.synchronize()
        count = staged.numbers.numel()
        self._host_numbers[:count] = staged.numbers
        fixed = self._numbers.numel() - self._fixed()[3].numel()
        if len(changed) < staged.views:
            self._host_numbers[fixed : fixed + len(changed)] = torch.tensor(changed).int()
        self._numbers[:count].copy_(self._host_numbers[:count], non_blocking=True)
        if changed:
            for place, view in enumerate(changed):
                # NumPy: torch may wait for threads that other processes keep from running
                np.copyto(self._host_images[place].numpy(), staged.images[view].cpu().numpy())
            self._images[: len(changed)].copy_(self._host_images[: len(changed)], non_blocking=True)
        if self._copied is not None:
            self._copied.record()
        if changed:
            self._vision_graph(len(changed))()
        self._prefix_graph(staged.views, staged.tokens)()
        self._last = staged if self.reuse else None

    def _changed(self, staged: Staged) -> list[int] | None:
        """Returns the views to compute, or None where the cache holds this very prefix."""
        everything = [*range(staged.views)]
        last = self._last
        if last is None or last.views != staged.views:
            return everything
        views = [
            view for view in everything if not torch.equal(last.images[view], staged.images[view])
        ]
        same = not views and torch.equal(last.numbers, staged.numbers)
        return None if same else views

    def denoise(
        self, noise: Tensor, state: Tensor | None, num_steps: int, guidance: Guidance | None
    ) -> Tensor:
        """Integrates ``noise`` behind the encoded prefix; the result is overwritten later."""
        self._noise.copy_(noise, non_blocking=True)
        if self.model.state_proj is not None:
            if state is None:
                raise ValueError("π0 needs the robot's state; the inputs have none")
            self._state.copy_(state, non_blocking=True)
        if guidance is not None:
            self._previous.copy_(guidance.previous, non_blocking=True)
            self._weights.copy_(guidance.weights, non_blocking=True)
            self._most.copy_(torch.as_tensor(guidance.most), non_blocking=True)
        return self._loop_graph(num_steps, guidance is not None)()

    def record(self, views: list[int], tokens: list[int], steps: list[int]) -> None:
        """Records the graphs of all combinations that do not exist yet."""
        for count in views:
            self._vision_graph(count)
            for bucket in tokens:
                self._prefix_graph(count, bucket)
        for number in steps:
            self._loop_graph(number, False)

    def recorded(self) -> int:
        """Returns the number of recorded graphs."""
        return len(self.vision_graphs) + len(self.prefix_graphs) + len(self.loop_graphs)

    def _vision_graph(self, views: int) -> graphs.CapturedCall:
        if views not in self.vision_graphs:
            images, places = self._images[:views], self._fixed()[3][:views]
            per_view = self.model.config.vision.tokens
            features = self._features.view(-1, per_view, self._features.shape[1])

            def run() -> Tensor:
                found = self.model.vision(images)
                if self.reuse:
                    return features.index_put_((places,), found)
                return features[:views].copy_(found)

            self.vision_graphs[views] = self._captured(run)
        return self.vision_graphs[views]

    def _prefix_graph(self, views: int, tokens: int) -> graphs.CapturedCall:
        key = (views, tokens)
        if key not in self.prefix_graphs:
            model, config = self.model, self.model.config
            images = views * config.vision.tokens
            rows = images + tokens
            _, _, table, rest = self._fixed()
            _, prompt, order, positions, _ = rest.split(
                [views, tokens, rows, rows, rest.numel() - views - tokens - 2 * rows]
            )
            padding = most_padding(config.tokenizer_max_length) * self.batch
            room = min(rows, config.longest_prefix + padding)
            plan = SegmentPlan(table.view(-1, FIELDS), room, config.longest_prefix)

            def run() -> Tensor:
                x = self._features[:images]
                if tokens:
                    x = torch.cat([x, model.embed_prompt(prompt)])
                if self.batch > 1:
                    x = x.index_select(0, order)
                model.fill_cache(x, positions, self.cache, plan)
                return x

            self.prefix_graphs[key] = self._captured(run)
        return self.prefix_graphs[key]

    def _loop_graph(self, num_steps: int, guided: bool) -> graphs.CapturedCall:
        key = (num_steps, guided)
        if key not in self.loop_graphs:
            self._forget_loops()
            model, config = self.model, self.model.config
            steps = model.step_modulations(num_steps)
            positions, table = self._fixed()[:2]
            plan = SegmentPlan(
                table.view(-1, FIELDS),
                config.chunk_size,
                config.longest_prefix + config.suffix_len,
            )
            place = Place(positions, model.expert_rope, self.cache, self._rows, plan)
            state = None if model.state_proj is None else self._state
            guidance = Guidance(self._previous, self._weights, self._most) if guided else None

            def run() -> Tensor:
                here = replace(place, rotation=place.angles())
                return model.integrate(self._noise, state, steps, here, guidance)

            self.loop_graphs[key] = self._captured(run)
        self.loop_graphs.move_to_end(key)
        return self.loop_graphs[key]

    def _forget_loops(self) -> None:
        """Drops the loops used longest ago, so that clients that vary steps fill no memory."""
        while len(self.loop_graphs) >= MOST_LOOPS:
            if self.model.device.type == "cuda":
                torch.cuda.current_stream(self.model.device).synchronize()
            self.loop_graphs.popitem(last=False)

    def _captured(self, run: Any) -> graphs.CapturedCall:
        return graphs.CapturedCall(run, self.model.device, self._pool)
