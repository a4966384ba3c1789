"""Operands, references and the engine's rows that the field cases of attention share."""

import torch

from phyai.dispatch import KernelQuery, build_catalog
from phyai.dispatch.facts import Facts

CATALOG = build_catalog()


def operands(heads, kv_heads, queries, keys, head_dim=64, device="cpu", dtype=torch.float16):
    """Normal queries, keys and values [1, heads, length, head_dim]."""
    generator = torch.Generator().manual_seed(keys)
    shapes = ((heads, queries), (kv_heads, keys), (kv_heads, keys))
    return [
        torch.randn(1, count, length, head_dim, generator=generator).to(device, dtype)
        for count, length in shapes
    ]


def exact(query, key, value, hidden=None):
    """Attention in FP64; ``hidden`` marks the keys that a query may not see."""
    key, value = (x.cpu().double() for x in (key, value))
    groups = query.shape[1] // key.shape[1]
    key, value = (x.repeat_interleave(groups, dim=1) for x in (key, value))
    logits = query.cpu().double() @ key.mT * query.shape[-1] ** -0.5
    if hidden is not None:
        logits = logits.masked_fill(hidden, -torch.inf)
    return logits.softmax(-1) @ value


def error(found, expected):
    return float((found.cpu().double() - expected).norm() / expected.norm())


def engine_row(kernel_id):
    impl = CATALOG.impl(kernel_id)
    return impl.prepare(Facts({"op": impl.op}), {})


def engine_attention(kernel_id, query, key, value, causal=False, dtype=torch.float32):
    """A row of the engine on ``[1, heads, length, head_dim]``; it takes heads last but one."""
    rows = [x.transpose(1, 2).to(dtype) for x in (query, key, value)]
    scale = query.shape[-1] ** -0.5
    return engine_row(kernel_id)(*rows, scale=scale, causal=causal).transpose(1, 2)


def attention_query(device="cpu", head_dim=64, **attrs):
    return KernelQuery.build(
        "attention",
        device=device,
        dtype=dict.fromkeys(("input", "key", "value"), "bf16"),
        dims={"heads": 4, "kv_heads": 4, "head_dim": head_dim, "tokens": 8},
        attrs={"layout": "padded", "causal": False, **attrs},
    )
