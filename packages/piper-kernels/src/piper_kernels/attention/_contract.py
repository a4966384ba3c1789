"""Checks of the operands of dense attention. They look at host metadata only."""

import math

import torch
from torch import Tensor

from piper_kernels.attention._signed_hadamard import HEAD_DIMS

DTYPES = (torch.float16, torch.bfloat16)


def validate_dense_attention(
    operator: str,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    scale: float | None,
    is_causal: bool,
    grouped_query: bool,
) -> float:
    """Check the operands of a dense attention operator and return its effective scale.

    Args:
        operator: What messages call the operator.
        query: ``[B, Hq, Sq, D]``.
        key: ``[B, Hkv, Sk, D]``.
        value: ``[B, Hkv, Sk, D]``.
        scale: Factor of the logits, ``D ** -0.5`` by default.
        is_causal: Whether later keys are masked.
        grouped_query: Whether ``Hq`` may be a multiple of ``Hkv``.

    Raises:
        ValueError: A rank, dtype, layout, device, shape or the scale does not fit.
        RuntimeError: Gradients are enabled and an operand requires them.
    """
    operands = {"query": query, "key": key, "value": value}
    for name, operand in operands.items():
        validate_operand(operator, name, operand)
    if not query.device == key.device == value.device:
        raise ValueError(
            f"{operator} query, key and value must share a device, got {query.device}, "
            f"{key.device} and {value.device}"
        )
    if not query.dtype == key.dtype == value.dtype:
        raise ValueError(
            f"{operator} query, key and value must share a dtype, got {query.dtype}, "
            f"{key.dtype} and {value.dtype}"
        )
    _validate_heads(operator, query, key, value, grouped_query)
    _validate_lengths(operator, query, key, value, is_causal)
    if torch.is_grad_enabled() and any(operand.requires_grad for operand in operands.values()):
        raise RuntimeError(
            f"{operator} is inference-only; call it under torch.no_grad() or detach its operands"
        )
    effective = query.shape[3] ** -0.5 if scale is None else float(scale)
    if not 0.0 < effective < math.inf:
        raise ValueError(f"{operator} scale must be finite and positive, got {scale}")
    return effective


def validate_operand(operator: str, name: str, operand: Tensor) -> None:
    """Check the rank, dtype and layout of an operand ``[B, H, S, D]``.

    Raises:
        ValueError: One of them does not fit.
    """
    if operand.ndim != 4:
        raise ValueError(
            f"{operator} {name} must have shape [batch, heads, sequence, head_dim], "
            f"got {tuple(operand.shape)}"
        )
    if operand.dtype not in DTYPES:
        raise ValueError(f"{operator} {name} must be float16 or bfloat16, got {operand.dtype}")
    if operand.layout != torch.strided:
        raise ValueError(f"{operator} {name} must use strided layout, got {operand.layout}")
    if operand.stride(3) != 1:
        raise ValueError(
            f"{operator} {name}: the head dimension must be contiguous, got strides "
            f"{tuple(operand.stride())}"
        )


def _validate_heads(
    operator: str, query: Tensor, key: Tensor, value: Tensor, grouped_query: bool
) -> None:
    batch, heads = query.shape[:2]
    shapes = f"{tuple(query.shape)}, {tuple(key.shape)} and {tuple(value.shape)}"
    if not grouped_query:
        if not query.shape[:2] == key.shape[:2] == value.shape[:2] or heads == 0:
            raise ValueError(
                f"{operator} needs equal batch and head dimensions of query, key and value, with "
                f"at least one head, got {shapes}"
            )
        return
    if not batch == key.shape[0] == value.shape[0]:
        raise ValueError(
            f"{operator} needs equal batch dimensions of query, key and value, got {shapes}"
        )
    kv_heads = key.shape[1]
    if kv_heads != value.shape[1] or kv_heads == 0 or heads == 0 or heads % kv_heads:
        raise ValueError(
            f"{operator} needs equal, positive key and value head counts that divide the query "
            f"head count, got {heads}, {kv_heads} and {value.shape[1]}"
        )


def _validate_lengths(
    operator: str, query: Tensor, key: Tensor, value: Tensor, is_causal: bool
) -> None:
    queries, keys, values = query.shape[2], key.shape[2], value.shape[2]
    if keys != values:
        raise ValueError(f"{operator} key/value lengths must match, got {keys} and {values}")
    head_dim = query.shape[3]
    if not head_dim == key.shape[3] == value.shape[3]:
        raise ValueError(
            f"{operator} query, key and value head dimensions must match, got {head_dim}, "
            f"{key.shape[3]} and {value.shape[3]}"
        )
    if head_dim not in HEAD_DIMS:
        raise ValueError(f"{operator} supports head dimensions 64 and 128, got {head_dim}")
    if queries == 0 or keys == 0:
        raise ValueError(
            f"{operator} does not accept empty sequences, got {queries} queries and {keys} keys"
        )
    if is_causal and queries != keys:
        raise ValueError(
            f"{operator} with is_causal needs equal query and key lengths, got {queries} and {keys}"
        )
