"""NVFP4 linears around the windows of an attention."""

from dataclasses import dataclass, field

import torch
from torch import Tensor

from piper_kernels.fusions._ffn.nvfp4 import Prepared, Projection, source_level
from piper_kernels.fusions.nvfp4_sparse_piper._operands import PackedInput, PackedProjection
from piper_kernels.linear.nvfp4._backend import select_linear_backend
from piper_kernels.weights.nvfp4._layout import scale_shape


@dataclass
class NVFP4OutputLinear:
    """The linear behind an attention; prepared chunks of it share one workspace.

    Attributes:
        linear: The linear.
        level: Second level of its input; ``None``: a chunk finds its own.
    """

    linear: Projection
    level: Tensor | None
    _workspace: Prepared | None = field(default=None, init=False)

    @property
    def tensors(self) -> list[Tensor]:
        """What it reads besides its input."""
        linear = self.linear
        named = (linear.qdata, linear.scale, linear.per_tensor_scale, linear.bias, self.level)
        return [tensor for tensor in named if tensor is not None]

    def project(self, attention: Tensor, out: Tensor) -> None:
        """Write the linear ``[B, rows, N]`` of merged heads ``[B, rows, H * D]``."""
        for heads, target in zip(attention.unbind(0), out.unbind(0), strict=True):
            self.project_rows(heads, target)

    def project_rows(self, heads: Tensor, out: Tensor) -> None:
        """Write the linear ``[rows, N]`` of merged heads ``[rows, H * D]``.

        The heads are packed before the result is written, which may overwrite them.
        """
        linear, backend = self.linear, select_linear_backend(heads.device)
        prepared = backend.prepare_input(
            heads,
            self.level,
            linear.dynamic and self.level is None,
            None,
            linear.high_first,
            group_size=linear.group_size,
            out=self._room(heads),
        )
        weight = (linear.qdata, linear.scale, linear.per_tensor_scale, linear.bias)
        backend.linear_prepared(*prepared, *weight, heads.dtype, out=out)

    def _room(self, heads: Tensor) -> Prepared:
        rows, features = heads.shape
        tiles = scale_shape(rows, features, swizzled=True)
        if self._workspace is None or self._workspace[0].shape[0] < rows:
            # Made where it is used: by the stream that projects, for the longest chunk first.
            self._workspace = (
                heads.new_empty((rows, features // 2), dtype=torch.uint8),
                heads.new_empty(tiles, dtype=torch.float8_e4m3fn),
                heads.new_empty((), dtype=torch.float32),
            )
        codes, scales, level = self._workspace
        return codes[:rows], scales[: tiles[0]], level


def project_with_one_scale(attention: Tensor, linear: Projection, chunk_rows: int) -> Tensor:
    """Return the linear of an attention whose dynamic scale covers all of it.

    Where the result is not wider it takes the place of the attention, whose allocation stays as
    large as it was: a chunk is packed before its rows are overwritten.

    Args:
        attention: Contiguous ``[1, rows, H * D]``; overwritten.
        linear: A linear with a dynamic scale.
        chunk_rows: Most rows that are packed at one time, a multiple of 128.

    Returns:
        ``[1, rows, N]``.
    """
    heads, outputs = attention[0], linear.qdata.shape[0]
    rows, width = heads.shape
    if outputs <= width:
        out = heads.view(-1)[: rows * outputs].view(rows, outputs)
    else:
        out = heads.new_empty((rows, outputs))
    projection = NVFP4OutputLinear(linear, source_level(heads, linear, chunk_rows))
    for start in range(0, rows, chunk_rows):
        chunk = slice(start, min(start + chunk_rows, rows))
        projection.project_rows(heads[chunk], out[chunk])
    return out[None]


@dataclass(frozen=True)
class NVFP4Gates:
    """Gates that an NVFP4 linear makes window by window.

    Attributes:
        inputs: What is projected.
        projection: The linear.
    """

    inputs: PackedInput
    projection: PackedProjection
    projected: bool = field(default=True, init=False)

    @property
    def tensors(self) -> list[Tensor]:
        """What they are made of."""
        return [*self.inputs.tensors, *self.projection.tensors]

    def window(self, rows: slice, out: Tensor | None) -> Tensor:
        """Write the gates of a window ``[1, rows, H, D]`` and return them."""
        assert out is not None, "projected gates need room"
        part, weight = self.inputs.window(rows), self.projection
        backend = select_linear_backend(out.device)
        backend.linear_prepared(
            part.qdata,
            part.scale,
            part.level,
            weight.qdata,
            weight.scale,
            weight.level,
            weight.bias,
            out.dtype,
            out=out.flatten(2)[0],
        )
        return out
