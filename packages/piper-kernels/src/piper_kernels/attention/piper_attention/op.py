"""The public dense Piper attention function."""

from torch import Tensor

from piper_kernels.attention._contract import validate_dense_attention
from piper_kernels.attention.piper_attention import _ops


def piper_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    scale: float | None = None,
    is_causal: bool = False,
) -> Tensor:
    """Return softmax attention with INT8 logits and unsigned 8-bit probabilities.

    Keys are centered, queries and keys are rotated by a signed Hadamard matrix and quantized to
    INT8 by row groups, values are centered (unless causal) and quantized by rows. Both products
    are exact integers; softmax and all sums across tiles are FP32. The method is described in
    the README of this package; Q/K smoothing and INT8 logits follow SageAttention, the tile
    recurrence FlashAttention.

    Args:
        query: ``[B, Hq, Sq, D]``, float16 or bfloat16; ``D`` is 64 or 128 with stride 1, other
            strides are free.
        key: ``[B, Hkv, Sk, D]``, same dtype; ``Hq`` is a multiple of ``Hkv`` and head ``h``
            reads head ``h // (Hq / Hkv)``.
        value: Like ``key``.
        scale: Factor of the logits, finite and positive; ``D ** -0.5`` by default.
        is_causal: Whether query ``i`` sees keys ``j <= i`` only; needs ``Sq == Sk``.

    Returns:
        ``[B, Hq, Sq, D]`` in the dtype of ``query``, contiguous.

    Raises:
        ValueError: A rank, dtype, layout, device, shape or the scale does not fit.
        RuntimeError: Gradients are enabled and an operand requires them.
    """
    effective = validate_dense_attention(
        "Piper Attention",
        query,
        key,
        value,
        scale=scale,
        is_causal=is_causal,
        grouped_query=True,
    )
    return _ops.piper_attention(query, key, value, effective, is_causal)
