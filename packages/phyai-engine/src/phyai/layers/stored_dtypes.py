"""Whether a checkpoint holds what the layers of a model were made for, by its headers alone."""

from collections.abc import Mapping

from torch import nn

from phyai.layers.linear import Linear
from phyai_quant import QuantPlan
from phyai_quant.disk_checks import check_resolved_layers
from phyai_quant.plan import Resolution


def check_stored_dtypes(model: nn.Module, dtypes: Mapping[str, str], plan: QuantPlan) -> None:
    """Refuses 16-bit weights where linear layers were made for quantized ones.

    Layers that the model does not compute may hold anything.

    Args:
        model: made under ``plan``, without its weights yet.
        dtypes: dtype of each tensor of the checkpoint, as safetensors headers say it.
        plan: in force while the model was made.

    Raises:
        QuantConfigError: for weights of 16 or more bits that a rule calls quantized. The text lists
            them with their dtypes, and the rules with their files.
    """
    check_resolved_layers(dtypes, plan, _resolutions(model))


def _resolutions(model: nn.Module) -> dict[str, Resolution]:
    """Returns what decided each weight that the checkpoint may hold, legs alone and together."""
    found: dict[str, Resolution] = {}
    for module in model.modules():
        if not isinstance(module, Linear) or module.resolution is None:
            continue
        if len(module.legs) == 1:
            found[module.stored[0]] = module.resolution
            continue
        found[module.prefix] = module.resolution
        for name, leg in zip(module.stored, module.resolution.legs, strict=True):
            found[name] = Resolution(name, (leg,))
    return found
