"""Who takes part in the attention benchmarks."""

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from _attention_operands import Operands, attention_quality
from _harness import WrongResultError
from torch import Tensor
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

from piper_kernels import piper_attention, sage_attention_2pp

type Attention = Callable[[], Tensor]


@dataclass(frozen=True)
class Provider:
    """One way to compute dense attention.

    Attributes:
        label: Name in tables.
        build: Returns a function of no arguments that computes ``[B, Hq, S, D]`` of operands; what
            it does before is not timed.
        refusal: Returns why it cannot run such operands, or an empty string.
        minimum_sqnr: Decibels on N(0, 1) operands below which a result is wrong.
        ours: Whether a failure of it is a failure of the run.
    """

    label: str
    build: Callable[[Operands, bool], Attention]
    refusal: Callable[[Operands], str]
    minimum_sqnr: float
    ours: bool = False


def _anything(_operands: Operands) -> str:
    return ""


def _needs_gpu(operands: Operands) -> str:
    return "" if operands.query.is_cuda else "needs a GPU"


def _piper(operands: Operands, is_causal: bool) -> Attention:
    o = operands
    return lambda: piper_attention(o.query, o.key, o.value, is_causal=is_causal)


def _sage(operands: Operands, is_causal: bool) -> Attention:
    query = operands.query
    key, value = repeated(operands)
    return lambda: sage_attention_2pp(query, key, value, is_causal=is_causal)


def repeated(operands: Operands) -> tuple[Tensor, Tensor]:
    """Return keys and values with as many heads as queries, for those without grouped heads."""
    groups = operands.query.shape[1] // operands.key.shape[1]
    key, value = (x.repeat_interleave(groups, 1) for x in (operands.key, operands.value))
    return key, value


def _sdpa(backend: SDPBackend) -> Callable[[Operands, bool], Attention]:
    def build(operands: Operands, is_causal: bool) -> Attention:
        query = operands.query
        key, value = repeated(operands)

        def run() -> Tensor:
            with sdpa_kernel(backend):
                return functional.scaled_dot_product_attention(
                    query, key, value, is_causal=is_causal
                )

        return run

    return build


def _flashinfer_refusal(operands: Operands) -> str:
    if importlib.util.find_spec("flashinfer") is None:
        return "flashinfer is not installed"
    if operands.query.shape[0] != 1:
        return "takes one sequence"
    if not operands.query.is_cuda or torch.cuda.get_device_capability() != (9, 0):
        return "needs a Hopper GPU"
    if not flashinfer_module(operands.query.shape[-1]).is_compiled:
        return "its kernel is not built, see --build-flashinfer"
    return ""


def flashinfer_module(head_dim: int) -> Any:
    """Return FlashInfer's module of bf16 FA3 kernels, which takes minutes to build once."""
    from flashinfer.jit import gen_single_prefill_module

    dtype = torch.bfloat16
    return gen_single_prefill_module(
        "fa3", dtype, dtype, dtype, head_dim, head_dim, 0, False, False, False
    )


def _flashinfer(operands: Operands, is_causal: bool) -> Attention:
    from flashinfer import single_prefill_with_kv_cache

    # Rows before heads.
    query, key, value = (
        x[0].transpose(0, 1).contiguous() for x in (operands.query, operands.key, operands.value)
    )

    def run() -> Tensor:
        out = single_prefill_with_kv_cache(query, key, value, causal=is_causal, backend="fa3")
        return out.transpose(0, 1).unsqueeze(0)

    return run


def _sageattention_refusal(operands: Operands) -> str:
    if importlib.util.find_spec("sageattention") is None:
        return "sageattention is not installed"
    return _needs_gpu(operands)


def _sageattention(operands: Operands, is_causal: bool) -> Attention:
    from sageattention import sageattn  # pyright: ignore[reportMissingImports]

    query = operands.query
    key, value = repeated(operands)
    return lambda: sageattn(query, key, value, tensor_layout="HND", is_causal=is_causal)


def check(
    provider: Provider, operands: Operands, rows: Tensor, exact: Tensor, is_causal: bool
) -> dict:
    """Return the quality of some rows of a result.

    Args:
        provider: Who computes it.
        operands: N(0, 1) operands.
        rows: Which rows are compared.
        exact: Their exact results ``[B, Hq, rows, D]``.
        is_causal: Whether later keys are masked.

    Raises:
        WrongResultError: It is worse than the provider may be on N(0, 1) operands.
    """
    actual = provider.build(operands, is_causal)()
    if actual.shape != operands.query.shape:
        raise WrongResultError(f"{provider.label}: shape {tuple(actual.shape)}; not timed")
    found = attention_quality(actual[:, :, rows], exact)
    sqnr = found["sqnr_db"]
    if found["nonfinite"] or (sqnr is not None and sqnr < provider.minimum_sqnr):
        raise WrongResultError(
            f"{provider.label}: {found['nonfinite']} values not finite, SQNR {sqnr} dB, "
            f"at least {provider.minimum_sqnr} dB expected; not timed"
        )
    return found


PROVIDERS = {
    "piper": Provider("Piper attention", _piper, _anything, 34.0, ours=True),
    "sage": Provider("SageAttention2++ (ours)", _sage, _anything, 27.0, ours=True),
    "cudnn": Provider("cuDNN SDPA", _sdpa(SDPBackend.CUDNN_ATTENTION), _needs_gpu, 48.0),
    "flash": Provider("Flash SDPA", _sdpa(SDPBackend.FLASH_ATTENTION), _anything, 48.0),
    "flashinfer_fa3": Provider("FlashInfer FA3", _flashinfer, _flashinfer_refusal, 48.0),
    "sageattention": Provider("SageAttention", _sageattention, _sageattention_refusal, 20.0),
}
