"""Queries that are projected window by window."""

from dataclasses import dataclass

from torch import Tensor

from piper_kernels.attention.sparse_piper_attention._blocks import BLOCK, block_count
from piper_kernels.attention.sparse_piper_attention._routing import RoutingMode
from piper_kernels.fusions.attention.convrot_int8 import WindowedInput
from piper_kernels.fusions.convrot_int8_sage_qk.operands import HeadProjection
from piper_kernels.fusions.convrot_int8_sage_qk.projections import project_query
from piper_kernels.fusions.projected_qk.transform import HeadTransform


@dataclass(frozen=True)
class ProjectedQueries:
    """Queries of a ConvRot INT8 linear.

    Attributes:
        inputs: What is projected.
        projection: The linear.
        transform: Norm and rotation of all rows.
        softmax_scale: Factor of the logits.
        mode: How blocks are summarized.
        block_lengths: int32 ``[blocks]``, or ``None``.
    """

    inputs: WindowedInput
    projection: HeadProjection
    transform: HeadTransform
    softmax_scale: float
    mode: RoutingMode
    block_lengths: Tensor | None

    @property
    def tensors(self) -> list[Tensor]:
        """What they are made of."""
        given = (
            self.projection.qdata,
            self.projection.scale,
            self.projection.bias,
            self.transform.weight,
            self.transform.cos,
            self.transform.sin,
        )
        return [*self.inputs.tensors, *(tensor for tensor in given if tensor is not None)]

    def window(self, rows: slice) -> tuple[Tensor, Tensor, Tensor]:
        """Return codes, scales and summaries of a range of rows that starts a block."""
        lengths = self.block_lengths
        if lengths is not None:
            lengths = lengths[rows.start // BLOCK : block_count(rows.stop)]
        return project_query(
            self.inputs.window(rows),
            self.projection,
            self.transform.rows(rows.start, rows.stop),
            self.softmax_scale,
            self.mode,
            lengths,
        )
