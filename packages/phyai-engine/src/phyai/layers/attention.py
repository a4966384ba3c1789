"""Attention call sites: with a paged cache and without a cache."""

from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn

from phyai.dispatch import CallSite
from phyai.dispatch.bench_inputs import live_inputs
from phyai.runtime.paged import PagedKVCache, PagedPlan
from phyai.runtime.segments import SegmentPlan


class PagedAttention(nn.Module):
    """Attention of packed query rows to the cache slots that a plan lists or bounds.

    Args:
        heads: query heads.
        kv_heads: key/value heads; ``heads`` must be a multiple.
        head_dim: width of a head.
        layer: index of the layer in the cache.
        role: call-site role, ``prefix`` or ``expert`` in π0.5.
    """

    def __init__(self, heads: int, kv_heads: int, head_dim: int, *, layer: int, role: str) -> None:
        super().__init__()
        self.scale: float = head_dim**-0.5
        self.layer = layer
        self._site = CallSite(
            "attention_paged",
            role=role,
            dims={"heads": heads, "kv_heads": kv_heads, "head_dim": head_dim},
            attrs={"layout": "paged", "causal": False, "layer_id": layer},
        )
        self._segment_site = CallSite(
            "attention_segments",
            role=role,
            dims={"heads": heads, "kv_heads": kv_heads, "head_dim": head_dim},
            attrs={"layer_id": layer},
        )

    def forward(self, query: Tensor, cache: PagedKVCache, plan: PagedPlan | SegmentPlan) -> Tensor:
        """Returns [T, heads, head_dim] for ``query`` of that shape."""
        keys, values = cache.pages(self.layer)
        if isinstance(plan, SegmentPlan):
            facts: dict[str, Any] = {"input": query.dtype, "output": query.dtype}
            chosen = self._segment_site.select(
                device=query.device, dtype=facts, dims={"tokens": query.shape[0]}
            )
            return chosen.execute(query, keys, values, plan, scale=self.scale)
        with live_inputs("attention_paged", query, keys, values, plan, scale=self.scale):
            selection = self._site.select(
                device=query.device,
                dtype={"input": query.dtype, "output": query.dtype},
                dims={"tokens": query.shape[0]},
            )
        return selection.execute(query, keys, values, plan, scale=self.scale)


class CachelessAttention(nn.Module):
    """Attention within each item of a padded batch, whose keys may be more than its queries.

    Args:
        heads: query heads.
        head_dim: width of a head.
        role: call-site role.
        kv_heads: key/value heads, of which ``heads`` must be a multiple; ``heads`` if None.
        causal: whether a query sees only keys up to its own; the last query sees the last key.
        layer: index of the layer, for kernel policies.
    """

    def __init__(
        self,
        heads: int,
        head_dim: int,
        *,
        role: str,
        kv_heads: int | None = None,
        causal: bool = False,
        layer: int | None = None,
    ) -> None:
        super().__init__()
        self.scale: float = head_dim**-0.5
        self._options = {"causal": True} if causal else {}
        kv_heads = heads if kv_heads is None else kv_heads
        self._site = CallSite(
            "attention",
            role=role,
            dims={"heads": heads, "kv_heads": kv_heads, "head_dim": head_dim},
            attrs={"layout": "padded", "causal": causal}
            | ({} if layer is None else {"layer_id": layer}),
        )

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Attends within each item.

        Args:
            query: [B, S, heads, head_dim].
            key: [B, S2, kv_heads, head_dim].
            value: likewise.

        Returns:
            [B, S, heads, head_dim].
        """
        with live_inputs("attention", query, key, value, scale=self.scale, **self._options):
            selection = self._site.select(
                device=query.device,
                dtype={
                    "input": query.dtype,
                    "key": key.dtype,
                    "value": value.dtype,
                    "output": query.dtype,
                },
                dims={
                    "tokens": query.shape[0] * query.shape[1],
                    "kv_tokens": key.shape[0] * key.shape[1],
                },
            )
        return selection.execute(query, key, value, scale=self.scale, **self._options)


class JoinHeads(nn.Module):
    """Attention of several requests as rows of one matrix.

    Args:
        heads: query heads.
        head_dim: width of a head.
        role: call-site role.
    """

    def __init__(self, heads: int, head_dim: int, *, role: str) -> None:
        super().__init__()
        self._site = CallSite("join_heads", role=role, dims={"heads": heads, "head_dim": head_dim})

    def forward(self, parts: Sequence[Tensor]) -> Tensor:
        """Returns ``parts`` [T, heads, head_dim] as [sum of T, heads * head_dim], contiguous.

        Features are side by side; the order of the other dims in memory is free. One part that is
        such a matrix already is returned as it is.
        """
        first = parts[0]
        if len(parts) == 1 and first.is_contiguous():
            return first.flatten(1)
        selection = self._site.select(
            device=first.device,
            dtype={"input": first.dtype},
            dims={"tokens": sum(part.shape[0] for part in parts)},
        )
        return selection.execute(parts)
