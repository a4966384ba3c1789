"""Numeric checks of every Triton row against the reference row of its operation.

Run as a script with ``TRITON_INTERPRET=1``, or with ``cuda`` as its argument on a GPU.
"""

import sys
from collections.abc import Iterator
from typing import Any

import fp8_checks
import torch
from torch import Tensor

from phyai.dispatch.catalog import build_catalog
from phyai.dispatch.facts import Facts

DEVICE = sys.argv[1] if sys.argv[1:] == ["cuda"] else "cpu"
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
# The interpreter cuts values off where a GPU rounds them to bf16.
BF16_STEP = 4e-3 if DEVICE == "cuda" else 8e-3
TOLERANCE = {torch.float32: 1e-6, torch.bfloat16: BF16_STEP, torch.float16: 5e-4}
SHAPES = ((1, 1), (3, 7), (5, 257), (2, 1024))
ODD = (5, 257)
ROUNDINGS = {"modulate": 4}  # of operations that round more than once
EPS = 1e-6
CATALOG = build_catalog()
GENERATOR = torch.Generator().manual_seed(0)


def normal(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Returns normal values whose rows are views of a NaN-filled buffer."""
    values = torch.randn(shape, generator=GENERATOR).to(dtype)
    buffer = torch.full((*shape[:-1], shape[-1] + 5), torch.nan, dtype=dtype).to(DEVICE)
    buffer[..., 2 : 2 + shape[-1]] = values.to(DEVICE)
    return buffer[..., 2 : 2 + shape[-1]]


def run(kernel_id: str, arguments: tuple[Any, ...], facts: dict[str, Any], **options: Any) -> Any:
    impl = CATALOG.impl(kernel_id)
    return impl.prepare(Facts({"op": impl.op, **facts}), {})(*arguments, **options)


def compare(op: str, reference: str, *arguments: Any, facts: Any = None, **options: Any) -> None:
    """Runs both rows and compares every output, which must have the same shape and dtype."""
    facts = facts or {}
    actual = run(f"triton.{op}", arguments, facts, **options)
    expected = run(reference, arguments, facts, **options)
    if isinstance(expected, Tensor):
        actual, expected = (actual,), (expected,)
    for ours, theirs in zip(actual, expected, strict=True):
        assert ours.shape == theirs.shape, (op, ours.shape, theirs.shape)
        assert ours.dtype == theirs.dtype, (op, ours.dtype, theirs.dtype)
        error = (ours.double() - theirs.double()).norm()
        size = theirs.double().norm()
        if op == "activation":  # the reference loses digits of small results to cancellation
            size = torch.maximum(size, arguments[0].double().norm())
        bound = ROUNDINGS.get(op, 1) * TOLERANCE[ours.dtype] * size
        assert error <= bound, (op, arguments[0].shape, arguments[0].dtype, float(error / bound))


def cases() -> Iterator[tuple[torch.dtype, int, int]]:
    """Yields every shape in every dtype; half dtypes in the slow interpreter at an odd size only.

    Sizes change what is masked, dtypes what is rounded, independently of each other.
    """
    for dtype in DTYPES:
        few = DEVICE == "cpu" and dtype != torch.float32
        for tokens, hidden in (ODD,) if few else SHAPES:
            yield dtype, tokens, hidden


def check_norms() -> None:
    for dtype, tokens, hidden in cases():
        x, residual = normal(tokens, hidden, dtype=dtype), normal(tokens, hidden, dtype=dtype)
        weight, bias = normal(hidden), normal(hidden)
        for variant in ("rms", "gemma"):
            facts = {"attrs.variant": variant}
            compare("rmsnorm", "torch.rmsnorm", x, weight, EPS, facts=facts)
            compare("rmsnorm_add", "torch.rmsnorm_add", x, residual, weight, EPS, facts=facts)
        if hidden > 1:
            compare("layernorm", "torch.layernorm", x, weight, bias, EPS)
            compare("layernorm", "torch.layernorm", x, weight, None, EPS)
            for shift in (bias, None):
                compare(
                    "layernorm_add", "torch.layernorm_add", x, normal(*x.shape, dtype=dtype),
                    weight, shift, EPS,
                )  # fmt: skip
        compare("rmsnorm_silu_mul", "torch.rmsnorm_silu_mul", x, residual, weight, EPS)


def check_extreme_rows() -> None:
    x = torch.zeros(3, 64, device=DEVICE)
    x[1], x[2] = 3e18, 1e-20
    x = torch.cat((x, normal(2, 64)))
    weight = normal(64)
    for variant in ("rms", "gemma"):
        compare("rmsnorm", "torch.rmsnorm", x, weight, EPS, facts={"attrs.variant": variant})
    mixed = normal(4, 33, dtype=torch.bfloat16), normal(4, 33), normal(33)
    compare("rmsnorm_add", "torch.rmsnorm_add", *mixed, EPS, facts={"attrs.variant": "gemma"})
    empty = torch.empty(0, 8, device=DEVICE)
    out = run("triton.rmsnorm", (empty, weight[:8], EPS), {"attrs.variant": "rms"})
    assert out.shape == (0, 8)


def check_channels() -> None:
    options = {"channel_first": True, "compute_dtype": torch.float32}
    for dtype in DTYPES:
        for shape in ((1, 1, 1), (2, 5, 3, 4), (1, 96, 2, 7, 5), (2, 33, 130)):
            x = torch.randn(shape, generator=GENERATOR).to(dtype).to(DEVICE)
            x[:, :, 0] = 0
            weight, bias = normal(shape[1]), normal(shape[1])
            for offset in (None, bias):
                compare(
                    "channel_l2_norm", "torch.channel_l2_norm", x, weight, offset, 1e-12, **options
                )


def check_adaptive() -> None:
    for dtype, tokens, hidden in cases():
        x, residual = normal(tokens, hidden, dtype=dtype), normal(tokens, hidden, dtype=dtype)
        for modulation in (normal(1, 3 * hidden), normal(tokens, 3 * hidden), normal(3 * hidden)):
            compare("adarmsnorm", "torch.adarmsnorm", x, modulation, EPS)
            for gate in (normal(1, hidden, dtype=dtype), normal(tokens, hidden)):
                compare(
                    "adarmsnorm_add",
                    "torch.adarmsnorm_add",
                    x,
                    residual,
                    gate,
                    modulation,
                    EPS,
                )
        batched = normal(2, tokens, hidden, dtype=dtype)
        compare("adarmsnorm", "torch.adarmsnorm", batched, normal(2, 1, 3 * hidden), EPS)


def check_modulate() -> None:
    for dtype, tokens, hidden in cases():
        x = normal(2, tokens, hidden, dtype=dtype)
        for shape in ((2, hidden), (2, 1, hidden), (1, tokens, hidden), (2, tokens, hidden)):
            scale, shift = normal(*shape, dtype=dtype), normal(*shape, dtype=dtype)
            compare("modulate", "torch.modulate", x, scale, shift)


def check_activations() -> None:
    for dtype, tokens, hidden in cases():
        for kind in ("gelu", "gelu_tanh", "silu", "relu2"):
            x = normal(tokens, hidden, dtype=dtype)
            facts = {"attrs.activation": kind, "attrs.gated": False}
            compare("activation", f"torch.activation.{kind}", 3 * x, facts=facts)
            both = normal(2, tokens, 2 * hidden, dtype=dtype)
            facts["attrs.gated"] = True
            compare("activation", f"torch.activation.{kind}_and_mul", both, facts=facts)
    ends = torch.tensor([[-3e38, -100.0, -0.0, 0.0, 100.0, 3e4]], device=DEVICE)
    for kind in ("gelu", "gelu_tanh", "silu"):
        out = run("triton.activation", (ends,), {"attrs.activation": kind, "attrs.gated": False})
        assert torch.equal(out[0, :2].abs(), torch.zeros(2, device=DEVICE)), (kind, out)
        assert torch.equal(out[0, 4:], ends[0, 4:]), (kind, out)
    squared = torch.tensor([[0.0, 0.0, 0.0, 0.0, 1e4, 9e8]], device=DEVICE)
    out = run("triton.activation", (ends,), {"attrs.activation": "relu2", "attrs.gated": False})
    assert torch.equal(out, squared), out


def check_embedding() -> None:
    for dtype in DTYPES:
        for width in (1, 33, 1500):
            weight = normal(11, width, dtype=dtype)
            for ids in (torch.tensor([[3, 20, 5], [14, 4, 15]]), torch.tensor([7])):
                compare("embedding", "torch.embedding", ids.to(DEVICE), weight, 4, 15)


def check_rope() -> None:
    positions = torch.tensor([3, 1, 19, 0, 7]).to(DEVICE)
    for dtype in DTYPES:
        for head_dim, rotary in ((2, 2), (24, 16), (72, 72), (128, 128)):
            q, k = normal(5, 3, head_dim, dtype=dtype), normal(5, 1, head_dim, dtype=dtype)
            cache = torch.randn(20, rotary, generator=GENERATOR).to(DEVICE)
            for interleave in (False, True):
                facts = {"attrs.interleave": interleave}
                compare("rope", "eager.rope", positions, q, k, cache, facts=facts)


def check_qk_norm() -> None:
    """Queries against the reference, and that just the given slots are written."""
    op = "qk_norm_rope_append"
    for dtype in DTYPES:
        for heads_q, heads_k, head_dim in ((3, 1, 16), (4, 2, 64), (2, 2, 128)):
            qkv = normal(5, (heads_q + 2 * heads_k) * head_dim, dtype=dtype)
            qkv[1], qkv[2] = 0, 1e4
            weights = normal(head_dim), normal(head_dim).to(dtype)
            angles = torch.rand(5, head_dim // 2, generator=GENERATOR).to(DEVICE) * 6
            slots = torch.tensor([7, 3, 0, 8, 5]).to(DEVICE)
            for variant in ("rms", "rms_cast"):
                stored = []
                for row in (f"triton.{op}", f"torch.{op}"):
                    shape = (11, 2, heads_k, head_dim)
                    caches = torch.full(shape, torch.nan, dtype=dtype, device=DEVICE).unbind(1)
                    rotation = torch.cat((angles.cos(), angles.sin()), 1)
                    arguments = (qkv, *weights, rotation, slots, *caches, EPS)
                    stored.append((run(row, arguments, {"attrs.variant": variant}), *caches))
                for ours, theirs in zip(*stored, strict=True):
                    assert torch.equal(ours.isnan(), theirs.isnan()), (op, dtype)
                    error = (ours.nan_to_num().double() - theirs.nan_to_num().double()).norm()
                    bound = 2 * TOLERANCE[dtype] * theirs.nan_to_num().double().norm()
                    assert error <= bound, (op, variant, dtype, float(error / bound))


def check_qk_norm_items() -> None:
    """Queries of several items are the same numbers with the tokens of a head side by side."""
    heads_q, heads_k, head_dim = 4, 2, 64
    qkv = normal(6, (heads_q + 2 * heads_k) * head_dim, dtype=torch.float32)
    weight, slots = normal(head_dim), torch.arange(6).to(DEVICE)
    caches = torch.zeros(2, 6, heads_k, head_dim, device=DEVICE)
    rotation = normal(6, head_dim)
    for row in ("triton.qk_norm_rope_append", "torch.qk_norm_rope_append"):
        arguments = (qkv, weight, weight, rotation, slots, *caches, EPS)
        facts = {"attrs.variant": "rms"}
        expected = run(row, arguments, facts)
        for items in (1, 2, 6):
            found = run(row, (*arguments, items), facts)
            assert torch.equal(found.flatten(0, 1), expected), (row, items)
            assert found.transpose(1, 2).is_contiguous(), (row, items)


def check_join_heads() -> None:
    for dtype in DTYPES:
        for heads, width in ((3, 16), (32, 128), (40, 128)):
            parts = [normal(tokens, heads, width, dtype=dtype) for tokens in (5, 0, 2)]
            parts[2] = parts[2].transpose(0, 1).contiguous().transpose(0, 1)
            found = run("triton.join_heads", (parts,), {})
            assert torch.equal(found, run("torch.join_heads", (parts,), {})), (heads, width)
            assert found.is_contiguous()


def check_causal_conv() -> None:
    for dtype in DTYPES:
        for tokens, channels, taps in ((1, 1, 1), (17, 300, 4), (33, 7, 8)):
            x, weight = normal(tokens, channels, dtype=dtype), normal(channels, taps, dtype=dtype)
            sizes = [channels - channels // 2, channels // 2]
            for activation in ("none", "silu"):
                facts = {"attrs.activation": activation}
                compare("causal_conv", "torch.causal_conv", x, weight, sizes, facts=facts)


if __name__ == "__main__":
    check_norms()
    check_extreme_rows()
    check_channels()
    check_adaptive()
    check_modulate()
    check_activations()
    check_embedding()
    check_rope()
    check_qk_norm()
    check_qk_norm_items()
    check_join_heads()
    check_causal_conv()
    fp8_checks.run()
    print("kernel checks passed")
