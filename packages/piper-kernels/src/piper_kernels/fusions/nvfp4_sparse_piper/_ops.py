"""Custom operators that project prepared NVFP4 inputs to operands of sparse Piper attention.

They take the result of ``nvfp4_prepare_input`` or ``convrot_nvfp4_prepare_input`` for one
sequence and write what ``sparse_piper_attention_from_quantized`` reads: ``S'`` is ``S`` rounded up
to 64, rows that do not exist are zero in all codes. Shapes of results are those of the ConvRot
INT8 operators with a batch of one. Fakes check host metadata and compute shapes.
"""

from typing import Any

import torch
from torch import Tensor

from piper_kernels.attention.sparse_piper_attention._blocks import BLOCK, block_count
from piper_kernels.attention.sparse_piper_attention._preparation import QUERY_GROUP
from piper_kernels.attention.sparse_piper_attention._routing import RoutingMode
from piper_kernels.attention.sparse_piper_attention._validation import check_block_lengths
from piper_kernels.fusions.attention.operators import Argument, define_operator, optional
from piper_kernels.fusions.convrot_int8_sage_qk.operands import check_softmax_scale
from piper_kernels.fusions.nvfp4_sparse_piper import _projections
from piper_kernels.fusions.nvfp4_sparse_piper._operands import (
    LABEL,
    PackedInput,
    PackedProjection,
    check_packed,
)
from piper_kernels.fusions.projected_qk.transform import (
    HeadTransform,
    check_transform,
    resolve_head_dim,
)

_OPERANDS = (
    Argument("Tensor", "input_qdata"),
    Argument("Tensor", "input_scale"),
    Argument("Tensor", "input_per_tensor_scale"),
    Argument("Tensor", "weight_qdata"),
    Argument("Tensor", "weight_scale"),
    Argument("Tensor?", "weight_per_tensor_scale"),
)
_TRANSFORM = (
    Argument("Tensor?", "norm_weight"),
    Argument("Tensor", "cos"),
    Argument("Tensor", "sin"),
    Argument("float", "eps"),
)
_MODE = Argument("SymInt", "routing_mode")
_OPTIONAL = (optional("Tensor", "block_lengths"), optional("Tensor", "bias"))
_HEAD_DIM = (optional("SymInt", "head_dim"),)


def _operands(bound: dict[str, Any]) -> tuple[PackedInput, PackedProjection]:
    """Return the checked input and projection."""
    width = resolve_head_dim(LABEL, bound.get("norm_weight"), bound["head_dim"])
    inputs = PackedInput(*(bound[argument.name] for argument in _OPERANDS[:3]))
    qdata, scale, level = (bound[argument.name] for argument in _OPERANDS[3:])
    projection = PackedProjection(qdata, scale, level, bound["bias"], width)
    rows, _ = check_packed(inputs, projection, least_rows=BLOCK)
    check_block_lengths(LABEL, bound["block_lengths"], rows, inputs.qdata.device)
    return inputs, projection


def _transformed(
    bound: dict[str, Any],
) -> tuple[PackedInput, PackedProjection, HeadTransform, RoutingMode]:
    """Return the checked operands of queries and keys."""
    inputs, projection = _operands(bound)
    transform = HeadTransform(*(bound[argument.name] for argument in _TRANSFORM))
    rows, device = inputs.qdata.shape[0], inputs.qdata.device
    check_transform(LABEL, transform, projection.head_dim, rows, device)
    return inputs, projection, transform, RoutingMode(bound["routing_mode"])


def _sizes(inputs: PackedInput, projection: PackedProjection) -> tuple[int, int, int]:
    return projection.heads, block_count(inputs.qdata.shape[0]), projection.head_dim


def _query(bound: dict[str, Any]) -> tuple[Tensor, ...]:
    inputs, projection, transform, mode = _transformed(bound)
    scale = bound["softmax_scale"]
    check_softmax_scale(LABEL, scale)
    lengths = bound["block_lengths"]
    return _projections.project_query(inputs, projection, transform, scale, mode, lengths)


def _empty_query(bound: dict[str, Any]) -> tuple[Tensor, ...]:
    inputs, projection, _, _ = _transformed(bound)
    check_softmax_scale(LABEL, bound["softmax_scale"])
    heads, blocks, width = _sizes(inputs, projection)
    codes, floats = inputs.qdata.new_empty, inputs.level.new_empty
    return (
        codes((1, heads, blocks * BLOCK, width), dtype=torch.int8),
        floats((1, heads, blocks * (BLOCK // QUERY_GROUP))),
        floats((1, heads, blocks, width)),
    )


def _key(bound: dict[str, Any]) -> tuple[Tensor, ...]:
    inputs, projection, transform, mode = _transformed(bound)
    lengths = bound["block_lengths"]
    return _projections.project_key(inputs, projection, transform, mode, lengths)


def _empty_key(bound: dict[str, Any]) -> tuple[Tensor, ...]:
    inputs, projection, _, mode = _transformed(bound)
    heads, blocks, width = _sizes(inputs, projection)
    codes, floats = inputs.qdata.new_empty, inputs.level.new_empty
    aux = 0 if mode is RoutingMode.MEAN else blocks
    return (
        codes((1, heads, blocks * BLOCK, width), dtype=torch.int8),
        floats((1, heads, blocks)),
        floats((1, heads, blocks, width)),
        floats((1, heads, aux, width)),
    )


def _value(bound: dict[str, Any]) -> tuple[Tensor, ...]:
    inputs, projection = _operands(bound)
    lengths = bound["block_lengths"]
    return _projections.project_value(inputs, projection, lengths, with_block_means=False)[:3]


def _value_with_block_means(bound: dict[str, Any]) -> tuple[Tensor, ...]:
    inputs, projection = _operands(bound)
    lengths = bound["block_lengths"]
    *value, means = _projections.project_value(inputs, projection, lengths, with_block_means=True)
    assert means is not None, "block means were asked for"
    return *value, means


def _empty_value(bound: dict[str, Any]) -> tuple[Tensor, ...]:
    inputs, projection = _operands(bound)
    heads, blocks, width = _sizes(inputs, projection)
    codes, floats = inputs.qdata.new_empty, inputs.level.new_empty
    return (
        codes((1, heads, width, blocks * BLOCK), dtype=torch.int8),
        floats((1, heads, blocks, 1)),
        floats((1, heads, width)),
    )


def _empty_value_with_block_means(bound: dict[str, Any]) -> tuple[Tensor, ...]:
    inputs, projection = _operands(bound)
    means = inputs.level.new_empty((1, *_sizes(inputs, projection)))
    return *_empty_value(bound), means


_NAME = "nvfp4_sparse_piper_project_"
project_query = define_operator(
    f"{_NAME}query",
    (*_OPERANDS, *_TRANSFORM, Argument("float", "softmax_scale"), _MODE, *_OPTIONAL),
    _HEAD_DIM,
    _empty_query,
    _query,
    3,
)
project_key = define_operator(
    f"{_NAME}key",
    (*_OPERANDS, *_TRANSFORM, _MODE, *_OPTIONAL),
    _HEAD_DIM,
    _empty_key,
    _key,
    4,
)
project_value = define_operator(
    f"{_NAME}value", (*_OPERANDS, *_OPTIONAL), _HEAD_DIM, _empty_value, _value, 3
)
project_value_with_block_means = define_operator(
    f"{_NAME}value_with_block_means",
    (*_OPERANDS, *_OPTIONAL),
    _HEAD_DIM,
    _empty_value_with_block_means,
    _value_with_block_means,
    4,
)
