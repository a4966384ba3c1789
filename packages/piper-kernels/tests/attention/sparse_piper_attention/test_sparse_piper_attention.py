"""What the attention computes, against loops in float64."""

import copy
import pickle

import pytest
import slow_attention
import torch

from piper_kernels.attention.sparse_piper_attention import SparsePiperAttention, reference
from piper_kernels.attention.sparse_piper_attention._blocks import valid_rows
from piper_kernels.attention.sparse_piper_attention._routing import RoutingMode, RoutingRequest

ORACLE_ERROR = 2e-3  # relative L2: FP32 moves a code at a tie, nothing else
QUANTIZATION_ERROR = 0.025
CLOSE = {"rtol": 1e-4, "atol": 1e-5}
RATIOS = (0.34, 0.67, 1.0, 0.5)


def tensors(rows, heads=4, kv_heads=2, features=64, dtype=torch.float32, seed=1, batch=1):
    generator = torch.Generator().manual_seed(seed)
    shapes = [(batch, rows, n, features) for n in (heads, kv_heads, kv_heads)]
    return [torch.randn(shape, generator=generator).to(dtype) for shape in shapes]


def relative(found, expected):
    found, expected = found.double(), expected.double()
    return float((found - expected).norm() / expected.norm())


def existing(output, lengths):
    if lengths is None:
        return output
    return output[:, (torch.arange(64) < lengths[:, None]).flatten()]


@pytest.fixture(autouse=True)
def unwritten_rows_are_nan():
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("routing", ["minmax", "mean"])
@pytest.mark.parametrize(
    ("rows", "blocks", "lengths", "routed"),
    [
        (64, 1, None, None),
        (65, 1, None, 0),
        (127, 1, None, 1),
        (129, 2, None, None),
        (193, 2, None, 3),
        (193, 3, None, None),
        (256, 3, [64, 17, 51, 1], None),
        (256, 4, [1, 64, 63, 33], 2),
    ],
)
@pytest.mark.parametrize("features", [64, 128])
def test_equals_the_loops(rows, blocks, lengths, routed, routing, features):
    operands = tensors(rows, features=features)
    lengths = None if lengths is None else torch.tensor(lengths, dtype=torch.int32)
    attention = SparsePiperAttention(RATIOS, routing=routing)
    found = attention(
        *operands,
        sparse_key_blocks=blocks,
        sparse_query_blocks=routed,
        block_lengths=lengths,
    )
    expected = slow_attention.attention(
        *operands, RATIOS, blocks, routing=routing, lengths=lengths, routed=routed
    )
    assert torch.isfinite(existing(found, lengths)).all()
    assert relative(existing(found, lengths), existing(expected, lengths)) < ORACLE_ERROR


@pytest.mark.parametrize("routing", ["minmax", "mean"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_quantization_costs_little(dtype, routing):
    operands = tensors(192, 2, 2, 128, dtype)
    attention = SparsePiperAttention((0.5, 1.0), routing=routing)
    found = attention(*operands, sparse_key_blocks=2)
    request = RoutingRequest((500_000, 1_000_000), 2, RoutingMode[routing.upper()])
    exact = reference.exact_sparse_attention(*operands, request, 128**-0.5)
    assert found.dtype == dtype
    assert found.is_contiguous()
    assert relative(found, exact) < QUANTIZATION_ERROR


@pytest.mark.parametrize(("rows", "lengths"), [(1001, None), (256, [64, 17, 51, 1])])
def test_biased_keys_and_values_equal_the_loops(rows, lengths):
    """Padded rows must not widen the scales, as the negated mean would."""
    query, key, value = tensors(rows)
    key, value = key + 20, value - 20
    lengths = None if lengths is None else torch.tensor(lengths, dtype=torch.int32)
    found = SparsePiperAttention(RATIOS, routing="mean")(
        query, key, value, sparse_key_blocks=3, block_lengths=lengths
    )
    expected = slow_attention.attention(
        query, key, value, RATIOS, 3, routing="mean", lengths=lengths
    )
    found, expected = existing(found, lengths) + 20, existing(expected, lengths) + 20
    assert relative(found, expected) < 2 * ORACLE_ERROR


def test_the_exact_attention_is_softmax_along_the_routes():
    query, key, value = tensors(193)
    request = RoutingRequest(tuple(round(r * 10**6) for r in RATIOS), 3, RoutingMode.MEAN, 3)
    found = reference.exact_sparse_attention(query, key, value, request, 0.2)
    kept = slow_attention.routes(query, key, RATIOS, 3, "mean", None)
    for (b, h, i), routed in kept.items():
        tiles = [*routed, 3] if i < 3 else range(4)
        rows = [row for t in tiles for row in range(64 * t, min(64 * t + 64, 193))]
        q, k, v = (x.double() for x in (query[b, 64 * i : 64 * i + 64, h], key[b, rows, h // 2],
                                        value[b, rows, h // 2]))  # fmt: skip
        expected = (q @ k.T * 0.2).softmax(-1) @ v
        torch.testing.assert_close(found[b, 64 * i : 64 * i + 64, h].double(), expected, **CLOSE)


def test_the_scale_is_used():
    operands = tensors(129)
    attention = SparsePiperAttention(RATIOS)
    default = attention(*operands, sparse_key_blocks=2)
    assert torch.equal(default, attention(*operands, sparse_key_blocks=2, scale=64**-0.5))
    scaled = (operands[0] * 4, *operands[1:])
    other = attention(*operands, sparse_key_blocks=2, scale=4 * 64**-0.5)
    assert relative(other, default) > 0.1
    assert relative(other, attention(*scaled, sparse_key_blocks=2)) < 1e-3


@pytest.mark.parametrize("lengths", [None, [64, 17, 64, 9]])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_constant_values_are_exact(dtype, lengths):
    rows = 227 if lengths is None else 256
    query, key, value = tensors(rows, dtype=dtype)
    value = value[:, :1].expand(value.shape)
    lengths = None if lengths is None else torch.tensor(lengths, dtype=torch.int32)
    found = SparsePiperAttention(RATIOS)(
        query, key, value, sparse_key_blocks=3, block_lengths=lengths
    )
    expected = value.repeat_interleave(2, dim=2)
    assert torch.equal(existing(found, lengths), existing(expected, lengths))


@pytest.mark.parametrize("routing", ["minmax", "mean"])
@pytest.mark.parametrize("groups", [1, 2, 3, 7, 8, 16])
def test_grouped_heads_equal_repeated_heads(groups, routing):
    query, key, value = tensors(227, 2 * groups, 2)
    repeated = [x.repeat_interleave(groups, dim=2) for x in (key, value)]
    for ratio, rows, lengths in ((0.4, 227, None), (1.0, 227, None), (0.4, 192, [64, 3, 50])):
        attention = SparsePiperAttention([ratio] * (2 * groups), routing=routing)
        options = {"sparse_key_blocks": 3}
        if lengths is not None:
            options["block_lengths"] = torch.tensor(lengths, dtype=torch.int32)
        cut = [x[:, :rows] for x in (query, key, value, *repeated)]
        assert torch.equal(attention(*cut[:3], **options), attention(cut[0], *cut[3:], **options))


@pytest.mark.parametrize("amplitude", [1e-6, 1e-3, 1.0, 1e3, 6e4])
def test_amplitudes(amplitude):
    operands = [(x.clamp(-1, 1) * amplitude).half() for x in tensors(193)]
    found = SparsePiperAttention(RATIOS)(*operands, sparse_key_blocks=2)
    assert torch.isfinite(found).all()
    if amplitude >= 1e-3:  # below, the floor of the scales dominates
        expected = slow_attention.attention(*operands, RATIOS, 2)
        assert relative(found, expected) < 5e-3


def test_copies_compute_the_same():
    operands = tensors(129)
    attention = SparsePiperAttention(RATIOS, routing="mean")
    assert not attention.state_dict()
    expected = attention(*operands, sparse_key_blocks=2)
    assert not attention.state_dict(), "a call left something behind"
    for other in (copy.deepcopy(attention), pickle.loads(pickle.dumps(attention)).half()):
        assert (other.head_keep_ratios, other.routing) == (RATIOS, "mean")
        assert torch.equal(other(*operands, sparse_key_blocks=2), expected)


def test_zero_operands():
    zeros = [torch.zeros_like(x) for x in tensors(129)]
    assert torch.equal(SparsePiperAttention(RATIOS)(*zeros, sparse_key_blocks=2), zeros[0])


def test_strides_do_not_matter():
    packed = tensors(193, 12, 1)[0]
    sliced = packed.split((4, 4, 4), dim=2)
    attention = SparsePiperAttention(RATIOS)
    expected = attention(*(x.contiguous() for x in sliced), sparse_key_blocks=2)
    assert torch.equal(attention(*sliced, sparse_key_blocks=2), expected)
    transposed = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in sliced]
    found = attention(*transposed, sparse_key_blocks=2)
    assert found.is_contiguous()
    assert torch.equal(found, expected)


def test_sequences_do_not_influence_each_other():
    operands = tensors(129, batch=3)
    attention = SparsePiperAttention(RATIOS)
    found = attention(*operands, sparse_key_blocks=2)
    for index in range(3):
        alone = attention(*(x[index : index + 1] for x in operands), sparse_key_blocks=2)
        torch.testing.assert_close(found[index : index + 1], alone)
    assert attention(*(x[:0] for x in operands), sparse_key_blocks=2).shape == (0, 129, 4, 64)


def test_rows_that_do_not_exist_do_not_matter():
    lengths = torch.tensor([64, 17, 51], dtype=torch.int32)
    operands = tensors(192)
    attention = SparsePiperAttention(RATIOS)
    options = {"sparse_key_blocks": 2, "block_lengths": lengths}
    expected = existing(attention(*operands, **options), lengths)
    padded = ~(torch.arange(64) < lengths[:, None]).flatten()
    for filler in (1e4, torch.nan):
        for operand in operands:
            operand[:, padded] = filler
        assert torch.equal(existing(attention(*operands, **options), lengths), expected)


def test_values_that_are_not_finite_reach_the_output():
    query, key, value = tensors(129)
    query[0, 5, 0, 3] = torch.nan
    found = SparsePiperAttention(RATIOS)(query, key, value, sparse_key_blocks=2)
    assert found[0, 5, 0].isnan().all()
    assert not found[0, :, 1:].isnan().any()


def test_chunks_of_query_blocks(monkeypatch):
    operands = tensors(321)
    attention = SparsePiperAttention(RATIOS)
    options = {"sparse_key_blocks": 4, "sparse_query_blocks": 3}
    expected = attention(*operands, **options)
    monkeypatch.setattr(reference, "TILES_TOGETHER", 12)
    assert torch.equal(attention(*operands, **options), expected)


def test_valid_rows():
    assert valid_rows(128, None, torch.device("cpu")) is None
    ragged = valid_rows(70, None, torch.device("cpu"))
    assert ragged.sum(1).tolist() == [64, 6]
    lengths = torch.tensor([3, 64], dtype=torch.int32)
    assert valid_rows(128, lengths, torch.device("cpu")).sum(1).tolist() == [3, 64]


@pytest.mark.parametrize(("rows", "kept"), [(8193, 1), (32_769, 5)])
def test_long_sequences_follow_their_routes(rows, kept):
    """One percent of the blocks by the means in FP64, and the row behind them."""
    blocks = rows // 64
    operands = tensors(rows, heads=1, kv_heads=1)
    attention = SparsePiperAttention([0.01], routing="mean")
    found = attention(*operands, sparse_key_blocks=blocks)[0, :, 0]
    query, key, value = (x[0, :, 0].double() for x in operands)
    means = key[: 64 * blocks].unflatten(0, (blocks, 64)).mean(1)
    suffix = torch.arange(64 * blocks, rows)
    compared, exact = [], []
    for block in (0, blocks // 2, blocks - 1, blocks):
        here = slice(64 * block, min(64 * block + 64, rows))
        best = (means @ query[here].mean(0)).topk(kept).indices.sort().values
        index = torch.cat([(64 * best[:, None] + torch.arange(64)).flatten(), suffix])
        scores = query[here] @ key[index].mT / 8
        exact.append(scores.softmax(-1) @ value[index])
        compared.append(found[here])
    assert found.isfinite().all()
    assert relative(torch.cat(compared), torch.cat(exact)) < QUANTIZATION_ERROR
