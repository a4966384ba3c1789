"""A projection with a bias and the plain activation behind it as one operation.

The layers are the default, because the fused row leaves out the rounding between them. A policy
chooses it with ``{match: {op: activated_product}, prefer: torch.activated_product}``.
"""

from typing import Any

import torch
from torch import Tensor

from phyai.dispatch.catalog import Catalog
from phyai.dispatch.conditions import compare, eq, is_set, one_of, same
from phyai.dispatch.facts import FactKind
from phyai.dispatch.opspec import Impl, OpSpec, Priority
from phyai.dispatch.predicate import all_of
from phyai.kernels.conditions import NVIDIA, returns


def _layers(projection: Any, activation: Any, x: Tensor) -> Tensor:
    return activation(projection(x))


def _cublas(projection: Any, activation: Any, x: Tensor) -> Tensor:  # noqa: ARG001
    """Lets cuBLASLt add the bias and apply GELU's tanh form to the sums in fp32."""
    rows = x.reshape(-1, x.shape[-1])
    out = torch._addmm_activation(  # pyright: ignore[reportPrivateImportUsage]
        projection.bias, rows, projection.weight.t(), use_gelu=True
    )
    return out.view(*x.shape[:-1], out.shape[1])


def populate(catalog: Catalog) -> None:
    """Declares ``activated_product`` and its rows."""
    catalog.register_op(
        OpSpec(
            name="activated_product",
            dims=("M", "K", "hidden"),
            dtypes=("input", "output", "weight"),
            attributes={"activation": FactKind.STR},
            signature="(projection, activation, x) -> Tensor",
            doc="act(x Wᵀ + b) [..., hidden] of x [..., K]; the activation is not gated.",
        )
    )
    catalog.register(
        Impl(
            kernel_id="layers.activated_product",
            op="activated_product",
            when=is_set("dtype.input"),
            prepare=returns(_layers),
            # Before the fused row, which runs where a policy prefers it.
            priority=Priority.OPTIMIZED,
            reference=True,
        )
    )
    catalog.register(
        Impl(
            kernel_id="torch.activated_product",
            op="activated_product",
            when=all_of(
                NVIDIA,
                one_of("quant.format", "bf16", "fp16"),
                one_of("dtype.input", "bf16", "fp16"),
                same("dtype.weight", "dtype.input"),
                # ATen's form of GELU on CUDA devices; elsewhere it is the exact one.
                eq("attrs.activation", "gelu_tanh", FactKind.STR),
                compare("shape.M", ">=", 1),
            ),
            prepare=returns(_cublas),
            priority=Priority.GENERAL,
        )
    )
