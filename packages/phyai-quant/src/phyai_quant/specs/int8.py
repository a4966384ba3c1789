"""INT8 weights kept as rows of codes."""

from typing import cast

import torch
from torch import nn

from phyai_quant.scheme import QDType, QuantConfigError, QuantScheme, TensorQuant
from phyai_quant.specs import int_codes
from phyai_quant.specs.int_common import IntegerSpec, stores_as_rows, unsupported
from phyai_quant.specs.slicing import local_parts

STORES = "int8 (per_tensor, per_channel, groups; none or int8)"


class Int8Spec(IntegerSpec):
    """int8 codes ``weight`` ``[N, K]``: W8A8 of every granularity, W8A16 per tensor or channel.

    Int8 matrix products read the codes as they are. See `IntegerSpec` for scales and inputs.
    """

    weight_dtype: torch.dtype | None = torch.int8
    layout: str | None = None
    code_name = "weight"

    def __init__(self, weight: TensorQuant, activation: TensorQuant | None = None) -> None:
        if weight.dtype is QDType.INT4:
            raise QuantConfigError(
                f"integer weights cannot be stored this way: weight is {weight.describe()}; "
                "allowed: int8 in rows; int4 is kept packed"
            )
        super().__init__(weight, activation)

    def signed_codes(self, layer: nn.Module) -> torch.Tensor:
        """Returns the signed int8 codes ``[N, K]``."""
        return cast("nn.Parameter", layer.weight).detach()

    def _stored_shape(self, weight_shape: tuple[int, int]) -> tuple[int, int]:
        return weight_shape

    def _store_codes(self, layer: nn.Module, name: str, loaded: torch.Tensor, legs: range) -> None:
        if name == "weight_packed":
            columns = int_codes.whole_shape(layer, legs)[1]
            loaded = int_codes.unpack(loaded, self.bits, columns)
        for rows, part in local_parts(layer, name, loaded, legs):
            cast("nn.Parameter", layer.weight)[rows].copy_(part)


def build(scheme: QuantScheme | None, sm: int | None) -> Int8Spec | None:
    """Returns the spec of int8 weights on disk that are kept as rows, else None."""
    del sm
    if scheme is None or scheme.online or unsupported(scheme.weight, scheme.input):
        return None
    if not stores_as_rows(scheme.weight, scheme.input):
        return None
    return Int8Spec(scheme.weight, scheme.input)
