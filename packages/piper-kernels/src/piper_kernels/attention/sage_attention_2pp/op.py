"""The public SageAttention2++ function."""

from torch import Tensor

from piper_kernels.attention._contract import validate_dense_attention
from piper_kernels.attention.sage_attention_2pp import _ops


def sage_attention_2pp(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    scale: float | None = None,
    is_causal: bool = False,
) -> Tensor:
    """Return softmax attention with INT8 logits and E4M3 probabilities and values.

    The 8+8 algorithm of SageAttention2++: keys are centered, queries and keys are rotated by a
    signed Hadamard matrix and quantized to INT8 by row groups, values to E4M3 by features. The
    product of probabilities and values is rounded to FP16 every 64 keys and summed in FP32.

    Args:
        query: ``[B, H, Sq, D]``, float16 or bfloat16; ``D`` is 64 or 128 with stride 1, other
            strides are free.
        key: ``[B, H, Sk, D]``, same dtype and head count.
        value: Like ``key``.
        scale: Factor of the logits, finite and positive; ``D ** -0.5`` by default.
        is_causal: Whether query ``i`` sees keys ``j <= i`` only; needs ``Sq == Sk``.

    Returns:
        ``[B, H, Sq, D]`` in the dtype of ``query``, contiguous.

    Raises:
        ValueError: A rank, dtype, layout, device, shape or the scale does not fit.
        RuntimeError: Gradients are enabled and an operand requires them.
    """
    effective = validate_dense_attention(
        "SageAttention2++",
        query,
        key,
        value,
        scale=scale,
        is_causal=is_causal,
        grouped_query=False,
    )
    return _ops.sage_attention_2pp(query, key, value, effective, is_causal)
