"""Feed-forward networks of NVFP4 and ConvRot NVFP4 linears, computed by chunks of rows."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from piper_kernels.fusions._ffn.chunks import ROW_TILE
from piper_kernels.fusions._ffn.gated_updates import GatedUpdates
from piper_kernels.fusions._ffn.operands import rows_of, same_scalar, validate_input
from piper_kernels.fusions._rows import require_rows
from piper_kernels.linear.nvfp4._backend import LinearBackend, select_linear_backend
from piper_kernels.linear.nvfp4._contract import validate_level, validate_product
from piper_kernels.weights.convrot._rotation import (
    require_divisible,
    require_group_size,
    rotate_groups,
)
from piper_kernels.weights.nvfp4._encoding import E2M1_MAX, E4M3_MAX
from piper_kernels.weights.nvfp4._layout import scale_shape

_ROTATED_BYTES = 32 << 20  # bounds the rotated FP32 values of the search for a maximum

Prepared = tuple[Tensor, Tensor, Tensor]


@dataclass(frozen=True)
class Projection:
    """An NVFP4 linear that quantizes its input.

    Attributes:
        qdata: uint8 ``[N, K / 2]``.
        scale: Swizzled float8_e4m3fn block scales.
        per_tensor_scale: FP32 scalar of the weight, or ``None``.
        act_per_tensor_scale: Static FP32 scalar of the input, or ``None``.
        bias: ``[N]`` in float16, bfloat16 or float32, or ``None``.
        dynamic: Whether the scale of the input comes from its maximum.
        high_first: Whether even features are in high nibbles.
        group_size: Rotation group along ``K``, 0 for a weight that is not rotated.
    """

    qdata: Tensor
    scale: Tensor
    per_tensor_scale: Tensor | None
    act_per_tensor_scale: Tensor | None
    bias: Tensor | None
    dynamic: bool
    high_first: bool
    group_size: int = 0

    def validate(self, in_features: int, device: torch.device) -> int:
        """Check host metadata and return the number of outputs.

        Raises:
            TypeError: The bias is no tensor.
            ValueError: A shape, dtype, device or layout does not fit.
        """
        if self.group_size:
            require_group_size(self.group_size)
            require_divisible(in_features, self.group_size)
        validate_level("act_per_tensor_scale", self.act_per_tensor_scale, device)
        return validate_product(
            in_features, device, self.qdata, self.scale, self.per_tensor_scale, self.bias
        )

    def prepares_like(self, other: "Projection") -> bool:
        """Return whether two linears of one input can use one preparation of it."""
        if (self.dynamic, self.high_first, self.group_size) != (
            other.dynamic,
            other.high_first,
            other.group_size,
        ):
            return False
        return self.dynamic or same_scalar(self.act_per_tensor_scale, other.act_per_tensor_scale)


def validate_ffn(
    input: Tensor,  # noqa: A002  # the name of F.linear
    sources: Sequence[Projection],
    down: Projection,
    activation_fn: str,
    chunk_rows: int,
    gated_updates: GatedUpdates | None = None,
) -> int:
    """Check the operands of ``run_chunked_ffn`` and return the number of outputs.

    Raises:
        TypeError: ``chunk_rows`` is no integer or a bias no tensor.
        ValueError: A shape, dtype, device or layout does not fit.
    """
    require_rows("chunk_rows", chunk_rows, ROW_TILE)
    validate_input(input, len(sources), activation_fn)
    inner = [source.validate(input.shape[-1], input.device) for source in sources]
    if any(width != inner[0] for width in inner):
        raise ValueError(f"gate and value must have equal outputs, got {inner}")
    outputs = down.validate(inner[0], input.device)
    if gated_updates is not None:
        gated_updates.validate(input, outputs)
    return outputs


def run_chunked_ffn(
    input: Tensor,  # noqa: A002
    sources: Sequence[Projection],
    down: Projection,
    activation_fn: str,
    chunk_rows: int,
    *,
    gated_updates: GatedUpdates | None = None,
) -> Tensor:
    """Return ``down(activation(sources(input)))``, at most ``chunk_rows`` rows at a time.

    The dynamic scale of a source covers the whole input, so a chunked result does not depend
    on the chunks up to there; the one of ``down`` covers the rows of a chunk.

    Args:
        input: ``[..., K]`` in float16, bfloat16 or float32.
        sources: ``(value, gate)`` for ``"swiglu"``, ``(up,)`` for ``"gelu_tanh"``.
        down: ``[N, I]``.
        activation_fn: ``"swiglu"`` or ``"gelu_tanh"``.
        chunk_rows: Rows of a chunk, a multiple of 128.
        gated_updates: Write the gated update of the result instead.

    Returns:
        ``[..., N]`` in the dtype of ``input``; ``gated_updates.reusable_update`` if given.

    Raises:
        The errors of ``validate_ffn``.
    """
    outputs = validate_ffn(input, sources, down, activation_fn, chunk_rows, gated_updates)
    rows = rows_of(input)
    total = rows.shape[0]
    output = None if gated_updates is not None else rows.new_empty((total, outputs))
    space = _Workspace(rows, sources, outputs, min(chunk_rows, total))
    levels = [source_level(rows, source, chunk_rows) for source in sources]
    for start in range(0, total, chunk_rows):
        chunk = rows[start : start + chunk_rows]
        space.project(chunk, sources, levels)
        target = space.result(chunk) if output is None else output[start : start + chunk_rows]
        space.finish(down, activation_fn, target)
        if gated_updates is not None:
            gated_updates.apply(target, start)
    if gated_updates is not None:
        return gated_updates.reusable_update
    assert output is not None
    return output.view(*input.shape[:-1], outputs)


def source_level(rows: Tensor, source: Projection, chunk_rows: int) -> Tensor | None:
    """Return the scale of the whole input, or ``None`` if one chunk can find it by itself.

    Args:
        rows: ``[rows, K]``.
        source: The linear that quantizes them.
        chunk_rows: Rows of a chunk.
    """
    if not source.dynamic:
        return source.act_per_tensor_scale
    if rows.shape[0] <= chunk_rows:
        return None
    step = max(_ROTATED_BYTES // (4 * rows.shape[1]), 1) if source.group_size else chunk_rows
    amax = rows.new_zeros((), dtype=torch.float32)
    for part in rows.split(step):
        if source.group_size:
            part = rotate_groups(part.to(torch.float32), source.group_size)  # noqa: PLW2901
        low, high = torch.aminmax(part)
        amax = torch.maximum(amax, torch.maximum(-low, high).to(torch.float32))
    # A number of Python would be a rounded reciprocal on CUDA; kernels divide exactly.
    return amax / amax.new_full((), E4M3_MAX * E2M1_MAX)


class _Workspace:
    """Buffers of one chunk, used again for every chunk."""

    def __init__(
        self, rows: Tensor, sources: Sequence[Projection], outputs: int, capacity: int
    ) -> None:
        self.backend: LinearBackend = select_linear_backend(rows.device)
        self.inner = sources[0].qdata.shape[0]
        self.outputs = outputs
        self.dtype = rows.dtype
        width = len(sources) * self.inner
        self.projections = rows.new_empty((capacity, width))
        columns = max(rows.shape[1], self.inner)
        self.codes = rows.new_empty((capacity * columns // 2,), dtype=torch.uint8)
        tiles = scale_shape(capacity, columns, swizzled=True)
        self.scales = rows.new_empty((tiles[0] * tiles[1],), dtype=torch.float8_e4m3fn)
        self.level = rows.new_empty((), dtype=torch.float32)
        # The projections are used up before the result of a chunk is written.
        fits = outputs <= width
        self.results = self.projections if fits else rows.new_empty((capacity, outputs))

    def project(
        self, chunk: Tensor, sources: Sequence[Projection], levels: Sequence[Tensor | None]
    ) -> None:
        """Fill the projections ``[value | gate]`` or ``[up]`` of a chunk."""
        self.hidden = self.projections[: chunk.shape[0]]
        prepared: Prepared | None = None
        for index, (source, level) in enumerate(zip(sources, levels, strict=True)):
            if prepared is None or not source.prepares_like(sources[0]):
                dynamic = source.dynamic and level is None
                prepared = self._prepare(chunk, source, level, dynamic)
            columns = slice(index * self.inner, (index + 1) * self.inner)
            self._linear(prepared, source, self.hidden[:, columns])

    def finish(self, down: Projection, activation_fn: str, target: Tensor) -> None:
        """Activate the projections and write the rows of the result."""
        level = None if down.dynamic else down.act_per_tensor_scale
        prepared = self._prepare(self.hidden, down, level, down.dynamic, activation_fn)
        self._linear(prepared, down, target)

    def result(self, chunk: Tensor) -> Tensor:
        """Return room for the result of a chunk."""
        rows = chunk.shape[0]
        return self.results.view(-1)[: rows * self.outputs].view(rows, self.outputs)

    def _prepare(
        self,
        source: Tensor,
        projection: Projection,
        level: Tensor | None,
        dynamic: bool,
        activation_fn: str | None = None,
    ) -> Prepared:
        rows, packed = source.shape[0], projection.qdata.shape[1]
        shape = scale_shape(rows, 2 * packed, swizzled=True)
        out = (
            self.codes[: rows * packed].view(rows, packed),
            self.scales[: shape[0] * shape[1]].view(shape),
            self.level,
        )
        return self.backend.prepare_input(
            source,
            level,
            dynamic,
            activation_fn,
            projection.high_first,
            group_size=projection.group_size,
            out=out,
        )

    def _linear(self, prepared: Prepared, projection: Projection, out: Tensor) -> None:
        self.backend.linear_prepared(
            *prepared,
            projection.qdata,
            projection.scale,
            projection.per_tensor_scale,
            projection.bias,
            self.dtype,
            out=out,
        )
