"""Host-metadata checks that rotation adds to those of NVFP4 storage."""

from torch import Tensor

from piper_kernels.weights.convrot._rotation import require_divisible, require_group_size
from piper_kernels.weights.nvfp4._storage import is_transposed


def validate_rotation(qdata: Tensor, group_size: int) -> None:
    """Check packed codes, transposed or not, against a rotation group.

    Raises:
        ValueError: The group is not supported or does not divide the input features, or the
            codes are no matrix.
    """
    require_group_size(group_size)
    if qdata.ndim != 2:
        raise ValueError(
            f"ConvRot NVFP4 weights must be 2-D, got qdata of shape {tuple(qdata.shape)}"
        )
    packed = qdata.shape[0] if is_transposed(qdata) else qdata.shape[1]
    require_divisible(2 * packed, group_size)
