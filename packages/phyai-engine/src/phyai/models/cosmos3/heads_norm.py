"""Norm, rotation and storage of attention heads as one operation."""

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from phyai.checkpoints.slots import TensorSlot, copy_slot
from phyai.dispatch import CallSite


class NormRotateStore(nn.Module):
    """Normalises query and key heads, rotates them, and stores keys and values.

    Each head is divided by its RMS and multiplied by a weight [head_dim] in fp32.

    Args:
        heads: query heads of this rank.
        kv_heads: key and value heads of this rank.
        head_dim: width of a head.
        eps: added to the mean square.
        stored: checkpoint names of the norms of queries and keys.
        role: call-site role.
        device: where the weights live.
    """

    norm_q: nn.Parameter
    norm_k: nn.Parameter

    def __init__(
        self,
        heads: int,
        kv_heads: int,
        head_dim: int,
        *,
        eps: float,
        stored: tuple[str, str],
        role: str,
        device: torch.device | str,
    ) -> None:
        super().__init__()
        self.eps = eps
        self._stored = stored
        self.norm_q, self.norm_k = (
            nn.Parameter(
                torch.empty(head_dim, dtype=torch.float32, device=device), requires_grad=False
            )
            for _ in range(2)
        )
        self._site = CallSite(
            "qk_norm_rope_append",
            role=role,
            dims={"head_dim": head_dim, "heads_q": heads, "heads_k": kv_heads},
            attrs={"variant": "rms"},
        )

    def forward(
        self,
        qkv: Tensor,
        rotation: Tensor,
        slots: Tensor,
        keys: Tensor,
        values: Tensor,
        items: int,
    ) -> Tensor:
        """Returns the queries and stores the rest.

        Args:
            qkv: [T, (heads + 2 * kv_heads) * head_dim].
            rotation: fp32 [T, head_dim], cosines then sines.
            slots: int64 [T], where each row's key and value go.
            keys: [slots, kv_heads, head_dim], written.
            values: likewise.
            items: branches whose tokens these are, as many of each.

        Returns:
            [items, T / items, heads, head_dim]; in memory the tokens of a head follow each other,
            so that heads that share keys can be taken for one.
        """
        selection = self._site.select(
            device=qkv.device, dtype={"input": qkv.dtype}, dims={"tokens": qkv.shape[0]}
        )
        return selection.execute(
            qkv, self.norm_q, self.norm_k, rotation, slots, keys, values, self.eps, items
        )

    def checkpoint_slots(self) -> Iterator[TensorSlot]:
        """Yields both weights."""
        for name, weight in zip(self._stored, (self.norm_q, self.norm_k), strict=True):
            yield copy_slot(f"{name}.weight", weight)
