"""Sparse Piper attention on Hopper: the kernel against its emulation, the contract and itself."""

import pytest
import routed_emulation
import torch
from process_state import no_synchronization
from routed_cases import EXACT_ERROR, MAX_ERROR, MEAN_ERROR, case, case_of, relative

from piper_kernels import SparsePiperAttention
from piper_kernels.attention.sparse_piper_attention._hopper import HopperBackend
from piper_kernels.attention.sparse_piper_attention._routing import RoutingMode


def _reason():
    if not torch.cuda.is_available():
        return "needs a CUDA device"
    return HopperBackend().support(torch.device("cuda"), 64)[1]


pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(bool(_reason()), reason=_reason()),
    pytest.mark.usefixtures("nan_filled_memory"),
]
LENGTHS = [64, 65, 127, 129, 193, 1001, 8193]
WIDTHS = pytest.mark.parametrize("head_dim", [64, 128], ids=["D64", "D128"])
BACKEND = HopperBackend()


def prepared_attention(c, dtype=torch.float32, **options):
    operands = (c.prepared, c.summaries, c.request, c.rows, c.lengths, dtype)
    return BACKEND.attention_from_quantized(*operands, **options)


def call(c, dtype=torch.bfloat16):
    units = c.request.units
    module = SparsePiperAttention([u / 1e6 for u in units], routing=c.request.mode.name.lower())
    return module(
        *(x.to(dtype) for x in c.operands),
        sparse_key_blocks=c.request.sparse_key_blocks,
        sparse_query_blocks=c.request.sparse_query_blocks,
        block_lengths=c.lengths,
    )


@WIDTHS
@pytest.mark.parametrize("rows", LENGTHS)
def test_lengths(rows, head_dim):
    c = case(rows, 4, 2, head_dim, batch=2, keep=0.4, device="cuda", dtype=torch.bfloat16)
    for found in (prepared_attention(c), call(c)):
        assert found.isfinite().all()
        assert relative(found, c.existing(c.reference())) < EXACT_ERROR
    error = (prepared_attention(c) - c.existing(c.reference())).abs()
    assert error.mean() < MEAN_ERROR
    assert error.max() < MAX_ERROR
    if rows < 2000:
        assert relative(call(c), c.exact()) < EXACT_ERROR


@WIDTHS
def test_a_very_long_sequence(head_dim):
    c = case(131_073, 2, 1, head_dim, keep=0.01, device="cuda", dtype=torch.bfloat16)
    expected = c.existing(c.reference())
    for found in (prepared_attention(c), call(c)):
        assert found.isfinite().all()
        assert relative(found, expected) < EXACT_ERROR


@WIDTHS
@pytest.mark.parametrize(
    "options",
    [
        {"rows": 449, "keep": 0.3, "blocks": 5, "routed": 4},
        {"rows": 449, "keep": 0.3, "blocks": 5, "routed": 0},
        {"rows": 512, "keep": 0.4, "lengths": [64, 17, 1, 33, 64, 64, 2, 63]},
        {"rows": 321, "keep": 1.0},
    ],
    ids=str,
)
def test_the_kernel_computes_what_is_emulated(options, head_dim):
    c = case(**options, heads=4, kv_heads=2, head_dim=head_dim)
    wanted = c.existing(routed_emulation.attend(c.prepared, c.request, c.routes, c.rows, c.lengths))
    on_gpu = c.cuda()
    found = on_gpu.existing(prepared_attention(on_gpu)).cpu()
    # Approximate powers of two move codes at ties only.
    assert relative(found, wanted) < 2e-3


@pytest.mark.parametrize(
    ("dtype", "mode", "head_dim"),
    [
        (torch.float16, RoutingMode.MINMAX, 128),
        (torch.bfloat16, RoutingMode.MEAN, 64),
        (torch.float32, RoutingMode.MEAN, 128),
        (torch.float32, RoutingMode.MINMAX, 64),
    ],
    ids=str,
)
def test_dtypes_and_routings(dtype, mode, head_dim):
    c = case(321, 2, 2, head_dim, keep=0.5, mode=mode, device="cuda", dtype=dtype)
    found = call(c, dtype)
    assert found.dtype == dtype
    assert found.is_contiguous()
    assert relative(found, c.exact()) < EXACT_ERROR


@pytest.mark.parametrize(
    ("amplitude", "value_amplitude"), [(1e-6, 1e-6), (4, 1), (6e4, 1), (1, 6e4)], ids=str
)
def test_any_amplitude(amplitude, value_amplitude):
    c = case(
        1001,
        2,
        1,
        128,
        keep=0.5,
        amplitude=amplitude,
        value_amplitude=value_amplitude,
        device="cuda",
    )
    for found in (prepared_attention(c), call(c)):
        assert found.isfinite().all()
    error = (prepared_attention(c) - c.existing(c.reference())).abs() / value_amplitude
    assert error.mean() < MEAN_ERROR
    assert error.max() < MAX_ERROR


def test_views_of_one_projection():
    packed = torch.randn(2, 321, 3, 4, 64, device="cuda", dtype=torch.bfloat16)
    module = SparsePiperAttention([0.4] * 4)
    found = module(*packed.unbind(2), sparse_key_blocks=5)
    copies = [x.contiguous() for x in packed.unbind(2)]
    assert torch.equal(found, module(*copies, sparse_key_blocks=5))


@pytest.mark.parametrize("groups", [1, 2, 7, 16])
def test_grouped_heads_equal_repeated_heads(groups):
    c = case(321, 2 * groups, 2, 64, keep=0.5, device="cuda")
    query, key, value = c.operands
    key, value = (x.repeat_interleave(groups, dim=2) for x in (key, value))
    assert torch.equal(call(c), call(case_of(query, key, value, keep=0.5)))


def test_constant_values_are_exact():
    query, key, value = case(321, device="cuda").operands
    value = value.bfloat16()[:, :1].expand(value.shape)
    module = SparsePiperAttention([0.4, 1.0])
    found = module(query.bfloat16(), key.bfloat16(), value, sparse_key_blocks=5)
    assert torch.equal(found, value.repeat_interleave(2, dim=2))


@WIDTHS
def test_a_range_is_a_slice_and_the_coarse_output_is_added_once(head_dim):
    c = case(449, 4, 2, head_dim, keep=0.5, blocks=6, device="cuda", batch=2)
    whole = prepared_attention(c)
    part = prepared_attention(c, query_block_offset=2, query_block_count=3)
    assert torch.equal(part, whole[:, 128:320])
    assert torch.equal(prepared_attention(c, query_block_offset=5), whole[:, 320:])
    coarse = torch.randn(2, 4, 8, head_dim, device="cuda")
    gate = torch.randn(2, 449, 4, 2 * head_dim, device="cuda")[..., :head_dim]
    options = {"coarse_output": coarse, "coarse_gate": gate}
    found = prepared_attention(c, **options)
    added = coarse.repeat_interleave(64, dim=2)[:, :, :449].transpose(1, 2) * gate
    torch.testing.assert_close(found, whole + added, rtol=1e-5, atol=1e-6)
    part = prepared_attention(c, **options, query_block_offset=3, query_block_count=2)
    assert torch.equal(part, found[:, 192:320])
    brain = prepared_attention(c, torch.bfloat16, **options)
    assert torch.equal(brain, found.to(torch.bfloat16))


@WIDTHS
def test_full_keep_equals_the_scored_path(head_dim):
    c = case(449, 2, 1, head_dim, keep=1.0, blocks=6, device="cuda")
    from piper_kernels.attention._preparation.routes import route_table, select_routes
    from piper_kernels.attention._sm90_kernels.routed_launch import Routes, attend, tile_sums

    table = route_table(c.request.layout, c.routes.device)
    routes = select_routes(c.summaries, c.request.mode, c.request.layout, 8, table)
    scored = attend(
        c.prepared,
        tile_sums(c.prepared.value),
        Routes(routes, table, 6),
        c.rows,
        None,
        torch.float32,
    )
    assert torch.equal(scored, prepared_attention(c))


@WIDTHS
def test_nothing_synchronizes_and_a_replay_equals_eager(head_dim):
    module = SparsePiperAttention([0.4, 0.7])
    live = [x.bfloat16() for x in case(449, 2, 1, head_dim, device="cuda").operands]
    eager = module(*live, sparse_key_blocks=6)
    with no_synchronization():
        module(*live, sparse_key_blocks=6)
    inputs = [torch.zeros_like(x) for x in live]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = module(*inputs, sparse_key_blocks=6)
    for destination, source in zip(inputs, live, strict=True):
        destination.copy_(source)
    for _ in range(3):
        graph.replay()
        assert torch.equal(captured, eager)


def test_lengths_and_budgets_do_not_compile_again():
    from piper_kernels.attention._sm90_kernels.routed import routed_attention_kernel

    module = SparsePiperAttention([0.4, 0.7])
    compiled = torch.compile(module, dynamic=True, fullgraph=True)

    def run(rows, blocks):
        operands = [x.bfloat16() for x in case(rows, 2, 1, device="cuda").operands]
        found = compiled(*operands, sparse_key_blocks=blocks)
        assert torch.equal(found, module(*operands, sparse_key_blocks=blocks))

    run(320, 4)
    kernels = sum(len(cache[0]) for cache in routed_attention_kernel.device_caches.values())
    torch._dynamo.config.error_on_recompile = True
    try:
        run(449, 6)
        run(577, 5)
    finally:
        torch._dynamo.config.error_on_recompile = False
    assert kernels == sum(len(c[0]) for c in routed_attention_kernel.device_caches.values())
