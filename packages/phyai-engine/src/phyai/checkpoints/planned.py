"""Which stored tensors a model reads under a quantization plan."""

from collections.abc import Callable

import torch
from torch import Tensor

from phyai.checkpoints.reader import CheckpointReader
from phyai_quant import QuantPlan

_MARKERS = ("comfy_quant",)
_CACHE_SCALES = ("k_scale", "v_scale", "k_zero_point", "v_zero_point")


def model_tensors(
    reader: CheckpointReader, plan: QuantPlan | None, device: torch.device | str
) -> dict[str, Callable[[], Tensor]]:
    """Returns readers of all tensors that belong to the model, by name.

    Left out is what the plan was read from, and scales of a quantized cache that it declares.

    Args:
        reader: of the checkpoint.
        plan: in force while the model is built, or None.
        device: where tensors are read to.
    """
    unused: tuple[str, ...] = ()
    if plan is not None:
        unused = _MARKERS if plan.kv_cache is None else (*_MARKERS, *_CACHE_SCALES)
    return {
        name: read
        for name, read in reader.tensors(device).items()
        if name.rpartition(".")[2] not in unused
    }
