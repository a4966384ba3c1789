"""Launches of the kernels that encode projected query and key heads. Importing needs Triton."""

# pyright: reportArgumentType=false, reportCallIssue=false

from dataclasses import dataclass

import torch
from torch import Tensor

from piper_kernels._triton.runtime import launch_guard
from piper_kernels._triton.targets import accelerator_target
from piper_kernels.attention._preparation._launch import quantize
from piper_kernels.attention._preparation._statistics import finish, tiles_of
from piper_kernels.attention._quantization import Granularity
from piper_kernels.attention.sparse_piper_attention._preparation import LOG2_E
from piper_kernels.attention.sparse_piper_attention._routing import RoutingMode
from piper_kernels.fusions.projected_qk._kernels import (
    MEAN,
    MINMAX,
    NO_SUMMARY,
    encode_heads_kernel,
)
from piper_kernels.fusions.projected_qk.reference import KEY_DTYPE
from piper_kernels.fusions.projected_qk.transform import HeadTransform

OPTIONS = {"num_warps": 8, "num_stages": 1}
# Two programs of a multiprocessor take turns: one waits for memory while one computes. Where the
# other factor of the rotation comes from shared memory, they have enough registers.
SHARED_OPTIONS = OPTIONS | {"maxnreg": 128}
_SHARED_FACTORS = (9, 10)  # major capabilities
# Tables of cosines and sines stay in the cache of a multiprocessor for all heads of a program.
MOST_PROGRAM_HEADS = 8
_PROGRAMS = 512
_FINISH_TILES = 64
SUMMARIES = {None: NO_SUMMARY, RoutingMode.MINMAX: MINMAX, RoutingMode.MEAN: MEAN}


@dataclass(frozen=True)
class Window:
    """Projected rows of consecutive batches.

    Attributes:
        heads: Floating ``[batches, rows, H * D]``, features side by side.
        first_batch: Its first batch.
        first_row: Its first row, a multiple of 64; it ends at such a multiple or with the
            sequence.
    """

    heads: Tensor
    first_batch: int
    first_row: int


@dataclass(frozen=True)
class Sequence:
    """Sizes that all windows share.

    Attributes:
        batch: Batches.
        heads: Heads.
        rows: Rows of the sequence.
        head_dim: 64 or 128.
        lengths: int32 ``[tiles]``, rows that exist at the front of tiles; ``None``: all.
        device: Where everything is.
    """

    batch: int
    heads: int
    rows: int
    head_dim: int
    lengths: Tensor | None
    device: torch.device

    def floats(self, *sizes: int) -> Tensor:
        """Return uninitialized FP32 ``[B, H, *sizes]``."""
        shape = (self.batch, self.heads, *sizes)
        return torch.empty(shape, dtype=torch.float32, device=self.device)


class QueryEncoder:
    """Quantizes queries window by window.

    Args:
        sequence: Sizes.
        transform: Of the whole sequence.
        softmax_scale: Factor of the logits.
        mode: How blocks are summarized; ``None``: not at all.
        granularity: Which rows share a scale.
    """

    def __init__(
        self,
        sequence: Sequence,
        transform: HeadTransform,
        softmax_scale: float,
        mode: RoutingMode | None,
        granularity: Granularity,
    ) -> None:
        tiles, width = tiles_of(sequence.rows), sequence.head_dim
        groups = granularity.query
        per_tile = 64 // groups.block if groups.groups == 1 else 64
        self.sequence, self.transform, self.mode = sequence, transform, mode
        self.factor, self.granularity = softmax_scale * LOG2_E, granularity
        shape = (sequence.batch, sequence.heads, tiles * 64, width)
        self.codes = torch.empty(shape, dtype=torch.int8, device=sequence.device)
        self.scale = sequence.floats(tiles * per_tile)
        self.summary = sequence.floats(0 if mode is None else tiles, width)

    def encode(self, window: Window) -> None:
        """Quantize and summarize the rows of a window."""
        rows = self.granularity.query
        groups = (rows.repeats, rows.groups, rows.width)
        unused = self.scale
        _encode(
            window, self.sequence, self.transform, self.mode,
            (self.codes, self.scale, unused, unused, self.summary, unused), self.factor, groups,
            is_query=True,
        )  # fmt: skip


class KeyEncoder:
    """Stores keys window by window and quantizes them around their mean at the end.

    Args are those of :class:`QueryEncoder`.
    """

    def __init__(
        self,
        sequence: Sequence,
        transform: HeadTransform,
        mode: RoutingMode | None,
        granularity: Granularity,
    ) -> None:
        tiles, width = tiles_of(sequence.rows), sequence.head_dim
        self.sequence, self.transform, self.mode = sequence, transform, mode
        self.granularity = granularity
        shape = (sequence.batch, sequence.heads, sequence.rows, width)
        self.keys = torch.empty(shape, dtype=KEY_DTYPE, device=sequence.device)
        self.partials = sequence.floats(tiles, width)
        self.summary = sequence.floats(0 if mode is None else tiles, width)
        self.auxiliary = sequence.floats(tiles if mode is RoutingMode.MINMAX else 0, width)

    def encode(self, window: Window) -> None:
        """Store and summarize the rows of a window."""
        unused = self.partials
        _encode(
            window, self.sequence, self.transform, self.mode,
            (unused, unused, self.keys, self.partials, self.summary, self.auxiliary), 1.0,
            (1, 1, 1), is_query=False,
        )  # fmt: skip

    def finish(self) -> tuple[Tensor, Tensor]:
        """Return codes and scales of all keys; every window must have been stored."""
        partials = self.partials.flatten(0, 1).unsqueeze(0)
        lengths = self.sequence.lengths
        known = finish(self.keys, partials, lengths, False, _FINISH_TILES)
        parts = quantize(
            None, self.keys, None, known, granularity=self.granularity, lengths=lengths
        )
        return parts.key.codes, parts.key.scale


def _encode(
    window: Window,
    sequence: Sequence,
    transform: HeadTransform,
    mode: RoutingMode | None,
    targets: tuple[Tensor, ...],
    factor: float,
    groups: tuple[int, int, int],
    *,
    is_query: bool,
) -> None:
    source, lengths, weight = window.heads, sequence.lengths, transform.weight
    batches, tiles = source.shape[0], tiles_of(source.shape[1])
    program_heads = batches * tiles * sequence.heads // _PROGRAMS
    program_heads = min(max(program_heads, 1), MOST_PROGRAM_HEADS)
    grid = (tiles, -(-sequence.heads // program_heads), batches)
    target = accelerator_target(source.device)
    shared = target is not None and target.capability[0] in _SHARED_FACTORS
    with launch_guard(source.device):
        encode_heads_kernel[grid](
            source, transform.cos if weight is None else weight, transform.cos, transform.sin,
            transform.cos if lengths is None else lengths, *targets,
            sequence.rows, sequence.heads, program_heads, window.first_row // 64,
            window.first_batch, transform.eps, factor, source.stride(0), source.stride(1),
            D=sequence.head_dim, ROTARY=transform.cos.shape[1], GROUPS=groups, IS_QUERY=is_query,
            SUMMARY=SUMMARIES[mode].value, HAS_WEIGHT=weight is not None,
            MASKED=lengths is not None, WIDE=target is None,
            **(SHARED_OPTIONS if shared else OPTIONS),
        )  # fmt: skip
