"""Where the action tokens of a batch stand, and the noise that they start from."""

import torch
from torch import Tensor

from phyai.models.pi05.config import PI05Config
from phyai.models.pi05.prefix import PrefixLayout
from phyai.runtime.paged import PagedPlan


def plan_suffix(
    config: PI05Config, layout: PrefixLayout, device: torch.device
) -> tuple[PagedPlan, Tensor]:
    """Returns the expert's attention plan and positions, both constant over the steps.

    Action tokens see the visible prefix and the whole suffix of their request. π0's state token
    comes first and sees the prefix and itself only.

    Args:
        config: family and sizes.
        layout: of the prefix.
        device: where the plan and the positions go.
    """
    length = config.suffix_len
    queries: list[int] = []
    slots: list[Tensor] = []
    for request, visible in enumerate(layout.visible):
        own = torch.arange(length) + layout.total + request * length
        if config.family == "pi0":
            queries.append(1)
            slots.append(torch.cat([visible, own[:1]]))
        queries.append(config.chunk_size)
        slots.append(torch.cat([visible, own]))
    positions = torch.cat([torch.arange(length) + count for count in layout.visible_counts])
    return PagedPlan.from_slots(queries, slots, device), positions.to(device)


def starting_point(shape: tuple[int, ...], noise: Tensor | None, seed: int | None) -> Tensor:
    """Returns ``noise`` in fp32, or draws it on the CPU.

    Args:
        shape: of the noise.
        noise: given noise; drawn if None.
        seed: of the drawn noise; None draws from fresh entropy.

    Raises:
        ValueError: for a wrong shape, or both noise and seed.
    """
    if noise is None:
        generator = torch.Generator()
        if seed is None:
            generator.seed()
        else:
            generator.manual_seed(seed)
        noise = torch.randn(shape, generator=generator)
    elif seed is not None:
        raise ValueError("give either noise or a seed, not both")
    elif tuple(noise.shape) != shape:
        raise ValueError(f"noise has shape {tuple(noise.shape)}; this batch needs {shape}")
    return noise.float()
