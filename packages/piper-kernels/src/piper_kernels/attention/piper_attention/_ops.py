"""Custom operators of dense Piper attention. Fakes compute shapes only."""

import torch
from torch import Tensor

from piper_kernels.attention.piper_attention._backend import backend_for
from piper_kernels.attention.piper_attention._checks import (
    check_key_value,
    check_prepared_key_value,
    check_prepared_query,
)
from piper_kernels.attention.piper_attention.prepared import PreparedAttention, PreparedKeyValue


@torch.library.custom_op("piper_kernels::piper_attention", mutates_args=())
def piper_attention(
    query: Tensor, key: Tensor, value: Tensor, scale: float, is_causal: bool
) -> Tensor:
    """Return the attention of floating operands, contiguous in the dtype of ``query``."""
    return backend_for(query, is_causal).attention(query, key, value, scale, is_causal)


@piper_attention.register_fake
def _(query: Tensor, _key: Tensor, _value: Tensor, _scale: float, _is_causal: bool) -> Tensor:
    return torch.empty_like(query, memory_format=torch.contiguous_format)


@torch.library.custom_op("piper_kernels::piper_attention_from_quantized_query", mutates_args=())
def piper_attention_from_quantized_query(
    query: Tensor,
    query_scale: Tensor,
    key: Tensor,
    value: Tensor,
    query_length: int,
    is_causal: bool,
) -> Tensor:
    """Return the attention of prepared queries and floating keys and values.

    Args:
        query: int8 ``[B, Hq, ceil(Sq / 64) * 64, D]``.
        query_scale: FP32 ``[B, Hq, rows of query / 32]`` with the logit factor and ``log2(e)``.
        key: float16 or bfloat16 ``[B, Hkv, Sk, D]``.
        value: Like ``key``.
        query_length: ``Sq``.
        is_causal: Whether later keys are masked; needs ``Sq == Sk``.

    Returns:
        ``[B, Hq, Sq, D]`` in the dtype of ``key``.
    """
    check_prepared_query(query, query_scale, query_length)
    check_key_value(query, key, value, query_length, is_causal)
    backend = backend_for(query, is_causal)
    key_value = backend.prepare_key_value(key, value, is_causal)
    operands = PreparedAttention(query, query_scale, key_value)
    return backend.attend(operands, query_length, key.shape[2], is_causal, key.dtype)


@piper_attention_from_quantized_query.register_fake
def _(
    query: Tensor,
    query_scale: Tensor,
    key: Tensor,
    value: Tensor,
    query_length: int,
    is_causal: bool,
) -> Tensor:
    check_prepared_query(query, query_scale, query_length)
    check_key_value(query, key, value, query_length, is_causal)
    return key.new_empty((*query.shape[:2], query_length, query.shape[3]))


@torch.library.custom_op("piper_kernels::piper_attention_from_quantized", mutates_args=())
def piper_attention_from_quantized(
    query: Tensor,
    query_scale: Tensor,
    key: Tensor,
    key_scale: Tensor,
    value: Tensor,
    multiplier: Tensor,
    log_scale: Tensor,
    value_mean: Tensor,
    query_length: int,
    key_length: int,
    is_causal: bool,
    output_dtype: torch.dtype,
) -> Tensor:
    """Return the attention of prepared operands, all contiguous on one device.

    Args:
        query: int8 ``[B, Hq, ceil(Sq / 64) * 64, D]``.
        query_scale: FP32 ``[B, Hq, rows of query / 32]`` with the logit factor and ``log2(e)``.
        key: int8 ``[B, Hkv, K, D]`` with ``K = ceil(Sk / 64) * 64``.
        key_scale: FP32 ``[B, Hkv, K / 64]``.
        value: int8 ``[B, Hkv, D, K]``, transposed.
        multiplier: FP32 ``[B, Hkv, K]``, 255 times the value scale; unless causal also
            ``[B, Hkv, K / 64]``, where 64 keys share one.
        log_scale: FP32 like ``multiplier``, the base-2 logarithm of the value scale.
        value_mean: FP32 ``[B, Hkv, D]``; not read when causal, because values are not centered.
        query_length: ``Sq``.
        key_length: ``Sk``.
        is_causal: Whether later keys are masked; needs ``Sq == Sk``.
        output_dtype: Dtype of the result.

    Returns:
        ``[B, Hq, Sq, D]``.
    """
    key_value = PreparedKeyValue(
        key, key_scale, value, multiplier, log_scale, None if is_causal else value_mean
    )
    check_prepared_query(query, query_scale, query_length)
    check_prepared_key_value(query, key_value, query_length, key_length, is_causal)
    operands = PreparedAttention(query, query_scale, key_value)
    backend = backend_for(query, is_causal)
    return backend.attend(operands, query_length, key_length, is_causal, output_dtype)


@piper_attention_from_quantized.register_fake
def _(
    query: Tensor,
    query_scale: Tensor,
    key: Tensor,
    key_scale: Tensor,
    value: Tensor,
    multiplier: Tensor,
    log_scale: Tensor,
    value_mean: Tensor,
    query_length: int,
    key_length: int,
    is_causal: bool,
    output_dtype: torch.dtype,
) -> Tensor:
    key_value = PreparedKeyValue(
        key, key_scale, value, multiplier, log_scale, None if is_causal else value_mean
    )
    check_prepared_query(query, query_scale, query_length)
    check_prepared_key_value(query, key_value, query_length, key_length, is_causal)
    shape = (*query.shape[:2], query_length, query.shape[3])
    return query.new_empty(shape, dtype=output_dtype)
