"""The expert's last norm and the action head as one operation."""

from torch import Tensor

from phyai.dispatch import CallSite
from phyai.layers import AdaRMSNorm, Linear


def velocity_site(width: int, actions: int) -> CallSite:
    """Returns the call site of rows of ``width`` and actions of ``actions`` dimensions."""
    return CallSite("flow_velocity", role="head", dims={"hidden": width, "actions": actions})


def normed_velocity(
    site: CallSite, norm: AdaRMSNorm, projection: Linear, x: Tensor, modulation: Tensor
) -> Tensor:
    """Norms the rows of an expert that leaves nothing to add and projects them to velocities.

    Args:
        site: of the operation.
        norm: the expert's last.
        projection: the action head.
        x: [T, width], the expert's residual.
        modulation: [1 or T, 3 * width] of the norm.

    Returns:
        [T, actions] in fp32.
    """
    selection = site.select(
        device=x.device,
        dtype={"input": x.dtype, "weight": projection.params_dtype},
        quant=projection.spec.physical_signature,
        dims={"tokens": x.shape[0]},
        attrs={"shared_modulation": modulation.shape[0] == 1},
    )
    return selection.execute(norm, projection, x, modulation)
