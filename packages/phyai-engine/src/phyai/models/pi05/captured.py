"""The Euler loop of π0.5 and π0 as one CUDA graph."""

import torch
from torch import Tensor

from phyai.models.pi05.model import PI05Model
from phyai.models.pi05.prefix import PrefixLayout
from phyai.models.pi05.stream import Place
from phyai.models.pi05.suffix import plan_suffix
from phyai.runtime.graphs import CapturedLoop
from phyai.runtime.paged import PagedKVCache


class CapturedDenoise:
    """The steps from noise to actions for one prefix layout, recorded when it is built.

    A layout fixes how many tokens each request has and which of them may be seen, so one graph
    serves every batch with the same cameras and prompt lengths, whatever they show and say.

    Args:
        model: on a CUDA device.
        cache: of an encoded prefix; the graph keeps it as its own buffer.
        layout: of that prefix.
        num_steps: Euler steps; the checkpoint's number if None.

    Raises:
        ValueError: if the model is not on a CUDA device.
    """

    @torch.inference_mode()
    def __init__(
        self,
        model: PI05Model,
        cache: PagedKVCache,
        layout: PrefixLayout,
        *,
        num_steps: int | None = None,
    ) -> None:
        config, batch = model.config, len(layout.lengths)
        self.layout = layout
        self._cache = cache
        plan, positions = plan_suffix(model.config, layout, model.device)
        steps = model.step_modulations(num_steps)

        def run(actions: Tensor, state: Tensor | None = None) -> Tensor:
            place = Place(positions, model.expert_rope, cache, layout.total, plan)
            return model.integrate(actions, state, steps, place)

        shapes: list[tuple[int, ...]] = [(batch, config.chunk_size, config.max_action_dim)]
        if model.state_proj is not None:
            shapes.append((batch, config.max_state_dim))
        self._loop = CapturedLoop(
            run, [torch.zeros(shape, device=model.device) for shape in shapes]
        )

    @torch.inference_mode()
    def __call__(
        self,
        cache: PagedKVCache,
        layout: PrefixLayout,
        noise: Tensor,
        state: Tensor | None = None,
    ) -> Tensor:
        """Integrates ``noise`` [B, chunk, A] behind an encoded prefix.

        Args:
            cache: of the prefix.
            layout: of the prefix, equal to the recorded one.
            noise: starting point in fp32.
            state: π0's state [B, S].

        Returns:
            Normalised actions [B, chunk, A] in fp32.

        Raises:
            ValueError: for another layout, or inputs of another shape.
        """
        if not same_layout(layout, self.layout):
            raise ValueError(
                f"the graph was recorded for {list(self.layout.visible_counts)} visible of "
                f"{list(self.layout.lengths)} tokens, got {list(layout.visible_counts)} of "
                f"{list(layout.lengths)}; record another graph for this layout"
            )
        if cache is not self._cache:
            self._cache.keys.copy_(cache.keys)
            self._cache.values.copy_(cache.values)
        return self._loop(noise) if state is None else self._loop(noise, state)


def same_layout(one: PrefixLayout, other: PrefixLayout) -> bool:
    """Whether two prefixes have the same tokens and the same visible ones."""
    return one.lengths == other.lengths and all(
        torch.equal(left, right) for left, right in zip(one.visible, other.visible, strict=True)
    )
