"""Integer weights kept packed in int32 words."""

from typing import cast

import torch
from torch import nn

from phyai_quant.scheme import QuantScheme
from phyai_quant.specs import int_codes, loading
from phyai_quant.specs.int_common import IntegerSpec, stores_as_rows, unsupported
from phyai_quant.specs.slicing import local_parts

STORES = "int4 groups (none)"


class IntPackedSpec(IntegerSpec):
    """``weight`` int32 ``[N, ceil(K * bits / 32)]``: int4, and int8 groups with a 16-bit input.

    Words hold ``code + 2^(bits-1)``, lowest column in the lowest bits, as pack-quantized
    checkpoints do. See `IntegerSpec` for scales and inputs.
    """

    weight_dtype: torch.dtype | None = torch.int32
    layout: str | None = "packed"
    code_name = "weight_packed"

    def signed_codes(self, layer: nn.Module) -> torch.Tensor:
        """Returns the signed int8 codes ``[N, K]``."""
        columns = loading.load_state(layer).request.weight_shape[1]
        return int_codes.unpack(cast("nn.Parameter", layer.weight).detach(), self.bits, columns)

    def _stored_shape(self, weight_shape: tuple[int, int]) -> tuple[int, int]:
        return weight_shape[0], int_codes.words_for(weight_shape[1], self.bits)

    def _store_codes(self, layer: nn.Module, name: str, loaded: torch.Tensor, legs: range) -> None:
        target = cast("nn.Parameter", layer.weight)
        if name == "weight_packed":
            per_word = 32 // self.bits
            for rows, part in local_parts(layer, name, loaded, legs, columns_per_entry=per_word):
                target[rows].copy_(part)
            return
        int_codes.check_codes(layer, name, loaded, self.bits)
        for rows, part in local_parts(layer, name, loaded, legs):
            target[rows].copy_(int_codes.pack(part, self.bits))


def build(scheme: QuantScheme | None, sm: int | None) -> IntPackedSpec | None:
    """Returns the spec of integer weights on disk that are kept packed, else None."""
    del sm
    if scheme is None or scheme.online or unsupported(scheme.weight, scheme.input):
        return None
    if stores_as_rows(scheme.weight, scheme.input):
        return None
    return IntPackedSpec(scheme.weight, scheme.input)
