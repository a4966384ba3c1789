"""What the host decides about a batch before graphs are replayed: layout, bucket and indices."""

from dataclasses import dataclass
from itertools import accumulate, pairwise

import torch
from torch import Tensor

from phyai.models.pi05.config import PI05Config
from phyai.models.pi05.model import PI05Model
from phyai.models.pi05.prefix import PrefixLayout, plan_prefix
from phyai.processing.inputs import ModelInputs
from phyai.runtime.segments import segment_row

PROMPT_BUCKETS = (0, 16, 32, 48, 64, 96, 128, 160, 200)


def _bucket_sizes(most: int) -> list[int]:
    return sorted({min(size, most) for size in (*PROMPT_BUCKETS, most)})


def prompt_bucket(tokens: int, batch: int, most: int) -> int:
    """Returns how many prompt rows a graph for ``tokens`` of a batch computes.

    Buckets grow with the batch and end at ``most`` tokens a request.
    """
    return next(size * batch for size in _bucket_sizes(most) if size * batch >= tokens)


def most_padding(most: int) -> int:
    """Returns by how many tokens a request neighbouring buckets differ at most."""
    return max(after - before for before, after in pairwise(_bucket_sizes(most)))


@dataclass(frozen=True)
class Staged:
    """What the host decided about one batch.

    Attributes:
        views: images to compute.
        tokens: prompt rows to compute, padding included.
        numbers: int32, everything that the graphs read as indices.
        images: of each view, fp32 [3, H, W].
    """

    views: int
    tokens: int
    numbers: Tensor
    images: list[Tensor]


def stage_batch(model: PI05Model, inputs: ModelInputs, *, first_slot: int) -> Staged:
    """Decides layout and bucket, and gathers what the device needs.

    Args:
        model: with cameras dropped and prompts packed.
        inputs: of the batch.
        first_slot: cache slot of the first action token.

    Raises:
        ValueError: for a prompt that is too long, or a request without any token.
    """
    config = model.config
    model.check_prompt(inputs)
    layout = plan_prefix(inputs, config.vision.tokens, drop_absent=True, pack_prompt=True)
    rows = layout.prompt_rows
    used = int(rows.sum())
    tokens = prompt_bucket(used, len(layout.lengths), config.tokenizer_max_length)
    views = len(layout.views)
    total = views * config.vision.tokens + tokens
    prompt = torch.zeros(tokens, dtype=torch.int64)
    prompt[:used] = inputs.tokens.cpu()[rows]
    order, positions = torch.zeros(2, total, dtype=torch.int64).unbind()
    order[: layout.total] = _order(layout, config.vision.tokens)
    positions[: layout.total] = layout.positions
    numbers = torch.cat(
        [
            *_suffix_numbers(config, layout, first_slot),
            _prefix_table(layout, total - layout.total),
            torch.arange(views),
            prompt,
            order,
            positions,
        ]
    )
    images = [inputs.images[request, camera] for request, camera in layout.views]
    return Staged(views, tokens, numbers.int(), images)


def _order(layout: PrefixLayout, per_view: int) -> Tensor:
    """Returns, for each packed row, its number among all features and then all prompt rows."""
    counts = layout.prompt_rows.sum(1).tolist()
    starts = [len(layout.views) * per_view, *counts]
    parts: list[Tensor] = []
    for request, (start, stop) in enumerate(pairwise(accumulate(starts))):
        for index, (owner, _) in enumerate(layout.views):
            if owner == request:
                parts.append(torch.arange(index * per_view, (index + 1) * per_view))
        parts.append(torch.arange(start, stop))
    return torch.cat(parts)


def _prefix_table(layout: PrefixLayout, padding: int) -> Tensor:
    """Returns which rows see which slots; padding sees what the last request sees."""
    starts = [0, *accumulate(layout.lengths)]
    table = [
        segment_row((start, length), (start, length))
        for start, length in zip(starts, layout.lengths, strict=False)
    ]
    table[-1][1] += padding
    return torch.tensor(table).flatten()


def _suffix_numbers(
    config: PI05Config, layout: PrefixLayout, first_slot: int
) -> tuple[Tensor, Tensor]:
    """Returns positions and table of the action tokens; see `plan_suffix` of the suffix."""
    length = config.suffix_len
    starts = [0, *accumulate(layout.lengths)]
    table: list[list[int]] = []
    for request, count in enumerate(layout.lengths):
        prefix, first = (starts[request], count), request * length
        own = first_slot + first
        if config.family == "pi0":
            table.append(segment_row((first, 1), prefix, (own, 1)))
            first += 1
        table.append(segment_row((first, config.chunk_size), prefix, (own, length)))
    positions = [torch.arange(length) + count for count in layout.lengths]
    return torch.cat(positions), torch.tensor(table).flatten()
