"""Token embedding from one shard of the vocabulary."""

from torch import Tensor
from torch.nn import functional

from phyai.dispatch.catalog import Catalog
from phyai.dispatch.conditions import is_set
from phyai.dispatch.facts import FactKind
from phyai.dispatch.opspec import Impl, OpSpec, Priority
from phyai.kernels.bench_elementwise import embedding_inputs
from phyai.kernels.conditions import returns


def _embedding(input_ids: Tensor, weight: Tensor, shard_start: int, shard_end: int) -> Tensor:
    if shard_end - shard_start > weight.shape[0]:
        raise ValueError(
            f"shard {shard_start}:{shard_end} has more rows than the table's {weight.shape[0]}"
        )
    outside = (input_ids < shard_start) | (input_ids >= shard_end)
    rows = (input_ids - shard_start).masked_fill(outside, 0)
    return functional.embedding(rows, weight).masked_fill(outside.unsqueeze(-1), 0)


def populate(catalog: Catalog) -> None:
    """Declares ``embedding`` and its row."""
    catalog.register_op(
        OpSpec(
            name="embedding",
            dims=("tokens", "embedding_dim"),
            dtypes=("input", "weight"),
            attributes={"shard_start": FactKind.INT, "shard_end": FactKind.INT},
            signature="(input_ids, weight, shard_start, shard_end) -> Tensor",
            bench_args=embedding_inputs,
            doc=(
                "Rows of weight for ids in shard_start:shard_end, whose first row is "
                "weight[0]; zero rows for ids outside."
            ),
        )
    )
    catalog.register(
        Impl(
            kernel_id="torch.embedding",
            op="embedding",
            when=is_set("dtype.weight"),
            prepare=returns(_embedding),
            priority=Priority.REFERENCE,
            reference=True,
        )
    )
