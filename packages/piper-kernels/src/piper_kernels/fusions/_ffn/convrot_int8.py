"""Feed-forward networks of ConvRot INT8 linears, computed by chunks of rows."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from piper_kernels.fusions._ffn.chunks import int8_row_bytes, int8_rows_of
from piper_kernels.fusions._ffn.gated_updates import GatedUpdates
from piper_kernels.fusions._ffn.operands import rows_of, same_scalar, validate_input
from piper_kernels.fusions._rows import require_rows
from piper_kernels.linear._bias import validate_bias
from piper_kernels.linear.convrot.int8._backend import LinearBackend, select_linear_backend
from piper_kernels.weights.convrot.int8._storage import (
    validate_activation_scale,
    validate_storage,
)


@dataclass(frozen=True)
class Projection:
    """A ConvRot INT8 linear.

    Attributes:
        qdata: int8 ``[N, K]``.
        scale: FP32 ``[N, 1]``.
        bias: ``[N]`` in float16, bfloat16 or float32, or ``None``.
        group_size: Rotation group along ``K``.
        input_scale: Static FP32 scalar scale of the input; ``None`` scales each row.
    """

    qdata: Tensor
    scale: Tensor
    bias: Tensor | None
    group_size: int
    input_scale: Tensor | None

    def validate(self, in_features: int, device: torch.device) -> None:
        """Check host metadata.

        Raises:
            TypeError: The bias is no tensor.
            ValueError: A shape, dtype, device or layout does not fit.
        """
        validate_storage(self.qdata, self.scale, self.group_size)
        if self.qdata.ndim != 2 or self.qdata.shape[1] != in_features:
            raise ValueError(
                f"a projection must have {in_features} input features, "
                f"got weight shape {tuple(self.qdata.shape)}"
            )
        if self.qdata.device != device:
            raise ValueError(f"operands must share a device, got {device} and {self.qdata.device}")
        validate_activation_scale(self.input_scale, device)
        validate_bias(self.bias, self.qdata.shape[0], device)


def validate_ffn(
    input: Tensor,  # noqa: A002  # the name of F.linear
    sources: Sequence[Projection],
    down: Projection,
    activation_fn: str,
    chunk_rows: int,
    gated_updates: GatedUpdates | None = None,
) -> None:
    """Check the host metadata of the operands of ``run_chunked_ffn``.

    Raises:
        TypeError: ``chunk_rows`` is no integer or a bias no tensor.
        ValueError: A shape, dtype, device or layout does not fit.
    """
    require_rows("chunk_rows", chunk_rows)
    validate_input(input, len(sources), activation_fn)
    first = sources[0]
    for source in sources:
        source.validate(input.shape[-1], input.device)
        if source.qdata.shape != first.qdata.shape or source.group_size != first.group_size:
            raise ValueError(
                "gate and value must share their shape and group size, got "
                f"{tuple(first.qdata.shape)} by {first.group_size} and "
                f"{tuple(source.qdata.shape)} by {source.group_size}"
            )
    down.validate(first.qdata.shape[0], input.device)
    if gated_updates is not None:
        gated_updates.validate(input, down.qdata.shape[0])


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

    A chunk needs the projections ``[rows, len(sources) * I]``, one INT8 buffer of
    ``max(K, I)`` columns for both prepared inputs, and FP32 row scales. Sources that scale
    their input alike share its preparation and one launch.

    Args:
        input: ``[..., K]`` in float16, bfloat16 or float32.
        sources: ``(value, gate)`` for ``"swiglu"``, ``(up,)`` for ``"gelu_tanh"``; of equal
            shape ``[I, K]`` and group size.
        down: ``[N, I]``.
        activation_fn: ``"swiglu"`` or ``"gelu_tanh"``.
        chunk_rows: Most rows of a chunk; chunks are as equal as tiles of 128 rows allow, and an
            eighth of the input at most where 128 MiB do not hold more.
        gated_updates: Write the gated update of the result instead.

    Returns:
        ``[..., N]`` in the dtype of ``input``; ``gated_updates.reusable_update`` if given.

    Raises:
        The errors of ``validate_ffn``.
    """
    validate_ffn(input, sources, down, activation_fn, chunk_rows, gated_updates)
    rows = rows_of(input)
    out_features = down.qdata.shape[0]
    output = None if gated_updates is not None else rows.new_empty((rows.shape[0], out_features))
    widths = (rows.shape[1], sources[0].qdata.shape[0], out_features)
    row_bytes = int8_row_bytes(
        len(sources), *widths, rows.element_size(), gated_updates=gated_updates is not None
    )
    size = int8_rows_of(rows.shape[0], chunk_rows, row_bytes)
    space = _Workspace(rows, sources, down, min(size, rows.shape[0]))
    for start in range(0, rows.shape[0], size):
        chunk = rows[start : start + size]
        space.project(chunk, sources)
        target = space.result(chunk) if output is None else output[start : start + size]
        space.finish(down, activation_fn, target)
        if gated_updates is not None:
            gated_updates.apply(target, start)
    if gated_updates is not None:
        return gated_updates.reusable_update
    assert output is not None
    return output.view(*input.shape[:-1], out_features)


class _Workspace:
    """Buffers of one chunk, used again for every chunk."""

    def __init__(
        self, rows: Tensor, sources: Sequence[Projection], down: Projection, capacity: int
    ) -> None:
        self.backend: LinearBackend = select_linear_backend(rows.device)
        self.inner = sources[0].qdata.shape[0]
        self.outputs = down.qdata.shape[0]
        self.dtype = rows.dtype
        width = len(sources) * self.inner
        self.projections = rows.new_empty((capacity, width))
        columns = max(rows.shape[1], self.inner)
        self.codes = rows.new_empty((capacity * columns,), dtype=torch.int8)
        self.scales = rows.new_empty((capacity,), dtype=torch.float32)
        # The projections are used up before the result of a chunk is written.
        fits = self.outputs <= width
        self.results = self.projections if fits else rows.new_empty((capacity, self.outputs))

    def project(self, chunk: Tensor, sources: Sequence[Projection]) -> None:
        """Fill the projections ``[value | gate]`` or ``[up]`` of a chunk."""
        first, *others = sources
        self.hidden = self.projections[: chunk.shape[0]]
        if others and same_scalar(first.input_scale, others[0].input_scale):
            second = others[0]
            paired = (second.qdata, second.scale, second.bias)
            self._linear(self._prepare(chunk, first), first, self.hidden, paired)
            return
        for index, source in enumerate(sources):
            columns = slice(index * self.inner, (index + 1) * self.inner)
            self._linear(self._prepare(chunk, source), source, self.hidden[:, columns], None)

    def finish(self, down: Projection, activation_fn: str, target: Tensor) -> None:
        """Activate the projections and write the rows of the result."""
        self._linear(self._prepare(self.hidden, down, activation_fn), down, target, None)

    def result(self, chunk: Tensor) -> Tensor:
        """Return room for the result of a chunk."""
        rows = chunk.shape[0]
        return self.results.view(-1)[: rows * self.outputs].view(rows, self.outputs)

    def _prepare(
        self, source: Tensor, projection: Projection, activation_fn: str | None = None
    ) -> tuple[Tensor, Tensor]:
        rows, features = source.shape[0], projection.qdata.shape[1]
        out = (self.codes[: rows * features].view(rows, features), self.scales[:rows])
        return self.backend.prepare_input(
            source, projection.group_size, activation_fn, projection.input_scale, out=out
        )

    def _linear(
        self,
        prepared: tuple[Tensor, Tensor],
        projection: Projection,
        out: Tensor,
        paired: tuple[Tensor, Tensor, Tensor | None] | None,
    ) -> None:
        self.backend.linear_prepared(
            *prepared,
            projection.qdata,
            projection.scale,
            projection.bias,
            self.dtype,
            out=out,
            second_projection=paired,
        )
