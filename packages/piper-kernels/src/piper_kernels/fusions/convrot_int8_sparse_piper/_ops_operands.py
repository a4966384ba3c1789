"""What the projection operators of sparse Piper attention check and allocate."""

from torch import Tensor

from piper_kernels.attention.sparse_piper_attention._blocks import BLOCK, block_count
from piper_kernels.attention.sparse_piper_attention._validation import check_block_lengths
from piper_kernels.fusions.convrot_int8_sage_qk.operands import (
    HeadProjection,
    PreparedInput,
    check_projection,
)
from piper_kernels.fusions.projected_qk.transform import HeadTransform, check_transform

LABEL = "sparse Piper projection"


def check_operands(
    inputs: PreparedInput,
    projection: HeadProjection,
    transform: HeadTransform | None,
    block_lengths: Tensor | None,
) -> None:
    """Check the metadata of all operands; ``ValueError`` names the one that does not fit."""
    check_projection(LABEL, inputs, projection, least_rows=BLOCK)
    rows, device = inputs.qdata.shape[1], inputs.qdata.device
    if transform is not None:
        check_transform(LABEL, transform, projection.head_dim, rows, device)
    check_block_lengths(LABEL, block_lengths, rows, device)


def sizes(inputs: PreparedInput, projection: HeadProjection) -> tuple[int, int, int, int]:
    """Return batches, heads, blocks of 64 rows and the width of heads."""
    batch, rows, _ = inputs.qdata.shape
    return batch, projection.heads, block_count(rows), projection.head_dim
