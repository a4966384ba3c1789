"""Projections of prepared NVFP4 inputs to quantized queries, keys and values.

Operands are checked already. On accelerators the FP32 projection exists for two chunks of rows:
one is multiplied while the other is normalized, rotated and quantized on another stream.
"""

from typing import Any

import torch
from torch import Tensor

from piper_kernels._triton.runtime import supports_device
from piper_kernels.attention._quantization import Granularity
from piper_kernels.attention.sparse_piper_attention._blocks import valid_rows
from piper_kernels.attention.sparse_piper_attention._routing import RoutingMode
from piper_kernels.fusions.attention.pipeline import SLOTS, run_stages
from piper_kernels.fusions.attention.windows import (
    NVFP4_PROJECTION_CHUNK_ROWS,
    balanced_windows,
)
from piper_kernels.fusions.nvfp4_sparse_piper._operands import PackedInput, PackedProjection
from piper_kernels.fusions.projected_qk import reference as projected_qk
from piper_kernels.fusions.projected_qk.transform import HeadTransform
from piper_kernels.fusions.projected_value import reference as projected_value
from piper_kernels.linear.nvfp4._backend import select_linear_backend
from piper_kernels.weights.nvfp4._encoding import decode
from piper_kernels.weights.nvfp4._layout import BLOCK_SIZE, SCALE_ROW_TILE, unswizzle_scale

_PER_WARP = Granularity.PER_WARP


def project_query(
    inputs: PackedInput,
    projection: PackedProjection,
    transform: HeadTransform,
    softmax_scale: float,
    mode: RoutingMode,
    block_lengths: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the results of ``projected_qk.reference.encode_query``."""
    if supports_device(inputs.qdata.device):
        from piper_kernels.fusions.projected_qk._launch import QueryEncoder

        sequence = _sequence(inputs, projection, block_lengths)
        encoder = QueryEncoder(sequence, transform, softmax_scale, mode, _PER_WARP)
        _encode_chunks(inputs, projection, encoder)
        return encoder.codes, encoder.scale, encoder.summary
    heads = _heads(inputs, projection)
    valid = _valid(inputs, block_lengths)
    return projected_qk.encode_query(heads, transform, valid, softmax_scale, mode)


def project_key(
    inputs: PackedInput,
    projection: PackedProjection,
    transform: HeadTransform,
    mode: RoutingMode,
    block_lengths: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the results of ``projected_qk.reference.encode_key``."""
    if supports_device(inputs.qdata.device):
        from piper_kernels.fusions.projected_qk._launch import KeyEncoder

        sequence = _sequence(inputs, projection, block_lengths)
        encoder = KeyEncoder(sequence, transform, mode, _PER_WARP)
        _encode_chunks(inputs, projection, encoder)
        return *encoder.finish(), encoder.summary, encoder.auxiliary
    heads = _heads(inputs, projection)
    return projected_qk.encode_key(heads, transform, _valid(inputs, block_lengths), mode)


def project_value(
    inputs: PackedInput,
    projection: PackedProjection,
    block_lengths: Tensor | None,
    *,
    with_block_means: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Return codes and multipliers with a scale per tile, the mean, and means of blocks.

    The mean is the projection of the mean of what the prepared inputs stand for.
    """
    mean = _project_mean(_input_mean(inputs, block_lengths), projection)
    if supports_device(inputs.qdata.device):
        from piper_kernels.fusions.projected_value._launch import ValueEncoder

        sequence = _sequence(inputs, projection, block_lengths)
        encoder = ValueEncoder(sequence, mean, True, with_block_means)
        _encode_chunks(inputs, projection, encoder)
        return encoder.codes, encoder.multiplier, mean, encoder.block_means
    heads, valid = _heads(inputs, projection), _valid(inputs, block_lengths)
    codes, multiplier = projected_value.encode_value(heads, mean, valid, per_tile=True)
    means = projected_value.value_block_means(heads, valid) if with_block_means else None
    return codes, multiplier, mean, means


def _heads(inputs: PackedInput, projection: PackedProjection) -> Tensor:
    """Return the FP32 projection, ``[1, S, H, D]``."""
    rows = _multiply(inputs, projection, None)
    return rows.unflatten(-1, (projection.heads, projection.head_dim))[None]


def _multiply(inputs: PackedInput, projection: PackedProjection, out: Tensor | None) -> Tensor:
    backend = select_linear_backend(inputs.qdata.device)
    return backend.linear_prepared(
        inputs.qdata,
        inputs.scale,
        inputs.level,
        projection.qdata,
        projection.scale,
        projection.level,
        projection.bias,
        torch.float32,
        out=out,
    )


def _sequence(
    inputs: PackedInput, projection: PackedProjection, block_lengths: Tensor | None
) -> Any:
    from piper_kernels.fusions.projected_qk._launch import Sequence

    qdata = inputs.qdata
    sizes = (1, projection.heads, qdata.shape[0], projection.head_dim)
    return Sequence(*sizes, block_lengths, qdata.device)


def _encode_chunks(inputs: PackedInput, projection: PackedProjection, encoder: Any) -> None:
    """Project chunks in FP32 and encode each while the next one is multiplied."""
    from piper_kernels.fusions.projected_qk._launch import Window

    rows, width = inputs.qdata.shape[0], projection.qdata.shape[0]
    chunks = balanced_windows(rows, NVFP4_PROJECTION_CHUNK_ROWS, SCALE_ROW_TILE)
    device = inputs.qdata.device
    shape = (min(len(chunks), SLOTS), chunks[0].stop, width)
    buffers = torch.empty(shape, dtype=torch.float32, device=device)

    def project(chunk: slice, slot: int) -> None:
        out = buffers[slot % shape[0], : chunk.stop - chunk.start]
        _multiply(inputs.window(chunk), projection, out)

    def quantize(chunk: slice, slot: int) -> None:
        projected = buffers[slot % shape[0], : chunk.stop - chunk.start]
        encoder.encode(Window(projected[None], 0, chunk.start))

    touched = [value for value in vars(encoder).values() if isinstance(value, Tensor)]
    run_stages(chunks, (project, quantize), 0, device, [buffers, *touched])


def _input_mean(inputs: PackedInput, block_lengths: Tensor | None) -> Tensor:
    """Return the mean of the represented rows that exist, FP32 ``[1, F]``."""
    rows, features = inputs.qdata.shape[0], 2 * inputs.qdata.shape[1]
    valid = _valid(inputs, block_lengths)
    total = inputs.qdata.new_zeros((1, features), dtype=torch.float32)
    for chunk in balanced_windows(rows, NVFP4_PROJECTION_CHUNK_ROWS, SCALE_ROW_TILE):
        values = _decoded(inputs.window(chunk))
        if block_lengths is not None and valid is not None:
            exists = valid.flatten()[chunk, None]
            values = torch.where(exists, values, torch.zeros_like(values))
        total += values.sum(0, dtype=torch.float32)
    count = rows if block_lengths is None else block_lengths.sum(dtype=torch.float32)
    return total * inputs.level / count


def _decoded(inputs: PackedInput) -> Tensor:
    """Return codes times block scales ``[rows, F]``: bfloat16 holds them, kernels write it.

    The order of features is that of low nibbles first; the weight is read in the same order.
    """
    rows, features = inputs.qdata.shape[0], 2 * inputs.qdata.shape[1]
    if supports_device(inputs.qdata.device):
        from piper_kernels.linear.nvfp4.triton import decode_rows

        return decode_rows(inputs.qdata, inputs.scale)
    plain = unswizzle_scale(inputs.scale, rows, features // BLOCK_SIZE)
    return decode(inputs.qdata, plain.to(torch.float32))


def _project_mean(input_mean: Tensor, projection: PackedProjection) -> Tensor:
    """Return the projection of the mean of inputs, FP32 ``[1, H, D]``."""
    backend = select_linear_backend(input_mean.device)
    weight = (projection.qdata, projection.scale, projection.level)
    mean = backend.weight_only_linear(input_mean, *weight, projection.bias, 0, True, False)
    return mean.unflatten(-1, (projection.heads, projection.head_dim))


def _valid(inputs: PackedInput, block_lengths: Tensor | None) -> Tensor | None:
    return valid_rows(inputs.qdata.shape[0], block_lengths, inputs.qdata.device)
