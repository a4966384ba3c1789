"""Numerics of the loops in plain Triton, run as a script: in the interpreter or on a device.

TRITON_INTERPRET=1 python mixed_sign_checks.py          # the affine form of the products
python mixed_sign_checks.py cuda                        # the mixed-sign products
"""

import sys
from dataclasses import replace

import torch

from piper_kernels.attention._mixed_sign._launch import attend, attend_fp8, attend_sparse
from piper_kernels.attention._mixed_sign.plan import AttentionPlan, Product
from piper_kernels.attention._quantization import Granularity
from piper_kernels.attention.piper_attention import _mixed_sign as piper_backend
from piper_kernels.attention.piper_attention import prepared
from piper_kernels.attention.piper_attention import reference as piper
from piper_kernels.attention.sage_attention_2pp import reference as sage
from piper_kernels.attention.sparse_piper_attention import _mixed_sign as sparse_backend
from piper_kernels.attention.sparse_piper_attention import _preparation, reference
from piper_kernels.attention.sparse_piper_attention._blocks import to_blocks, valid_rows
from piper_kernels.attention.sparse_piper_attention._routing import RoutingRequest

DEVICE = sys.argv[1] if len(sys.argv) > 1 else "cpu"
INTERPRETED = DEVICE == "cpu"
PRODUCT = Product.AFFINE if INTERPRETED else Product.NVIDIA
# Codes are rounded half up here and half to even there.
MEAN_ERROR, MAX_ERROR = 1e-4, 5e-3
WINDOW = 128  # first query of the window that is compared with the whole


def random(*shape, dtype=torch.float32, factor=1.0, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(shape, generator=generator) * factor).to(dtype).to(DEVICE)


def compare(name, actual, expected, scale=1.0):
    error = (actual.float() - expected.float()).abs()
    assert actual.shape == expected.shape, (name, actual.shape, expected.shape)
    assert torch.isfinite(actual).all(), name
    mean, largest = error.mean().item() / scale, error.max().item() / scale
    assert mean < MEAN_ERROR, (name, mean)
    assert largest < MAX_ERROR, (name, largest)


def dense_operands(lengths, head_dim, heads, kv_heads, factor):
    query = random(2, heads, lengths[0], head_dim, factor=factor)
    key = random(2, kv_heads, lengths[1], head_dim, factor=factor, seed=1) + 3
    value = random(2, kv_heads, lengths[1], head_dim, seed=2) * torch.logspace(
        -2, 1, lengths[1], device=DEVICE
    ).unsqueeze(-1)
    return query, key, value


def check_dense(lengths, head_dim, plan, *, is_causal=False, heads=2, kv_heads=1, factor=1.0):
    query, key, value = dense_operands(lengths, head_dim, heads, kv_heads, factor)
    operands = prepared.prepare(
        query,
        key,
        value,
        scale=head_dim**-0.5,
        is_causal=is_causal,
        granularity=plan.granularity,
        padded=True,
        derive_log_bound=plan.derive_value_log_bound,
    )
    kv = operands.key_value
    sizes = {"query_length": lengths[0], "key_length": lengths[1], "is_causal": is_causal}
    expected = prepared.attend(operands, **sizes)
    actual = attend(
        operands.query_codes,
        operands.query_scale,
        kv.key_codes,
        kv.key_scale,
        kv.value_codes,
        kv.value_multiplier,
        kv.value_mean,
        **sizes,
        dtype=torch.float32,
        plan=plan,
    )
    compare(f"dense {lengths} {plan} {factor}", actual, expected, value.abs().max().item())
    if lengths[0] > WINDOW:
        check_dense_window(operands, actual, plan, sizes)


def check_dense_window(operands, whole, plan, sizes):
    """The last queries, written between the heads of others, are those of the whole."""
    kv, rows = operands.key_value, whole.shape[2] - WINDOW
    per_row = plan.granularity.query.groups > 1
    first = WINDOW if per_row else WINDOW // 32
    room = torch.full((1, rows, whole.shape[1], whole.shape[3]), float("nan"), device=DEVICE)
    attend(
        operands.query_codes[:1, :, WINDOW:].contiguous(),
        operands.query_scale[:1, :, first:].contiguous(),
        kv.key_codes,
        kv.key_scale,
        kv.value_codes,
        kv.value_multiplier,
        kv.value_mean,
        **sizes | {"query_length": rows},
        dtype=torch.float32,
        plan=plan,
        origin=WINDOW,
        out=room.transpose(1, 2),
    )
    assert torch.equal(room.transpose(1, 2), whole[:1, :, WINDOW:])


def check_fp8(lengths, head_dim, plan, *, is_causal=False):
    query, key, value = dense_operands(lengths, head_dim, 2, 2, 1.0)
    scale = head_dim**-0.5
    o = sage.prepare(query, key, value, granularity=plan.granularity)
    expected = sage.attend(o, scale=scale, is_causal=is_causal)
    stored = prepared.prepare(
        query, key, value, scale=scale, granularity=plan.granularity, padded=True
    )
    keys = stored.key_value.key_codes.shape[2]
    codes = torch.zeros(2, 2, head_dim, keys, dtype=torch.uint8, device=DEVICE)
    codes[..., : lengths[1]] = o.value_codes.view(torch.uint8).mT
    actual = attend_fp8(
        stored.query_codes,
        stored.query_scale,
        stored.key_value.key_codes,
        stored.key_value.key_scale,
        codes.view(torch.float8_e4m3fn),
        o.value_scale,
        query_length=lengths[0],
        key_length=lengths[1],
        is_causal=is_causal,
        dtype=torch.float32,
        plan=plan,
    )
    # An FP8 code on a tie moves a result by up to a sixteenth of a probability.
    error = (actual - expected).abs() / value.abs().max()
    assert error.mean() < 1e-3, (lengths, error.mean())
    assert error.max() < 0.02, (lengths, error.max())


def check_sparse(rows, head_dim, plan, *, lengths=None, query_blocks=None, window=(0, None)):
    query, key, value = (random(2, rows, h, head_dim, seed=h) for h in (4, 2, 2))
    value = value * torch.logspace(-2, 1, rows, device=DEVICE)[:, None, None]
    blocks = rows // 64
    request = RoutingRequest.of([500_000, 250_000, 900_000, 1], max(blocks - 1, 1), 0, query_blocks)
    if lengths is not None:
        lengths = torch.tensor(lengths, dtype=torch.int32, device=DEVICE)
    valid = valid_rows(rows, lengths, query.device)
    q, k, v = (to_blocks(x, valid) for x in (query, key, value))
    operands = _preparation.prepare(q, k, v, valid, rows, head_dim**-0.5)
    summaries = reference.summarize(q, k, valid, request.mode)
    routes = reference.routes_of(request, summaries, q)
    layout = request.layout
    table = torch.tensor([*layout.keep, *layout.offsets], dtype=torch.int32, device=DEVICE)
    coarse = random(2, 4, q.shape[2], head_dim, seed=7)
    gate = random(2, rows, 4, 2 * head_dim, seed=8)[..., ::2] if lengths is None else None
    gated = {} if gate is None else {"coarse_output": coarse, "coarse_gate": gate}
    expected = reference.attend(operands, request, routes, valid, *window)
    first = window[0] * 64
    expected = expected[:, : rows - first]
    last = first + expected.shape[1]
    if gate is not None:
        rowwise = coarse.repeat_interleave(64, 2)[:, :, first:last].transpose(1, 2)
        expected = expected + gate[:, first:last] * rowwise
    actual = attend_sparse(
        operands,
        request,
        routes,
        table,
        rows=rows,
        block_lengths=lengths,
        dtype=torch.float32,
        plan=plan,
        query_block_offset=window[0],
        query_block_count=window[1],
        **gated,
    )
    if lengths is not None:
        kept = valid.flatten()[first:last]
        actual, expected = actual[:, kept], expected[:, kept]
    compare(f"sparse {rows} {head_dim} {query_blocks}", actual, expected, value.abs().max().item())


def check_sparse_window(plan):
    """The queries of the last blocks by themselves, in given room, are those of the whole."""
    query, key, value = (random(1, 150, h, 64, seed=h) for h in (4, 2, 2))
    request = RoutingRequest.of([500_000, 250_000, 900_000, 1], 2, 0, 2)
    q, k, v = (to_blocks(x, valid_rows(150, None, DEVICE)) for x in (query, key, value))
    operands = _preparation.prepare(q, k, v, valid_rows(150, None, DEVICE), 150, 0.125)
    summaries = reference.summarize(q, k, valid_rows(150, None, DEVICE), request.mode)
    routes = reference.routes_of(request, summaries, q)
    layout = request.layout
    table = torch.tensor([*layout.keep, *layout.offsets], dtype=torch.int32, device=DEVICE)
    known = {"rows": 150, "block_lengths": None, "dtype": torch.float32, "plan": plan}
    coarse, gate = random(1, 4, 3, 64, seed=7), random(1, 150, 4, 64, seed=8)
    gated = {"coarse_output": coarse, "coarse_gate": gate}
    whole = attend_sparse(operands, request, routes, table, **known, **gated)
    some = replace(
        operands,
        query=operands.query[:, :, 64:].contiguous(),
        query_scale=operands.query_scale[:, :, 2:].contiguous(),
    )
    gated = {"coarse_output": coarse[:, :, 1:].contiguous(), "coarse_gate": gate[:, 64:]}
    room = torch.full((1, 86, 4, 64), float("nan"), device=DEVICE)
    later, kept = replace(request, sparse_query_blocks=1), routes[:, 1:].contiguous()
    attend_sparse(some, later, kept, table, **known, **gated, query_rows=86, out=room)
    assert torch.equal(room, whole[:, 64:])


def check_backends(plan):
    """From floating operands, with the kernels that prepare and route, against the references."""
    piper_backend._plan = lambda *_: plan
    sparse_backend._plan = lambda *_: plan
    query, key, value = dense_operands((70, 131), 64, 4, 2, 1.0)
    # A view with free strides, as slices of a packed projection have them.
    key = key.transpose(1, 2).contiguous().transpose(1, 2)
    actual = piper_backend.MixedSignBackend().attention(query, key, value, 0.125, False)
    expected = piper.attention(query, key, value, 0.125, False, granularity=plan.granularity)
    compare_loosely("dense backend", actual, expected, value)
    query, key, value = dense_operands((70, 70), 128, 2, 2, 1.0)
    actual = piper_backend.MixedSignBackend().attention(query, key, value, 0.09, True)
    expected = piper.attention(query, key, value, 0.09, True, granularity=plan.granularity)
    compare_loosely("causal backend", actual, expected, value)
    kv = piper_backend.MixedSignBackend().prepare_key_value(key, value, False)
    wanted = prepared.prepare_key_value(key, value, padded=True)
    assert (kv.value_codes.int() - wanted.value_codes.int()).abs().max() <= 1
    torch.testing.assert_close(kv.value_multiplier, wanted.value_multiplier, rtol=1e-4, atol=1e-6)
    if plan.grouped_qk:
        query, key, value = (random(1, 197, h, 64, seed=h) for h in (4, 2, 2))
        for keep in (1_000_000, 400_000):
            request = RoutingRequest.of([keep] * 4, 2, 0, None)
            operands = (query, key, value, request, 0.125, None)
            actual = sparse_backend.MixedSignBackend().attention(*operands)
            compare_loosely("sparse backend", actual, reference.sparse_attention(*operands), value)


def compare_loosely(name, actual, expected, value):
    """Scales that differ in the last bit move codes by one."""
    error = (actual.float() - expected.float()).abs() / value.abs().max()
    assert actual.shape == expected.shape, name
    assert error.mean() < 1e-3, (name, error.mean())
    assert error.max() < 0.02, (name, error.max())


def main():
    packed = not INTERPRETED
    base = AttentionPlan(64, True, use_packed_probability_conversion=packed, product=PRODUCT)
    rows = replace(base, grouped_qk=False)
    wide = replace(base, block_m=128, split_pv_head_dim=True, derive_value_log_bound=True)
    assert rows.granularity is Granularity.PER_THREAD
    check_dense((65, 131), 64, base)
    check_dense((1, 1), 128, rows, heads=3)
    check_dense((130, 130), 64, rows, is_causal=True)
    check_dense((130, 130), 64, replace(wide, derive_value_log_bound=False), is_causal=True)
    check_dense((70, 64), 128, wide)
    check_dense((65, 100), 64, base, factor=3e3)
    check_fp8((65, 131), 64, rows)
    check_fp8((130, 130), 64, replace(base, block_m=128), is_causal=True)
    check_sparse(64 * 4 + 5, 64, base)
    check_sparse(64 * 5 + 1, 128, base, query_blocks=2, window=(1, 3))
    check_sparse(64 * 4, 64, base, lengths=[64, 3, 17, 64], query_blocks=0)
    check_sparse_window(base)
    check_backends(base)
    check_backends(rows)
    print("kernel checks passed")


main()
