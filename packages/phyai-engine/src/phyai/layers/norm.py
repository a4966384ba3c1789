"""RMS and layer normalisation."""

from collections.abc import Iterator
from typing import Literal

import torch
from torch import Tensor, nn

from phyai.checkpoints.slots import TensorSlot, copy_slot
from phyai.dispatch import CallSite, param_dtypes
from phyai.kernels.fp8_rows import Fp8Rows, Int8Rows, RoundedRows
from phyai.layers.linear import Linear

_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def _parameters(
    site: CallSite, activation_dtype: torch.dtype, device: torch.device | str
) -> dict[str, nn.Parameter]:
    """Allocates the parameters of a norm: fp32, unless the row that will be chosen needs less."""
    facts = {f"shape.{name}": size for name, size in site.dims.items()}
    facts |= {f"attrs.{name}": value for name, value in site.attrs.items()}
    # A model on the meta device stands for one on the selector's.
    place = None if torch.device(device).type == "meta" else device
    dtypes = param_dtypes(
        site.op,
        activation=activation_dtype,
        role=site.role,
        device=place,
        known=facts,
        preferred="fp32",
    )
    width = site.dims["hidden"]
    return {
        name: nn.Parameter(
            torch.empty(width, dtype=_DTYPES[dtype], device=device), requires_grad=False
        )
        for name, dtype in dtypes.items()
    }


class RMSNorm(nn.Module):
    """``x / rms(x) * (1 + w)``, Gemma's RMS norm, or ``x / rms(x) * w``, reduced in fp32.

    The weight is kept in fp32, or in the activation's dtype where the policy or the catalog
    chooses a kernel that reads it so. The choice is made here, before the weight is loaded; a
    kernel that reads any dtype runs with either.

    Args:
        width: of the last axis.
        prefix: checkpoint name of the layer.
        eps: added to the mean square.
        variant: ``gemma`` multiplies by 1 + w, ``rms`` by w.
        adds: inputs will come through `add`, so its kernel decides the weight's dtype.
        activation_dtype: dtype of the inputs to come.
        device: where the weight lives.
    """

    def __init__(
        self,
        width: int,
        *,
        prefix: str,
        eps: float = 1e-6,
        variant: Literal["gemma", "rms"] = "gemma",
        adds: bool = False,
        activation_dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> None:
        super().__init__()
        self.prefix = prefix
        self.eps = eps
        self.width = width
        self.variant = variant
        self._site, self._add_site = (
            CallSite(op, role="norm", dims={"hidden": width}, attrs={"variant": variant})
            for op in ("rmsnorm", "rmsnorm_add")
        )
        decides = self._add_site if adds else self._site
        self.weight: nn.Parameter = _parameters(decides, activation_dtype, device)["weight"]

    def forward(self, x: Tensor) -> Tensor:
        """Normalises ``x`` [..., width] over its last axis."""
        selection = self._site.select(
            device=x.device,
            dtype={"input": x.dtype, "weight": self.weight.dtype},
            dims={"tokens": x.numel() // self.width},
        )
        return selection.execute(x, self.weight, self.eps)

    def add(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        """Adds ``x`` [..., width] to the residual and normalises the sum.

        Returns:
            The output and the sum, both like ``x``.
        """
        selection = self._add_site.select(
            device=x.device,
            dtype={"input": x.dtype, "weight": self.weight.dtype, "residual": residual.dtype},
            dims={"tokens": x.numel() // self.width},
        )
        return selection.execute(x, residual, self.weight, self.eps)

    def fp8_rows(self, x: Tensor, residual: Tensor | None) -> tuple[Fp8Rows, Tensor]:
        """Does what `add`, or without a residual `forward`, does and rounds to FP8 at once.

        For a product that takes such rows, on whose device Triton runs.

        Returns:
            The rounded output, and the sum, or ``x`` without a residual.
        """
        from phyai.triton.fp8_rows import rmsnorm_rows

        gemma = self.variant == "gemma"
        codes, scales, total = rmsnorm_rows(x, residual, self.weight, self.eps, gemma=gemma)
        return Fp8Rows(codes, scales, x.dtype), total

    def int8_rows(self, x: Tensor, residual: Tensor | None, group: int) -> tuple[Int8Rows, Tensor]:
        """Does what `fp8_rows` does for a product that takes INT8 rows rotated by ``group``."""
        from piper_kernels.linear.convrot.int8.rows import normed_rows

        gemma = self.variant == "gemma"
        codes, scales, total = normed_rows(x, residual, self.weight, self.eps, group, gemma=gemma)
        return Int8Rows(codes, scales, x.dtype), total

    def checkpoint_slots(self) -> Iterator[TensorSlot]:
        """Yields the weight."""
        yield copy_slot(f"{self.prefix}.weight", self.weight)


def normed_for(
    reader: Linear | None, norm: "RMSNorm | LayerNorm", residual: Tensor, update: Tensor | None
) -> tuple[Tensor | RoundedRows, Tensor]:
    """Adds ``update``, if there is one, and norms the sum as the product behind wants to read it.

    Args:
        reader: the product that reads the output; None if something else does.
        norm: between the sum and it.
        residual: [T, width].
        update: likewise, or None.

    Returns:
        The output and the sum.
    """
    rows, kind, device = residual.shape[0], residual.dtype, residual.device
    if reader is not None and reader.takes_fp8_rows(rows, kind, device):
        if update is None:
            return norm.fp8_rows(residual, None)
        return norm.fp8_rows(update, residual)
    if reader is not None and isinstance(norm, RMSNorm):
        group = reader.takes_int8_rows(rows, kind, device)
        if group is not None:
            x, added = (residual, None) if update is None else (update, residual)
            return norm.int8_rows(x, added, group)
    if update is None:
        return norm(residual), residual
    return norm.add(update, residual)


class LayerNorm(nn.Module):
    """Layer norm with weight and bias, reduced in fp32, with parameters as `RMSNorm` keeps them.

    Args:
        width: of the last axis.
        prefix: checkpoint name of the layer.
        eps: added to the variance.
        adds: inputs will come through `add`, so its kernel decides the parameters' dtype.
        activation_dtype: dtype of the inputs to come.
        device: where the parameters live.
    """

    def __init__(
        self,
        width: int,
        *,
        prefix: str,
        eps: float = 1e-6,
        adds: bool = False,
        activation_dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> None:
        super().__init__()
        self.prefix = prefix
        self.eps = eps
        self.width = width
        self._site, self._add_site = (
            CallSite(op, role="layernorm", dims={"hidden": width}, attrs={"bias": True})
            for op in ("layernorm", "layernorm_add")
        )
        decides = self._add_site if adds else self._site
        parameters = _parameters(decides, activation_dtype, device)
        self.weight: nn.Parameter = parameters["weight"]
        self.bias: nn.Parameter = parameters["bias"]

    def forward(self, x: Tensor) -> Tensor:
        """Normalises ``x`` [..., width] over its last axis."""
        selection = self._site.select(
            device=x.device,
            dtype={"input": x.dtype, "weight": self.weight.dtype, "bias": self.bias.dtype},
            dims={"tokens": x.numel() // self.width},
        )
        return selection.execute(x, self.weight, self.bias, self.eps)

    def add(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        """Adds ``x`` [..., width] to the residual and normalises the sum.

        Returns:
            The output and the sum, both like ``x``.
        """
        selection = self._add_site.select(
            device=x.device,
            dtype={
                "input": x.dtype,
                "weight": self.weight.dtype,
                "bias": self.bias.dtype,
                "residual": residual.dtype,
            },
            dims={"tokens": x.numel() // self.width},
        )
        return selection.execute(x, residual, self.weight, self.bias, self.eps)

    def fp8_rows(self, x: Tensor, residual: Tensor | None) -> tuple[Fp8Rows, Tensor]:
        """Does what `add`, or without a residual `forward`, does and rounds to FP8 at once.

        For a product that takes such rows, on whose device Triton runs.

        Returns:
            The rounded output, and the sum, or ``x`` without a residual.
        """
        from phyai.triton.fp8_rows import layernorm_rows

        codes, scales, total = layernorm_rows(x, residual, self.weight, self.bias, self.eps)
        return Fp8Rows(codes, scales, x.dtype), total

    def checkpoint_slots(self) -> Iterator[TensorSlot]:
        """Yields weight and bias."""
        yield copy_slot(f"{self.prefix}.weight", self.weight)
        yield copy_slot(f"{self.prefix}.bias", self.bias)
