"""What is left of the language model's last layer when only its keys and values are read."""

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from phyai.checkpoints.slots import TensorSlot, unused_slot
from phyai.layers import Leg, Linear, RMSNorm, RotaryEmbedding, UnusedLinear
from phyai.models.pi05.sizes import DecoderSizes
from phyai.runtime.paged import PagedKVCache


class KeyValueLayer(nn.Module):
    """A last layer of which only keys and values are wanted: one norm and one projection.

    The expert reads nothing else of it, so its queries, attention, MLP and the norm behind it are
    neither computed nor kept. Their tensors are still expected in the checkpoint.

    Args:
        sizes: of the body.
        body: checkpoint name of the body.
        role: call-site role of the projection.
        params_dtype: of weights and activations.
        device: where the weights live.
    """

    def __init__(
        self,
        sizes: DecoderSizes,
        *,
        body: str,
        role: str,
        params_dtype: torch.dtype,
        device: torch.device | str,
    ) -> None:
        super().__init__()
        self.sizes = sizes
        self.index: int = sizes.layers - 1
        self.body = body
        self.prefix: str = f"{body}.layers.{self.index}"
        kv_width = sizes.kv_heads * sizes.head_dim
        self.input_layernorm: RMSNorm = RMSNorm(
            sizes.width,
            prefix=f"{self.prefix}.input_layernorm",
            adds=True,
            activation_dtype=params_dtype,
            device=device,
        )
        self.kv_proj: Linear = Linear(
            sizes.width,
            (Leg("k_proj", kv_width, "k"), Leg("v_proj", kv_width, "v")),
            prefix=f"{self.prefix}.self_attn.qkv_proj",
            role=role,
            params_dtype=params_dtype,
            device=device,
        )
        self.unused: nn.ModuleList = nn.ModuleList(self._unused_linears())

    def _unused_linears(self) -> Iterator[UnusedLinear]:
        width, mlp = self.sizes.width, self.sizes.mlp
        queries = self.sizes.heads * self.sizes.head_dim
        shapes = {
            "self_attn.q_proj": ("self_attn.qkv_proj", (queries, width)),
            "self_attn.o_proj": ("self_attn.o_proj", (width, queries)),
            "mlp.gate_proj": ("mlp.gate_up_proj", (mlp, width)),
            "mlp.up_proj": ("mlp.gate_up_proj", (mlp, width)),
            "mlp.down_proj": ("mlp.down_proj", (width, mlp)),
        }
        for name, (fused, shape) in shapes.items():
            yield UnusedLinear(f"{self.prefix}.{name}", shape, prefix=f"{self.prefix}.{fused}")

    def forward(
        self,
        x: Tensor,
        update: Tensor | None,
        positions: Tensor,
        rope: RotaryEmbedding,
        cache: PagedKVCache,
        first_slot: int,
    ) -> None:
        """Stores keys and values of rows ``x + update`` [T, width] from ``first_slot`` on.

        ``rope`` is one for ``kv_heads`` query heads: there are keys only, in both places.
        """
        norm = self.input_layernorm
        normed = norm(x) if update is None else norm.add(update, x)[0]
        heads = self.kv_proj(normed).view(x.shape[0], -1, self.sizes.head_dim)
        key, value = heads.split(self.sizes.kv_heads, dim=1)
        cache.write(self.index, first_slot, rope(positions, key, key)[1], value)

    def checkpoint_slots(self) -> Iterator[TensorSlot]:
        """Yields the vectors that are expected and left out."""
        width = self.sizes.width
        yield unused_slot(f"{self.prefix}.post_attention_layernorm.weight", (width,))
        yield unused_slot(f"{self.body}.norm.weight", (width,))
