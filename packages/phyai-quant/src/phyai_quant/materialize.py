"""From a scheme to a physical weight format: the only step that reads the hardware."""

from importlib import import_module
from typing import TYPE_CHECKING

from phyai_quant.online_rules import check_online_scheme
from phyai_quant.scheme import QuantConfigError, QuantScheme
from phyai_quant.specs.registry import build_installed

if TYPE_CHECKING:
    from phyai_quant.specs.base import WeightSpec

_SPEC_MODULES = (
    "phyai_quant.specs.bf16",
    "phyai_quant.specs.convrot_int8",
    "phyai_quant.specs.convrot_nvfp4",
    "phyai_quant.specs.humming",
    "phyai_quant.specs.humming_checkpoint",
    "phyai_quant.specs.fp8",
    "phyai_quant.specs.nvfp4",
    "phyai_quant.specs.mxfp4",
    "phyai_quant.specs.int8",
    "phyai_quant.specs.int_packed",
)
"""One module per line. ``build(scheme, sm)`` returns the module's spec, None for a scheme that it
does not store, or raises QuantConfigError for one that it stores but not on this target; ``STORES``
names the schemes in the error when nothing stores one. Modules are imported when a scheme is
materialized, in this order, until one answers."""


def materialize(scheme: QuantScheme | None, sm: int | None = None) -> "WeightSpec":
    """Returns the physical format that stores a scheme.

    A scheme with ``stored_by`` goes to that installed format and to no other.

    Args:
        scheme: What the layer's weight and input are quantized to; None is unquantized.
        sm: NVIDIA SM version of the target, such as 90 for 9.0; None without an NVIDIA GPU.

    Returns:
        The spec that allocates, loads and reads back the weight.

    Raises:
        QuantConfigError: Nothing stores the scheme on this target. The text gives the reason; a
            scheme is never replaced by an unquantized one.
    """
    if scheme is not None and scheme.stored_by is not None:
        return build_installed(scheme, sm)
    if scheme is not None and scheme.online:
        check_online_scheme(scheme)
    stored: list[str] = []
    for name in _SPEC_MODULES:
        module = import_module(name)
        spec = module.build(scheme, sm)
        if spec is not None:
            return spec
        if hasattr(module, "STORES"):
            stored.append(module.STORES)
    wanted = "an unquantized weight" if scheme is None else scheme.describe()
    raise QuantConfigError(
        f"no weight format stores {wanted}; stored formats, with the inputs they take: "
        f"{', '.join(stored)}"
    )
