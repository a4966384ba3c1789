"""Selection of the code that executes dense Piper attention."""

from typing import Any, Protocol

import torch
from torch import Tensor

from piper_kernels._triton.targets import accelerator_target
from piper_kernels.attention._backends import AttentionBackend, AttentionRequest, select_backend
from piper_kernels.attention.piper_attention import prepared, reference
from piper_kernels.attention.piper_attention._hopper import HopperBackend
from piper_kernels.attention.piper_attention._mixed_sign import MixedSignBackend
from piper_kernels.attention.piper_attention.prepared import PreparedAttention, PreparedKeyValue


class PiperAttentionBackend(AttentionBackend, Protocol):
    """What executes dense Piper attention, from floating or prepared operands.

    Attributes:
        values_per_tile: Whether prepared values of attention without a mask are meant to have
            one scale for 64 keys.
    """

    values_per_tile: bool

    def prepare_key_value(self, key: Tensor, value: Tensor, is_causal: bool) -> PreparedKeyValue:
        """Return padded keys and values with one key scale per 64 rows."""
        ...

    def attend(
        self,
        operands: PreparedAttention,
        query_length: int,
        key_length: int,
        is_causal: bool,
        output_dtype: torch.dtype,
    ) -> Tensor:
        """Return the attention of prepared operands, contiguous ``[B, Hq, query_length, D]``."""
        ...

    def pack(self, key_value: PreparedKeyValue) -> Any:
        """Return what ``attend_window`` reads of keys and values, made once for all windows."""
        ...

    def attend_window(
        self,
        query: Tensor,
        query_scale: Tensor,
        packed: Any,
        key_length: int,
        is_causal: bool,
        origin: int,
        out: Tensor,
    ) -> None:
        """Write the attention of a window of queries.

        Args:
            query: int8 ``[B, Hq, rows of out in blocks of 64, D]``.
            query_scale: FP32, one per 32 rows of it.
            packed: Result of ``pack``.
            key_length: Keys without padding.
            is_causal: Whether later keys are masked.
            origin: Position of the first query among the keys, a multiple of 128.
            out: ``[B, Hq, queries, D]`` with contiguous features.
        """
        ...


class PortableBackend:
    """Executes the reference; supports everything."""

    name = "portable"
    values_per_tile = False

    def support(self, _request: AttentionRequest, /) -> tuple[bool, str]:
        """Return that every call is supported."""
        return True, ""

    def attention(
        self, query: Tensor, key: Tensor, value: Tensor, scale: float, is_causal: bool
    ) -> Tensor:
        """Return the attention with scales per thread."""
        return reference.attention(query, key, value, scale, is_causal)

    def prepare_key_value(self, key: Tensor, value: Tensor, is_causal: bool) -> PreparedKeyValue:
        """Return padded keys and values with one key scale per 64 rows."""
        return prepared.prepare_key_value(key, value, is_causal=is_causal, padded=True)

    def attend(
        self,
        operands: PreparedAttention,
        query_length: int,
        key_length: int,
        is_causal: bool,
        output_dtype: torch.dtype,
    ) -> Tensor:
        """Return the attention of prepared operands."""
        output = prepared.attend(
            operands, query_length=query_length, key_length=key_length, is_causal=is_causal
        )
        return output.to(output_dtype)

    def pack(self, key_value: PreparedKeyValue) -> Any:
        """Return the keys and values."""
        return key_value

    def attend_window(
        self,
        query: Tensor,
        query_scale: Tensor,
        packed: Any,
        key_length: int,
        is_causal: bool,
        origin: int,
        out: Tensor,
    ) -> None:
        """Write the attention of a window of queries."""
        prepared.attend(
            PreparedAttention(query, query_scale, packed),
            query_length=out.shape[2],
            key_length=key_length,
            is_causal=is_causal,
            query_origin=origin,
            out=out,
        )


# In order of preference.
BACKENDS: tuple[PiperAttentionBackend, ...] = (
    HopperBackend(),
    MixedSignBackend(),
    PortableBackend(),
)


def backend_for(query: Tensor, is_causal: bool) -> PiperAttentionBackend:
    """Return the backend that executes a call with queries ``[..., D]``.

    Operators ask at execution time, so a compiled graph follows a change of backend.
    """
    request = AttentionRequest(accelerator_target(query.device), query.shape[-1], is_causal)
    return select_backend(BACKENDS, request)
