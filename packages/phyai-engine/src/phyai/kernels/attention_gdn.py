"""Linear attention with the gated delta rule, on packed rows of requests of any lengths."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from phyai.dispatch.catalog import Catalog
from phyai.dispatch.conditions import eq, family_in, is_set, lib, one_of, same
from phyai.dispatch.facts import FactKind, Facts
from phyai.dispatch.opspec import Impl, OpSpec, Priority
from phyai.dispatch.predicate import Predicate, all_of, any_of
from phyai.kernels.conditions import FLASHINFER, NVIDIA, half

_NORM_EPS = 1e-6

Run = Callable[..., tuple[Tensor, Tensor]]


def gates(a: Tensor, b: Tensor, a_log: Tensor, dt_bias: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the logarithm of the decay and the update strength in fp32, both [T, H]."""
    decay = -a_log.float().exp() * functional.softplus(a.float() + dt_bias.float())
    return decay, b.float().sigmoid()


def _unit(x: Tensor) -> Tensor:
    wide = x.float()
    return wide * torch.rsqrt(wide.square().sum(-1, keepdim=True) + _NORM_EPS)


def _is_normed(facts: Facts) -> bool:
    return facts.get("attrs.use_qk_l2norm") is True


def _start(state: Tensor | None, requests: int, heads: int, v: Tensor) -> Tensor:
    """Returns a new fp32 state [requests, heads, head_dim, head_dim]."""
    shape = (requests, heads, v.shape[-1], v.shape[-1])
    if state is None:
        return torch.zeros(shape, dtype=torch.float32, device=v.device)
    return state.float().clone()


def _eager(facts: Facts, params: Mapping[str, Any]) -> Run:  # noqa: ARG001
    normed = _is_normed(facts)

    def run(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        a: Tensor,
        b: Tensor,
        a_log: Tensor,
        dt_bias: Tensor,
        cu_seqlens: Tensor,
        *,
        scale: float,
        state: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        tokens, heads = a.shape
        decay, beta = gates(a, b, a_log, dt_bias)
        query, key = (_unit(x) if normed else x.float() for x in (q, k))
        query, key, value = (
            x.repeat_interleave(heads // x.shape[1], dim=1) for x in (query, key, v.float())
        )
        states = _start(state, cu_seqlens.numel() - 1, heads, v)
        rows = torch.arange(tokens, device=v.device)
        owner = torch.searchsorted(cu_seqlens.to(rows.dtype), rows, right=True) - 1
        out = torch.empty_like(value)
        for t in range(tokens):
            # One token of its request's state: [1, H, D, D]. Nothing is read on the host.
            current = states[owner[t : t + 1]] * decay[t, :, None, None].exp()
            seen = torch.einsum("rhkv,hk->rhv", current, key[t])
            update = beta[t, :, None] * (value[t] - seen)
            current = current + torch.einsum("hk,rhv->rhkv", key[t], update)
            states.index_copy_(0, owner[t : t + 1], current)
            out[t] = torch.einsum("rhkv,hk->rhv", current, query[t] * scale)[0]
        return out.to(v.dtype), states

    return run


def _chunked(module: str) -> Callable[[Facts, Mapping[str, Any]], Run]:
    """Makes the ``prepare`` of libraries with flash-linear-attention's calling convention."""

    def prepare(facts: Facts, params: Mapping[str, Any]) -> Run:  # noqa: ARG001
        from importlib import import_module

        kernel = import_module(module).chunk_gated_delta_rule
        normed = _is_normed(facts)

        def run(
            q: Tensor,
            k: Tensor,
            v: Tensor,
            a: Tensor,
            b: Tensor,
            a_log: Tensor,
            dt_bias: Tensor,
            cu_seqlens: Tensor,
            *,
            scale: float,
            state: Tensor | None = None,
        ) -> tuple[Tensor, Tensor]:
            decay, beta = gates(a, b, a_log, dt_bias)
            out, final = kernel(
                q[None],
                k[None],
                v[None],
                decay[None],
                beta[None],
                scale=scale,
                initial_state=None if state is None else state.float(),
                output_final_state=True,
                use_qk_l2norm_in_kernel=normed,
                cu_seqlens=cu_seqlens.long(),
            )
            return out[0], final

        return run

    return prepare


def _flashinfer(facts: Facts, params: Mapping[str, Any]) -> Run:  # noqa: ARG001
    from flashinfer import gdn_prefill

    # The library imports without its kernels and fails only when it is called.
    series = "sm90" if str(facts.get("device.arch")).startswith("sm9") else "sm100"
    if getattr(gdn_prefill, f"chunk_gated_delta_rule_{series}", True) is None:
        raise ImportError(
            f"FlashInfer's gated delta rule for {series} is unavailable; install "
            "nvidia-cutlass-dsl in the version that FlashInfer asks for"
        )
    kernel = gdn_prefill.chunk_gated_delta_rule
    normed = _is_normed(facts)

    def run(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        a: Tensor,
        b: Tensor,
        a_log: Tensor,
        dt_bias: Tensor,
        cu_seqlens: Tensor,
        *,
        scale: float,
        state: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        decay, beta = gates(a, b, a_log, dt_bias)
        query, key = (_unit(x).to(x.dtype) if normed else x for x in (q, k))
        # The library keeps values before keys in a state and takes the decay itself.
        first = _start(state, cu_seqlens.numel() - 1, a.shape[1], v).transpose(2, 3).contiguous()
        out, final = kernel(
            query.contiguous(),
            key.contiguous(),
            v.contiguous(),
            g=decay.exp(),
            beta=beta,
            scale=scale,
            initial_state=first,
            output_final_state=True,
            cu_seqlens=cu_seqlens.long(),
            output_state=torch.empty_like(first),
        )
        return out, final.transpose(2, 3)

    return run


def _rows() -> tuple[tuple[str, Predicate, Any, int, bool], ...]:
    ragged = eq("attrs.layout", "ragged", FactKind.STR)
    fp32_gates = all_of(eq("dtype.a_log", "fp32"), one_of("dtype.dt_bias", "bf16", "fp32"))
    # These libraries repeat queries and keys over the heads of the values, FlashInfer both ways.
    grouped_values = all_of(
        same("shape.heads", "shape.key_heads"), same("shape.value_heads", "shape.state_heads")
    )
    flash_qla = all_of(
        NVIDIA,
        family_in("sm9", "sm10", "sm12"),
        ragged,
        eq("shape.head_dim", 128),
        half("input"),
        same("dtype.key", "dtype.input"),
        same("dtype.value", "dtype.input"),
        fp32_gates,
        grouped_values,
        lib("flash_qla"),
        lib("fla"),
    )
    flashinfer = all_of(
        FLASHINFER,
        family_in("sm9", "sm10"),
        ragged,
        eq("shape.head_dim", 128),
        *(eq(f"dtype.{name}", "bf16") for name in ("input", "key", "value")),
        half("a", "b"),
        fp32_gates,
        any_of(
            same("shape.heads", "shape.key_heads"), same("shape.key_heads", "shape.value_heads")
        ),
    )
    fla = all_of(NVIDIA, ragged, half("input"), grouped_values, lib("fla"))
    eager = all_of(ragged, is_set("dtype.input"))
    best = Priority.OPTIMIZED
    return (
        ("flash_qla.attention_gdn", flash_qla, _chunked("flash_qla"), best + 3, False),
        ("flashinfer.attention_gdn", flashinfer, _flashinfer, best + 2, False),
        ("fla.attention_gdn", fla, _chunked("fla.ops.gated_delta_rule"), best, True),
        ("eager.attention_gdn", eager, _eager, Priority.REFERENCE, True),
    )


def populate(catalog: Catalog) -> None:
    """Declares ``attention_gdn`` and its rows."""
    catalog.register_op(
        OpSpec(
            name="attention_gdn",
            dims=("tokens", "heads", "key_heads", "value_heads", "state_heads", "head_dim"),
            dtypes=("input", "key", "value", "a", "b", "a_log", "dt_bias"),
            attributes={"layout": FactKind.STR},
            optional_attributes={
                "layer_id": FactKind.INT,
                "use_qk_l2norm": FactKind.BOOL,
                "causal": FactKind.BOOL,
            },
            signature=(
                "(q, k, v, a, b, a_log, dt_bias, cu_seqlens, *, scale, state=None) -> (out, state)"
            ),
            doc=(
                "For each request and state head, S = exp(g) S; S += k beta (v - k S); "
                "out = scale q S, with g = -exp(a_log) softplus(a + dt_bias) and beta = "
                "sigmoid(b). q, k and v are packed rows [T, heads, D], a and b [T, state_heads], "
                "cu_seqlens int [R + 1], states fp32 [R, state_heads, D, D], keys first. Fewer "
                "heads are repeated to state_heads. use_qk_l2norm scales q and k to length one."
            ),
        )
    )
    for kernel_id, when, prepare, priority, capture_safe in _rows():
        catalog.register(
            Impl(
                kernel_id=kernel_id,
                op="attention_gdn",
                when=when,
                prepare=prepare,
                priority=priority,
                reference=priority == Priority.REFERENCE,
                capture_safe=capture_safe,
            )
        )
