"""The dense Piper backend in plain Triton, for sm_8x, sm_12x and RDNA4."""

from dataclasses import replace

import torch
from torch import Tensor

from piper_kernels._triton.runtime import NO_TRITON, triton_is_installed
from piper_kernels._triton.targets import accelerator_target
from piper_kernels.attention._backends import AttentionRequest
from piper_kernels.attention._mixed_sign import AttentionPlan, piper_plan
from piper_kernels.attention._quantization import Granularity
from piper_kernels.attention.piper_attention.prepared import PreparedAttention, PreparedKeyValue


class MixedSignBackend:
    """Multiplies unsigned probability codes by signed value codes with one instruction."""

    name = "mixed-sign Triton"
    values_per_tile = False

    def support(self, request: AttentionRequest, /) -> tuple[bool, str]:
        """Return whether the target has such an instruction that Triton can be made to use."""
        if request.target is None:
            return False, "needs a CUDA or ROCm device"
        if not triton_is_installed():
            return False, NO_TRITON
        plan, reason = piper_plan(request.target, request.head_dim, request.is_causal)
        return plan is not None, reason

    def attention(
        self, query: Tensor, key: Tensor, value: Tensor, scale: float, is_causal: bool
    ) -> Tensor:
        """Return the attention of floating operands."""
        from piper_kernels.attention._preparation.dense import prepare_piper

        plan = _plan(query, is_causal)
        operands = prepare_piper(
            query,
            key,
            value,
            scale=scale,
            is_causal=is_causal,
            granularity=plan.granularity,
            permuted=False,
            sums=False,
        )
        kv = operands.key_value
        assert kv.value_multiplier is not None, "values have a scale per key"
        return _attend(
            operands.query_codes,
            operands.query_scale,
            (kv.key_codes, kv.key_scale, kv.value_codes, kv.value_multiplier, kv.value_mean),
            (query.shape[2], key.shape[2]),
            is_causal,
            query.dtype,
            plan,
        )

    def prepare_key_value(self, key: Tensor, value: Tensor, is_causal: bool) -> PreparedKeyValue:
        """Return padded keys and values with one key scale per 64 rows."""
        from piper_kernels.attention._preparation.dense import prepare_piper_key_value

        kv = prepare_piper_key_value(key, value, is_causal=is_causal, permuted=False, sums=False)
        assert kv.value_multiplier is not None, "values have a scale per key"
        return PreparedKeyValue(
            kv.key_codes, kv.key_scale, kv.value_codes, kv.value_multiplier, None, kv.value_mean
        )

    def attend(
        self,
        operands: PreparedAttention,
        query_length: int,
        key_length: int,
        is_causal: bool,
        output_dtype: torch.dtype,
    ) -> Tensor:
        """Return the attention of prepared operands; their logarithms are computed again."""
        kv = operands.key_value
        multiplier = kv.per_key(kv.value_multiplier)
        plan = _plan(operands.query_codes, is_causal)
        return _attend(
            operands.query_codes,
            operands.query_scale,
            (kv.key_codes, kv.key_scale, kv.value_codes, multiplier, kv.value_mean),
            (query_length, key_length),
            is_causal,
            output_dtype,
            plan.with_granularity(operands.granularity),
        )

    def pack(self, key_value: PreparedKeyValue) -> PreparedKeyValue:
        """Return the keys and values with a scale for every value."""
        kv = key_value
        return replace(kv, value_multiplier=kv.per_key(kv.value_multiplier), value_log_scale=None)

    def attend_window(
        self,
        query: Tensor,
        query_scale: Tensor,
        packed: PreparedKeyValue,
        key_length: int,
        is_causal: bool,
        origin: int,
        out: Tensor,
    ) -> None:
        """Write the attention of a window of queries, sequence by sequence."""
        kv = packed
        plan = _plan(query, is_causal).with_granularity(Granularity.PER_WARP)
        for index in range(out.shape[0]):
            one = slice(index, index + 1)
            mean = None if kv.value_mean is None else kv.value_mean[one]
            _attend(
                query[one],
                query_scale[one],
                (kv.key_codes[one], kv.key_scale[one], kv.value_codes[one],
                 kv.value_multiplier[one], mean),
                (out.shape[2], key_length),
                is_causal,
                out.dtype,
                plan,
                origin=origin,
                out=out[one],
            )  # fmt: skip


def _plan(query: Tensor, is_causal: bool) -> AttentionPlan:
    target = accelerator_target(query.device)
    plan = None if target is None else piper_plan(target, query.shape[-1], is_causal)[0]
    if plan is None:
        raise RuntimeError(f"the mixed-sign backend was called for {query.device}")
    return plan


def _attend(
    query_codes: Tensor,
    query_scale: Tensor,
    key_value: tuple[Tensor, Tensor, Tensor, Tensor, Tensor | None],
    lengths: tuple[int, int],
    is_causal: bool,
    dtype: torch.dtype,
    plan: AttentionPlan,
    *,
    origin: int = 0,
    out: Tensor | None = None,
) -> Tensor:
    from piper_kernels.attention._mixed_sign._launch import attend

    return attend(
        query_codes,
        query_scale,
        *key_value,
        query_length=lengths[0],
        key_length=lengths[1],
        is_causal=is_causal,
        dtype=dtype,
        plan=plan,
        origin=origin,
        out=out,
    )
