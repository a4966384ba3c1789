"""From the tensors of a checkpoint to a layer's weight."""

import torch
from torch import nn

from phyai_quant import QuantConfigError, QuantScheme
from phyai_quant.specs.base import ShardId
from phyai_quant.specs.int8 import Int8Spec

_LARGEST_CODE = 127
_ROW_MAJOR = 0


class LlmInt8Spec(Int8Spec):
    """int8 rows whose scale is stored as ``SCB``, the largest magnitude of each row.

    The rest is int8 rows as phyai-quant stores them: kernels, fused layers and tensor parallelism
    are those of its format.
    """

    def tensor_names(self) -> tuple[str, ...]:
        """Returns the names of int8 rows, ``SCB`` ``[N]`` and ``weight_format``, a scalar."""
        return (*super().tensor_names(), "SCB", "weight_format")

    def load_weight(
        self, layer: nn.Module, name: str, loaded: torch.Tensor, shard_id: ShardId = None
    ) -> None:
        """Copies codes, or scales as ``SCB / 127``.

        Raises:
            QuantConfigError: As `Int8Spec.load_weight`; codes that are not in rows.
        """
        if name == "weight_format":
            if loaded.numel() != 1 or int(loaded) != _ROW_MAJOR:
                raise QuantConfigError(
                    f"{getattr(layer, 'prefix', '')}: weight_format is {loaded.tolist()}; allowed: "
                    f"{_ROW_MAJOR} (rows); save the checkpoint again with a newer bitsandbytes"
                )
            return
        if name == "SCB":
            name, loaded = "weight_scale", loaded.float() / _LARGEST_CODE
        super().load_weight(layer, name, loaded, shard_id)

    def missing_parts(self, layer: nn.Module) -> list[str]:
        """Returns what was never loaded, under the names of bitsandbytes."""
        missing = super().missing_parts(layer)
        return [name.replace(".weight_scale", ".SCB") for name in missing]


def build(scheme: QuantScheme, sm: int | None) -> LlmInt8Spec | None:
    """Returns the format of int8 rows with 16-bit inputs, which runs on any device, else None."""
    del sm
    return LlmInt8Spec(scheme.weight) if scheme.input is None else None
