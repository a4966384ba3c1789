"""The SageAttention2++ backend in plain Triton, for GPUs with E4M3 matrix products."""

from torch import Tensor

from piper_kernels._triton.runtime import NO_TRITON, triton_is_installed
from piper_kernels._triton.targets import accelerator_target
from piper_kernels.attention._backends import AttentionRequest
from piper_kernels.attention._mixed_sign import fp8_plan


class Fp8Backend:
    """Multiplies E4M3 probabilities by E4M3 values and sums tiles in FP16."""

    name = "FP8 Triton"

    def support(self, request: AttentionRequest, /) -> tuple[bool, str]:
        """Return whether the target has such products."""
        if request.target is None:
            return False, "needs a CUDA device"
        if not triton_is_installed():
            return False, NO_TRITON
        plan, reason = fp8_plan(request.target, request.is_causal)
        return plan is not None, reason

    def attention(
        self, query: Tensor, key: Tensor, value: Tensor, scale: float, is_causal: bool
    ) -> Tensor:
        """Return the attention of floating operands."""
        from piper_kernels.attention._mixed_sign._launch import attend_fp8
        from piper_kernels.attention._preparation.dense import prepare_sage

        target = accelerator_target(query.device)
        plan = None if target is None else fp8_plan(target, is_causal)[0]
        if plan is None:
            raise RuntimeError(f"the FP8 backend was called for {query.device}")
        operands = prepare_sage(
            query, key, value, scale=scale, granularity=plan.granularity, permuted=False
        )
        return attend_fp8(
            operands.query_codes,
            operands.query_scale,
            operands.key_codes,
            operands.key_scale,
            operands.value_codes,
            operands.value_scale,
            query_length=query.shape[2],
            key_length=key.shape[2],
            is_causal=is_causal,
            dtype=query.dtype,
            plan=plan,
        )
