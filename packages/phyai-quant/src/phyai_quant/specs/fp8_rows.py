"""FP8 weights with one scale per row, quantized while a high-precision checkpoint is loaded."""

from typing import cast

import torch
from torch import nn

from phyai_quant.scheme import Granularity, QDType, QuantConfigError, QuantScheme, TensorQuant
from phyai_quant.specs import _rtn, base, loading
from phyai_quant.specs.bf16 import check_float_source
from phyai_quant.specs.fp8 import Fp8Spec
from phyai_quant.specs.slicing import local_parts, whole_legs

WEIGHT = TensorQuant(QDType.FP8_E4M3, Granularity.PER_CHANNEL)
INPUT = TensorQuant(QDType.FP8_E4M3, Granularity.PER_CHANNEL, dynamic=True)


class Fp8RowsSpec(Fp8Spec):
    """float8 e4m3 ``[N, K]`` row-major with fp32 scales ``[N]``, and an input of one scale a token.

    This is what matrix products with row and column scales read, such as cuBLAS's. A source is
    quantized whole and in fp32 as it arrives, so ranks share the scale of a row.
    """

    def __init__(self) -> None:
        super().__init__(WEIGHT, INPUT)

    def tensor_names(self) -> tuple[str, ...]:
        """Returns ``("weight",)``: the high-precision source."""
        return ("weight",)

    def load_weight(
        self, layer: nn.Module, name: str, loaded: torch.Tensor, shard_id: base.ShardId = None
    ) -> None:
        """Quantizes a whole leg ``[w, K]`` (fp32, fp16 or bf16) and keeps this rank's part.

        Raises:
            QuantConfigError: Wrong tensor name, leg, shape or dtype; values that are not finite.
        """
        loading.check_tensor_name(layer, name, self.tensor_names())
        legs = loading.legs_of(layer, shard_id)
        check_float_source(layer, loaded)
        codes = cast("nn.Parameter", layer.weight)
        scales = cast("nn.Parameter", layer.weight_scale)
        with torch.no_grad():
            for leg, source in whole_legs(layer, name, loaded, legs):
                whole = _rtn.quantize(source.to(codes.device), WEIGHT)
                one = range(leg, leg + 1)
                for rows, part in local_parts(layer, name, whole.codes, one):
                    codes[rows].copy_(part)
                for rows, part in local_parts(
                    layer, name, whole.scale, one, columns_per_entry=None
                ):
                    scales[rows].copy_(part)
        state = loading.load_state(layer).loaded
        state.update((part, leg) for part in ("weight", "weight_scale") for leg in legs)


def build(scheme: QuantScheme, _sm: int | None = None) -> Fp8RowsSpec:
    """Returns the spec.

    Raises:
        QuantConfigError: for another scheme.
    """
    if scheme.weight != WEIGHT or scheme.input != INPUT or not scheme.online:
        raise QuantConfigError(
            f"fp8_rows does not store {scheme.describe()}; allowed: weight {WEIGHT.describe()}, "
            f"input {INPUT.describe()}, quantized at load"
        )
    return Fp8RowsSpec()
