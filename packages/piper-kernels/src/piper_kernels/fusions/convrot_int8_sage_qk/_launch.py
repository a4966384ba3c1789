"""Projections on accelerators.

On Hopper the tiles of the product are encoded where they are. Elsewhere, and where that kernel has
no form, one kernel multiplies a window of rows and another one encodes it. Importing needs Triton.
"""

import torch
from torch import Tensor

from piper_kernels._triton.targets import accelerator_target
from piper_kernels.attention._quantization import Granularity
from piper_kernels.attention.sparse_piper_attention._routing import RoutingMode
from piper_kernels.fusions.convrot_int8_sage_qk.operands import HeadProjection, PreparedInput
from piper_kernels.fusions.convrot_int8_sage_qk.windows import window_bytes, windows
from piper_kernels.fusions.projected_qk._launch import (
    KeyEncoder,
    QueryEncoder,
    Sequence,
    Window,
)
from piper_kernels.fusions.projected_qk.transform import HeadTransform
from piper_kernels.fusions.projected_value._launch import ValueEncoder, project_mean
from piper_kernels.linear.convrot.int8._backend import select_linear_backend
from piper_kernels.linear.convrot.int8._selection import uses_hopper


def project_query(
    inputs: PreparedInput,
    projection: HeadProjection,
    transform: HeadTransform,
    softmax_scale: float,
    mode: RoutingMode | None,
    block_lengths: Tensor | None,
    granularity: Granularity,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return quantized queries; see ``projections``."""
    sequence = _sequence(inputs, projection, block_lengths)
    encoder = QueryEncoder(sequence, transform, softmax_scale, mode, granularity)
    _project(inputs, projection, encoder)
    return encoder.codes, encoder.scale, encoder.summary


def project_key(
    inputs: PreparedInput,
    projection: HeadProjection,
    transform: HeadTransform,
    mode: RoutingMode | None,
    block_lengths: Tensor | None,
    granularity: Granularity,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return quantized keys; see ``projections``."""
    sequence = _sequence(inputs, projection, block_lengths)
    encoder = KeyEncoder(sequence, transform, mode, granularity)
    _project(inputs, projection, encoder)
    return *encoder.finish(), encoder.summary, encoder.auxiliary


def project_value(
    inputs: PreparedInput,
    projection: HeadProjection,
    input_mean: Tensor | None,
    per_tile: bool,
    with_block_means: bool,
    block_lengths: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Return quantized values; see ``projections``."""
    sequence = _sequence(inputs, projection, block_lengths)
    mean = None
    if input_mean is not None:
        mean = project_mean(input_mean, projection.qdata, projection.scale, projection.bias)
        mean = mean.unflatten(1, (projection.heads, projection.head_dim))
    encoder = ValueEncoder(sequence, mean, per_tile, with_block_means)
    _project(inputs, projection, encoder)
    if mean is None:
        mean = sequence.floats(projection.head_dim).zero_()
    return encoder.codes, encoder.multiplier, mean, encoder.block_means


def _sequence(
    inputs: PreparedInput, projection: HeadProjection, block_lengths: Tensor | None
) -> Sequence:
    batch, rows, _ = inputs.qdata.shape
    return Sequence(
        batch, projection.heads, rows, projection.head_dim, block_lengths, inputs.qdata.device
    )


def _project(
    inputs: PreparedInput,
    projection: HeadProjection,
    encoder: QueryEncoder | KeyEncoder | ValueEncoder,
) -> None:
    """Project and encode all rows: in one launch, or in FP32 windows that are encoded in turn."""
    if _encode_in_product(inputs, projection, encoder):
        return
    batch, rows, _ = inputs.qdata.shape
    outputs, device = projection.qdata.shape[0], inputs.qdata.device
    backend = select_linear_backend(device)
    limit = window_bytes(accelerator_target(device))
    buffer: Tensor | None = None
    for batches, part in windows(batch, rows, outputs, limit):
        shape = (batches.stop - batches.start, part.stop - part.start, outputs)
        size = shape[0] * shape[1] * outputs
        if buffer is None:  # the first window is the largest
            buffer = torch.empty(size, dtype=torch.float32, device=device)
        out = buffer[:size].view(shape)
        rows_of_window = inputs.window(batches, part)
        backend.linear_prepared(
            rows_of_window.qdata, rows_of_window.scale, projection.qdata, projection.scale,
            projection.bias, torch.float32, out=out,
        )  # fmt: skip
        encoder.encode(Window(out, batches.start, part.start))


def _encode_in_product(
    inputs: PreparedInput,
    projection: HeadProjection,
    encoder: QueryEncoder | KeyEncoder | ValueEncoder,
) -> bool:
    """Project and encode all rows in one launch; return whether the operands allow it."""
    if not (inputs.qdata.is_contiguous() and inputs.scale.is_contiguous()):
        return False
    qdata = inputs.qdata.view(-1, inputs.qdata.shape[-1])
    weight = (projection.qdata, projection.scale, projection.bias)
    if not uses_hopper(accelerator_target(qdata.device), qdata, weight, None):
        return False
    from piper_kernels.fusions.convrot_int8_sage_qk import _hopper

    if not _hopper.supports(encoder):
        return False
    _hopper.encode(inputs, projection, encoder)
    return True
