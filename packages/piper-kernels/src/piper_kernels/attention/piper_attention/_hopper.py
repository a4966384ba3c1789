"""The dense Piper backend for Hopper: INT8 matrix instructions, written in Gluon."""

from dataclasses import replace
from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor

from piper_kernels.attention._backends import AttentionRequest
from piper_kernels.attention._hopper import hopper_support
from piper_kernels.attention.piper_attention.prepared import PreparedAttention, PreparedKeyValue

if TYPE_CHECKING:
    from piper_kernels.attention._preparation.dense import PiperKeyValue


class HopperBackend:
    """Multiplies probability codes by INT8 values, with one key scale per 64 keys."""

    name = "Hopper"
    values_per_tile = True

    def support(self, request: AttentionRequest, /) -> tuple[bool, str]:
        """Return whether the target is Hopper and Triton can express its instructions."""
        return hopper_support(request)

    def attention(
        self, query: Tensor, key: Tensor, value: Tensor, scale: float, is_causal: bool
    ) -> Tensor:
        """Return the attention of floating operands."""
        from piper_kernels.attention._preparation.dense import prepare_piper

        # Causal rows must not depend on later values, which a scale of a tile would know.
        prepared = prepare_piper(
            query,
            key,
            value,
            scale=scale,
            is_causal=is_causal,
            values_per_tile=not is_causal,
        )
        return _attend(
            prepared.query_codes,
            prepared.query_scale,
            prepared.key_value,
            query.shape[2],
            key.shape[2],
            is_causal,
            query.dtype,
        )

    def prepare_key_value(self, key: Tensor, value: Tensor, is_causal: bool) -> PreparedKeyValue:
        """Return padded keys and values with one key scale per 64 rows, keys in their order."""
        from piper_kernels.attention._preparation.dense import prepare_piper_key_value

        kv = prepare_piper_key_value(key, value, is_causal=is_causal, permuted=False, sums=False)
        return PreparedKeyValue(
            kv.key_codes,
            kv.key_scale,
            kv.value_codes,
            cast("Tensor", kv.value_multiplier),
            None,
            kv.value_mean,
        )

    def attend(
        self,
        operands: PreparedAttention,
        query_length: int,
        key_length: int,
        is_causal: bool,
        output_dtype: torch.dtype,
    ) -> Tensor:
        """Return the attention of prepared operands; their values are permuted first."""
        return _attend(
            operands.query_codes,
            operands.query_scale,
            self.pack(operands.key_value),
            query_length,
            key_length,
            is_causal,
            output_dtype,
        )

    def pack(self, key_value: PreparedKeyValue) -> "PiperKeyValue":
        """Return keys and values with permuted values and their sums."""
        from piper_kernels.attention._preparation.dense import PiperKeyValue, repack_value

        kv = key_value
        codes, log_max, sums = repack_value(kv.value_codes, kv.value_multiplier)
        multiplier = None if kv.values_per_tile else kv.value_multiplier
        return PiperKeyValue(
            kv.key_codes, kv.key_scale, codes, multiplier, log_max, sums, kv.value_mean
        )

    def attend_window(
        self,
        query: Tensor,
        query_scale: Tensor,
        packed: "PiperKeyValue",
        key_length: int,
        is_causal: bool,
        origin: int,
        out: Tensor,
    ) -> None:
        """Write the attention of a window of queries, sequence by sequence."""
        for index in range(out.shape[0]):
            one = slice(index, index + 1)
            _attend(
                query[one],
                query_scale[one],
                _sequences(packed, one),
                out.shape[2],
                key_length,
                is_causal,
                out.dtype,
                origin=origin,
                out=out[one],
            )


def _sequences(packed: "PiperKeyValue", batches: slice) -> "PiperKeyValue":
    """Return some sequences of prepared keys and values."""
    tensors = vars(packed).items()
    return replace(
        packed, **{name: None if part is None else part[batches] for name, part in tensors}
    )


def _attend(
    query_codes: Tensor,
    query_scale: Tensor,
    key_value: "PiperKeyValue",
    queries: int,
    keys: int,
    is_causal: bool,
    dtype: torch.dtype,
    *,
    origin: int = 0,
    out: Tensor | None = None,
) -> Tensor:
    from piper_kernels.attention._sm90_kernels.launch import DenseOperands, ValueScales, attend

    kv = key_value
    operands = DenseOperands(
        query_codes,
        query_scale,
        kv.key_codes,
        kv.key_scale,
        kv.value_codes,
        kv.value_mean,
        ValueScales(
            kv.value_multiplier, cast("Tensor", kv.value_log_max), cast("Tensor", kv.value_sum)
        ),
    )
    return attend(operands, queries, keys, is_causal, dtype, origin=origin, out=out)
