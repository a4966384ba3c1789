"""Depthwise causal convolution over tokens."""

from typing import Any

from torch import Tensor
from torch.nn import functional

from phyai.dispatch.catalog import Catalog
from phyai.dispatch.conditions import is_set, one_of
from phyai.dispatch.facts import FactKind, Facts
from phyai.dispatch.opspec import Impl, OpSpec, Priority
from phyai.dispatch.predicate import all_of
from phyai.kernels.bench import random_tensor

ACTIVATIONS = ("none", "silu")


def _causal_conv(x: Tensor, weight: Tensor, *, silu: bool) -> Tensor:
    taps = weight.shape[1]
    padded = functional.pad(x.float().t(), (taps - 1, 0)).unsqueeze(0)
    out = functional.conv1d(padded, weight.float().unsqueeze(1), groups=x.shape[1])[0].t()
    return (functional.silu(out) if silu else out).to(x.dtype)


def _prepare(facts: Facts, params: Any) -> Any:  # noqa: ARG001
    silu = facts["attrs.activation"] == "silu"

    def run(x: Tensor, weight: Tensor, split_sizes: list[int]) -> tuple[Tensor, ...]:
        return _causal_conv(x, weight, silu=silu).split(split_sizes, dim=-1)

    return run


def _bench(facts: Facts, device: Any) -> tuple[Any, ...]:
    tokens, channels, taps = (facts[f"shape.{name}"] for name in ("tokens", "channels", "kernel"))
    x = random_tensor((tokens, channels), facts["dtype.input"], device)
    return x, random_tensor((channels, taps), facts["dtype.input"], device), [channels]


def populate(catalog: Catalog) -> None:
    """Declares ``causal_conv`` and its reference row."""
    catalog.register_op(
        OpSpec(
            name="causal_conv",
            dims=("tokens", "channels", "kernel"),
            dtypes=("input",),
            attributes={"activation": FactKind.STR, "split": FactKind.BOOL},
            signature="(x, weight, split_sizes) -> tuple[Tensor, ...]",
            bench_args=_bench,
            doc=(
                "x [tokens, channels], weight [channels, kernel]: each channel is convolved with "
                "its own taps over this and earlier tokens, activated (none or silu) and split."
            ),
        )
    )
    catalog.register(
        Impl(
            kernel_id="torch.causal_conv",
            op="causal_conv",
            when=all_of(
                is_set("dtype.input"),
                one_of("attrs.activation", *ACTIVATIONS, kind=FactKind.STR),
            ),
            prepare=_prepare,
            priority=Priority.REFERENCE,
            reference=True,
        )
    )
