"""The public module of sparse Piper attention."""

from collections.abc import Sequence

from torch import Tensor, nn

from piper_kernels.attention.sparse_piper_attention._budget import LABEL, UNITS, ratio_units
from piper_kernels.attention.sparse_piper_attention._ops import (
    check_attention,
    sparse_piper_attention,
)
from piper_kernels.attention.sparse_piper_attention._routing import routing_mode
from piper_kernels.attention.sparse_piper_attention._validation import check_inference


class SparsePiperAttention(nn.Module):
    """Attention of each 64-row query block to its best 64-row key blocks and a dense suffix.

    Inference only, not causal. It has no parameters and no buffers and keeps nothing between
    calls: routes depend on the queries and keys of a call.

    Args:
        head_keep_ratios: For each query head, the share in (0, 1] of the routeable key blocks
            that it attends to. Stored in whole millionths.
        routing: ``"minmax"`` scores blocks by the extrema of their features, ``"mean"`` by means.

    Raises:
        TypeError: The ratios are not floating numbers.
        ValueError: A ratio is outside (0, 1] or rounds to zero millionths, there are none, or
            the routing is unknown.

    Source of the maths: the README of this folder.
    """

    def __init__(
        self, head_keep_ratios: Sequence[float] | Tensor, *, routing: str = "minmax"
    ) -> None:
        super().__init__()
        self._units = ratio_units(head_keep_ratios)
        self._mode = routing_mode(routing)

    @property
    def head_keep_ratios(self) -> tuple[float, ...]:
        """Keep ratio of each query head, a multiple of one millionth."""
        return tuple(unit / UNITS for unit in self._units)

    @property
    def routing(self) -> str:
        """Name of the routing."""
        return self._mode.name.lower()

    def extra_repr(self) -> str:
        """Return the configuration."""
        return f"heads={len(self._units)}, routing={self.routing!r}"

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        sparse_key_blocks: int,
        sparse_query_blocks: int | None = None,
        scale: float | None = None,
        block_lengths: Tensor | None = None,
    ) -> Tensor:
        """Attend.

        Args:
            query: float16, bfloat16 or float32 ``[B, S, Hq, D]`` with contiguous features, D 64
                or 128, S at least 64.
            key: ``[B, S, Hkv, D]`` of the same dtype; query head ``h`` reads head
                ``h // (Hq / Hkv)``.
            value: As the key.
            sparse_key_blocks: Leading complete 64-row key blocks that are routed, in
                ``[1, S // 64]`` and at most 65,536. Every query attends to all later keys.
            sparse_query_blocks: Leading 64-row query blocks that are routed, in
                ``[0, ceil(S / 64)]``; ``None``: all. Later ones attend to every key.
            scale: Factor of the logits, ``D ** -0.5`` by default.
            block_lengths: Contiguous int32 ``[S / 64]`` on the device: how many rows at the front
                of each block exist, in [1, 64] (not checked). The output keeps the layout; what
                rows that do not exist hold is unspecified.

        Returns:
            Contiguous ``[B, S, Hq, D]`` in the dtype of the query.

        Raises:
            TypeError: A count is not an integer.
            ValueError: A shape, dtype, device, layout, count or the scale does not fit.
            RuntimeError: An operand requires a gradient while gradients are enabled.
        """
        check_inference(LABEL, query, key, value)
        counts = (list(self._units), sparse_key_blocks)
        factor = check_attention(
            query, key, value, *counts, scale, block_lengths, sparse_query_blocks
        )
        mode = int(self._mode)
        return sparse_piper_attention(
            query, key, value, *counts, factor, mode, block_lengths, sparse_query_blocks
        )
