"""Launches of the kernels that encode projected value heads. Importing needs Triton."""

# pyright: reportArgumentType=false, reportCallIssue=false

import torch
from torch import Tensor

from piper_kernels._triton.runtime import launch_guard
from piper_kernels.attention._preparation._launch import Values
from piper_kernels.attention._preparation._statistics import tiles_of
from piper_kernels.fusions.projected_qk._launch import Sequence, Window
from piper_kernels.fusions.projected_value._kernels import (
    encode_projected_values_kernel,
    project_mean_kernel,
)

_PROGRAMS, _MOST_TILES = 2048, 8
_MEAN_ROWS, _MEAN_COLUMNS = 8, 512


class ValueEncoder:
    """Quantizes values window by window.

    Args:
        sequence: Sizes.
        mean: FP32 ``[B, H, D]`` to subtract; ``None``: nothing.
        per_tile: Whether 64 rows share a scale; needs a mean.
        with_block_means: Whether means of blocks of 64 rows are wanted.
    """

    def __init__(
        self, sequence: Sequence, mean: Tensor | None, per_tile: bool, with_block_means: bool
    ) -> None:
        tiles, width = tiles_of(sequence.rows), sequence.head_dim
        self.sequence, self.mean = sequence, mean
        self.values = Values.PER_KEY if mean is None else Values.CENTERED
        if per_tile:
            self.values = Values.PER_TILE
        shape = (sequence.batch, sequence.heads, width, tiles * 64)
        self.codes = torch.empty(shape, dtype=torch.int8, device=sequence.device)
        self.multiplier = sequence.floats(*((tiles, 1) if per_tile else (tiles * 64,)))
        self.block_means = sequence.floats(tiles, width) if with_block_means else None

    def encode(self, window: Window) -> None:
        """Quantize the rows of a window."""
        source, sequence = window.heads, self.sequence
        batches, tiles = source.shape[0], tiles_of(source.shape[1])
        some = min(max(batches * sequence.heads * tiles // _PROGRAMS, 1), _MOST_TILES)
        lengths, means = sequence.lengths, self.block_means
        with launch_guard(source.device):
            encode_projected_values_kernel[(-(-tiles // some), sequence.heads, batches)](
                source, self.codes.flatten().view(torch.int32), self.multiplier,
                self.multiplier if self.mean is None else self.mean,
                self.multiplier if means is None else means,
                self.multiplier if lengths is None else lengths,
                sequence.rows, sequence.heads, window.first_row // 64, window.first_batch, some,
                tiles, source.stride(0), source.stride(1),
                D=sequence.head_dim, VALUES=int(self.values), BLOCK_MEANS=means is not None,
                MASKED=lengths is not None,
            )  # fmt: skip


def project_mean(input_mean: Tensor, qdata: Tensor, scale: Tensor, bias: Tensor | None) -> Tensor:
    """Return ``(input_mean @ qdata.T) * scale + bias``, FP32 ``[B, N]``.

    Args:
        input_mean: FP32 ``[B, F]``, contiguous.
        qdata: int8 ``[N, F]``, contiguous.
        scale: FP32 ``[N, 1]``, contiguous.
        bias: Floating ``[N]``, any stride, or ``None``.
    """
    outputs, features = qdata.shape
    batch = input_mean.shape[0]
    out = input_mean.new_empty((batch, outputs))
    with launch_guard(input_mean.device):
        project_mean_kernel[(-(-outputs // _MEAN_ROWS), batch)](
            input_mean, qdata, scale, scale if bias is None else bias, out, outputs, features,
            1 if bias is None else bias.stride(0),
            HAS_BIAS=bias is not None, ROWS=_MEAN_ROWS, COLUMNS=_MEAN_COLUMNS,
        )  # fmt: skip
    return out
