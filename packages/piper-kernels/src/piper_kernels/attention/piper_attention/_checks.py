"""Checks of prepared operands that cross an operator. They look at host metadata only."""

import torch
from torch import Tensor

from piper_kernels.attention._contract import validate_operand
from piper_kernels.attention._signed_hadamard import HEAD_DIMS
from piper_kernels.attention._tiles import TILE_ROWS
from piper_kernels.attention.piper_attention.prepared import PreparedKeyValue

_OPERATOR = "Piper Attention"
_QUERY_BLOCK = 32


def check_prepared_query(query: Tensor, query_scale: Tensor, query_length: int) -> None:
    """Check queries ``[B, Hq, Sq', D]`` with one scale per 32 rows.

    Raises:
        ValueError: A rank, shape, dtype or layout does not fit.
    """
    if query.ndim != 4 or query.dtype != torch.int8 or query.shape[3] not in HEAD_DIMS:
        raise ValueError(
            f"{_OPERATOR} prepared query must be int8 [batch, heads, rows, 64 or 128], "
            f"got {query.dtype} {tuple(query.shape)}"
        )
    rows = padded_rows(query_length)
    if query_length <= 0 or query.shape[2] != rows:
        raise ValueError(
            f"{_OPERATOR} prepared query of {query_length} rows must be stored in {rows}, "
            f"got {query.shape[2]}"
        )
    shape = (*query.shape[:2], rows // _QUERY_BLOCK)
    _check("query", query, tuple(query.shape), torch.int8, query.device)
    _check("query_scale", query_scale, shape, torch.float32, query.device)


def check_key_value(
    query: Tensor, key: Tensor, value: Tensor, query_length: int, is_causal: bool
) -> None:
    """Check floating keys and values ``[B, Hkv, Sk, D]`` against prepared queries.

    Raises:
        ValueError: A rank, shape, dtype, device or layout does not fit.
    """
    for name, operand in (("key", key), ("value", value)):
        validate_operand(_OPERATOR, name, operand)
        if operand.device != query.device:
            raise ValueError(
                f"{_OPERATOR} operands must share a device, got {query.device} and {name} on "
                f"{operand.device}"
            )
    fits = key.shape[0] == query.shape[0] and key.shape[3] == query.shape[3]
    if key.shape != value.shape or key.dtype != value.dtype or not fits:
        raise ValueError(
            f"{_OPERATOR} key and value must share a dtype and the shape [batch, heads, keys, "
            f"head_dim] of the query {tuple(query.shape)}, got {key.dtype} {tuple(key.shape)} "
            f"and {value.dtype} {tuple(value.shape)}"
        )
    _check_heads(query.shape[1], key)
    _check_lengths(query_length, key.shape[2], is_causal)


def check_prepared_key_value(
    query: Tensor,
    key_value: PreparedKeyValue,
    query_length: int,
    key_length: int,
    is_causal: bool,
) -> None:
    """Check prepared keys and values, with one key scale per 64 rows, against the queries.

    Raises:
        ValueError: A length, shape, dtype, device or layout does not fit.
    """
    check_key_value_storage(
        tuple(query.shape), query.device, key_value, query_length, key_length, is_causal
    )


def check_key_value_storage(
    query_shape: tuple[int, ...],
    device: torch.device,
    key_value: PreparedKeyValue,
    query_length: int,
    key_length: int,
    is_causal: bool,
) -> None:
    """Check prepared keys and values against queries ``[B, Hq, Sq', D]`` that are yet to come.

    Raises:
        ValueError: A length, shape, dtype, device or layout does not fit.
    """
    _check_lengths(query_length, key_length, is_causal)
    kv = key_value
    _check_heads(query_shape[1], kv.key_codes)
    batch, head_dim, kv_heads = query_shape[0], query_shape[3], kv.key_codes.shape[1]
    lead, rows = (batch, kv_heads), padded_rows(key_length)
    _check("key", kv.key_codes, (*lead, rows, head_dim), torch.int8, device)
    _check("key_scale", kv.key_scale, (*lead, rows // TILE_ROWS), torch.float32, device)
    _check("value", kv.value_codes, (*lead, head_dim, rows), torch.int8, device)
    tiles = rows // TILE_ROWS
    per_tile = kv.value_multiplier.ndim == 3 and kv.value_multiplier.shape[2] == tiles
    if per_tile and is_causal:
        raise ValueError(
            f"{_OPERATOR} with is_causal needs a multiplier for each of {rows} keys, got one for "
            f"64 keys, {tuple(kv.value_multiplier.shape)}"
        )
    scales = tiles if per_tile else rows
    _check("multiplier", kv.value_multiplier, (*lead, scales), torch.float32, device)
    if kv.value_log_scale is not None:
        _check("log_scale", kv.value_log_scale, (*lead, scales), torch.float32, device)
    if kv.value_mean is not None:
        _check("value_mean", kv.value_mean, (*lead, head_dim), torch.float32, device)


def _check_lengths(query_length: int, key_length: int, is_causal: bool) -> None:
    if key_length <= 0:
        raise ValueError(f"{_OPERATOR} does not accept empty sequences, got {key_length} keys")
    if is_causal and query_length != key_length:
        raise ValueError(
            f"{_OPERATOR} with is_causal needs equal query and key lengths, "
            f"got {query_length} and {key_length}"
        )


def _check_heads(heads: int, key: Tensor) -> None:
    if key.ndim != 4 or key.shape[1] == 0 or heads % key.shape[1]:
        raise ValueError(
            f"{_OPERATOR} needs a positive key head count that divides the query head count "
            f"{heads}, got key shape {tuple(key.shape)}"
        )


def padded_rows(length: int) -> int:
    """Return a length rounded up to whole tiles of 64 rows."""
    return (length + TILE_ROWS - 1) // TILE_ROWS * TILE_ROWS


def _check(
    name: str, tensor: Tensor, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device
) -> None:
    fits = tuple(tensor.shape) == shape and tensor.dtype == dtype and tensor.device == device
    if not (fits and tensor.is_contiguous()):
        raise ValueError(
            f"{_OPERATOR} prepared {name} must be contiguous {dtype} {shape} on {device}, got "
            f"{tensor.dtype} {tuple(tensor.shape)} with strides {tuple(tensor.stride())} on "
            f"{tensor.device}"
        )
