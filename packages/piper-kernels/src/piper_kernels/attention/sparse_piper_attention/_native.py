"""What the native backends share: preparation and routing in kernels.

Needs neither Triton nor a device to import.
"""

from torch import Tensor

from piper_kernels.attention.sparse_piper_attention._blocks import block_count
from piper_kernels.attention.sparse_piper_attention._preparation import PreparedOperands
from piper_kernels.attention.sparse_piper_attention._routing import RoutingRequest, RoutingSummaries
from piper_kernels.attention.sparse_piper_attention.reference import needs_routing


def prepare(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    request: RoutingRequest,
    scale: float,
    block_lengths: Tensor | None,
) -> tuple[PreparedOperands, RoutingSummaries | None]:
    """Quantize ``[B, S, H, D]`` operands and summarize them where blocks have to be scored."""
    from piper_kernels.attention._preparation.sparse import prepare_sparse

    routed = needs_routing(request, block_count(query.shape[1]))
    return prepare_sparse(
        query,
        key,
        value,
        scale=scale,
        mode=request.mode if routed else None,
        block_lengths=block_lengths,
        permuted=False,
    )


def route(
    request: RoutingRequest, summaries: RoutingSummaries | None, blocks: int
) -> tuple[Tensor, Tensor] | tuple[None, None]:
    """Return the routes of the leading query blocks of ``blocks`` and the table of heads.

    Where every block is kept there are none: a query block without a route attends to the same
    blocks in the same order.

    Returns:
        uint16 ``[B, routed blocks, R]``, ascending for every head, and int32 ``[2 * Hq + 1]``:
        kept blocks of heads, then the offsets of their routes.
    """
    from piper_kernels.attention._preparation.routes import route_table, select_routes

    if summaries is None or not needs_routing(request, blocks):
        return None, None
    table = route_table(request.layout, summaries.query.device)
    routed = request.routed_blocks(blocks)
    return select_routes(summaries, request.mode, request.layout, routed, table), table
