"""Building blocks of models: each owns its weights and one kernel call site."""

from phyai.layers.attention import CachelessAttention, PagedAttention
from phyai.layers.embedding import Embedding
from phyai.layers.linear import Leg, Linear
from phyai.layers.mlp import GatedMLP, PlainMLP
from phyai.layers.norm import AdaRMSNorm, LayerNorm, RMSNorm
from phyai.layers.rope import RotaryEmbedding

__all__ = [
    "AdaRMSNorm",
    "CachelessAttention",
    "Embedding",
    "GatedMLP",
    "LayerNorm",
    "Leg",
    "Linear",
    "PagedAttention",
    "PlainMLP",
    "RMSNorm",
    "RotaryEmbedding",
]
