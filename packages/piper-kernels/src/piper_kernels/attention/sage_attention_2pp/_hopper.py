"""The SageAttention2++ backend for Hopper: INT8 and FP8 matrix instructions, written in Gluon."""

from torch import Tensor

from piper_kernels.attention._backends import AttentionRequest
from piper_kernels.attention._hopper import hopper_support


class HopperBackend:
    """Sums products of probabilities and values in FP32, with one key scale per 64 keys."""

    name = "Hopper"

    def support(self, request: AttentionRequest, /) -> tuple[bool, str]:
        """Return whether the target is Hopper and Triton can express its instructions."""
        return hopper_support(request)

    def attention(
        self, query: Tensor, key: Tensor, value: Tensor, scale: float, is_causal: bool
    ) -> Tensor:
        """Return the attention of floating operands."""
        from piper_kernels.attention._preparation.dense import prepare_sage
        from piper_kernels.attention._sm90_kernels.launch import DenseOperands, attend

        o = prepare_sage(query, key, value, scale=scale)
        operands = DenseOperands(
            o.query_codes,
            o.query_scale,
            o.key_codes,
            o.key_scale,
            o.value_codes,
            o.value_scale,
            None,
        )
        return attend(operands, query.shape[2], key.shape[2], is_causal, query.dtype)
