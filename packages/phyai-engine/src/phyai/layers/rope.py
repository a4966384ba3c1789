"""Rotary position embedding."""

import torch
from torch import Tensor, nn

from phyai.dispatch import CallSite


class RotaryEmbedding(nn.Module):
    """Rotates pairs ``(i, i + head_dim / 2)`` by ``position * theta^(-2i / head_dim)``.

    Angles, cosines and sines are fp32 whatever the dtype of queries and keys.

    Args:
        head_dim: width of a head, all of it rotated.
        heads: query heads.
        kv_heads: key heads.
        max_positions: largest position plus one.
        theta: base of the frequencies.
        device: where the table lives.
    """

    def __init__(
        self,
        head_dim: int,
        heads: int,
        kv_heads: int,
        *,
        max_positions: int,
        theta: float = 10_000.0,
        device: torch.device | str = "cpu",
    ) -> None:
        super().__init__()
        exponents = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
        angles = torch.outer(torch.arange(max_positions, dtype=torch.float32), theta**-exponents)
        table = torch.cat([angles.cos(), angles.sin()], dim=1)
        self.cos_sin: Tensor
        self.register_buffer("cos_sin", table.to(device), persistent=False)
        self._append_site = CallSite(
            "rope_append",
            role="rope",
            dims={"head_dim": head_dim, "heads_q": heads, "heads_k": kv_heads},
            attrs={"rope_type": "default"},
        )
        self._site = CallSite(
            "rope",
            role="rope",
            dims={
                "head_dim": head_dim,
                "rotary_dim": head_dim,
                "heads_q": heads,
                "heads_k": kv_heads,
            },
            attrs={"rope_type": "default", "interleave": False},
        )

    def append(
        self, positions: Tensor, qkv: Tensor, keys: Tensor, values: Tensor, first_slot: int
    ) -> Tensor:
        """Rotates queries and keys and stores keys and values.

        Args:
            positions: integer [T].
            qkv: [T, heads + 2 * kv_heads, D]: queries, keys, values.
            keys: [slots, 1, kv_heads, D], written from ``first_slot`` on.
            values: likewise.
            first_slot: slot of the first row.

        Returns:
            The rotated queries [T, heads, D].
        """
        selection = self._append_site.select(
            device=qkv.device, dtype={"input": qkv.dtype}, dims={"tokens": qkv.shape[0]}
        )
        return selection.execute(positions, qkv, self.cos_sin, keys, values, first_slot)

    def forward(self, positions: Tensor, query: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
        """Rotates ``query`` [T, heads, D] and ``key`` [T, kv_heads, D] at ``positions`` [T]."""
        selection = self._site.select(
            device=query.device, dtype={"input": query.dtype}, dims={"tokens": query.shape[0]}
        )
        return selection.execute(positions, query, key, self.cos_sin)
