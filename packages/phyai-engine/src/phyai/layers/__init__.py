"""Building blocks of models: each owns its weights and one kernel call site."""

from phyai.layers.adaptive_norm import AdaRMSNorm
from phyai.layers.attention import CachelessAttention, PagedAttention
from phyai.layers.embedding import Embedding
from phyai.layers.linear import Leg, Linear
from phyai.layers.mlp import GatedMLP, PlainMLP
from phyai.layers.norm import LayerNorm, RMSNorm
from phyai.layers.parallel import (
    ColumnParallelLinear,
    MergedColumnParallelLinear,
    QKVParallelLinear,
    RowParallelLinear,
    TensorParallel,
)
from phyai.layers.rope import RotaryEmbedding
from phyai.layers.unused import UnusedLinear

__all__ = [
    "AdaRMSNorm",
    "CachelessAttention",
    "ColumnParallelLinear",
    "Embedding",
    "GatedMLP",
    "LayerNorm",
    "Leg",
    "Linear",
    "MergedColumnParallelLinear",
    "PagedAttention",
    "PlainMLP",
    "QKVParallelLinear",
    "RMSNorm",
    "RotaryEmbedding",
    "RowParallelLinear",
    "TensorParallel",
    "UnusedLinear",
]
