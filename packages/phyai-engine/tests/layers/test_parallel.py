import subprocess
import sys

import pytest
import torch

from phyai.checkpoints import CheckpointError, load_into
from phyai.layers import (
    ColumnParallelLinear,
    Embedding,
    Leg,
    Linear,
    MergedColumnParallelLinear,
    QKVParallelLinear,
    RowParallelLinear,
    TensorParallel,
)
from phyai_quant import Granularity, QDType, QuantConfigError, QuantScheme, TensorQuant

CHANNEL = Granularity.PER_CHANNEL
INT8 = QuantScheme(
    TensorQuant(QDType.INT8, CHANNEL, rotation_group=16),
    TensorQuant(QDType.INT8, CHANNEL, dynamic=True),
    online=True,
)
INT4 = QuantScheme(TensorQuant(QDType.INT4, Granularity.BLOCK, block_shape=(1, 16)), online=True)
SCHEMES = {"plain": None, "convrot": INT8, "int4": INT4}


def loaded(layer, tensors):
    load_into(layer, {name: lambda t=t: t for name, t in tensors.items()}, source="test")
    return layer


def random(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("scheme", SCHEMES.values(), ids=SCHEMES)
@pytest.mark.parametrize("size", [1, 2, 3])
def test_column_parallel_parts_make_the_whole_output(scheme, size):
    tensors = {"p.weight": random(12, 32), "p.bias": random(12, seed=1)}
    options = {"bias": True, "prefix": "p", "scheme": scheme}
    x = random(5, 32, seed=2)
    whole = loaded(Linear(32, 12, **options), tensors)(x)
    parts = [
        loaded(ColumnParallelLinear(32, 12, tp=TensorParallel(rank, size), **options), tensors)(x)
        for rank in range(size)
    ]
    torch.testing.assert_close(torch.cat(parts, -1), whole)


@pytest.mark.parametrize("scheme", [None, INT4], ids=["plain", "int4"])
def test_row_parallel_parts_add_up_with_one_bias(scheme, monkeypatch):
    sums = []
    monkeypatch.setattr(
        torch.distributed, "all_reduce", lambda x, group=None: sums.append((x.clone(), group))
    )
    tensors = {"p.weight": random(7, 64), "p.bias": random(7, seed=1)}
    options = {"bias": True, "prefix": "p", "scheme": scheme}
    x = random(3, 64, seed=2)
    whole = loaded(Linear(64, 7, **options), tensors)(x)
    for rank, part in enumerate(x.chunk(2, -1)):
        tp = TensorParallel(rank, 2, group="pair")
        loaded(RowParallelLinear(64, 7, tp=tp, **options), tensors)(part)
    assert [group for _, group in sums] == ["pair", "pair"]
    torch.testing.assert_close(sums[0][0] + sums[1][0], whole, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("size", [1, 2, 4])
def test_parts_of_a_vocabulary_add_up_to_the_whole_table(size, monkeypatch):
    monkeypatch.setattr(torch.distributed, "all_reduce", lambda x, group=None: x)
    table = random(12, 5)
    ids = torch.tensor([0, 11, 3, 3, 6, 5])
    total = torch.zeros(6, 5)
    for rank in range(size):
        tp = TensorParallel(rank, size)
        layer = Embedding(12, 5, key="e.weight", params_dtype=torch.float32, tp=tp)
        assert layer.weight.shape == (12 // size, 5)
        total += loaded(layer, {"e.weight": table})(ids)
    assert torch.equal(total, table[ids])
    with pytest.raises(ValueError, match="the vocabulary is 12 and cannot be divided among 5"):
        Embedding(12, 5, key="e", params_dtype=torch.float32, tp=TensorParallel(0, 5))
    with pytest.raises(CheckpointError, match=r"e\.weight: .*\(11, 5\), the model needs \(12, 5\)"):
        loaded(layer, {"e.weight": table[1:]})


def test_one_rank_needs_no_process_group():
    layer = RowParallelLinear(8, 3, tp=TensorParallel(), prefix="p")
    loaded(layer, {"p.weight": random(3, 8)})
    assert layer(random(2, 8)).shape == (2, 3)


@pytest.mark.parametrize("scheme", SCHEMES.values(), ids=SCHEMES)
@pytest.mark.parametrize("fused", [False, True])
def test_merged_legs_are_cut_one_by_one(scheme, fused):
    legs = (Leg("gate_proj", 8, 0), Leg("up_proj", 12, 1))
    gate, up = random(8, 32), random(12, 32, seed=1)
    apart = {"mlp.gate_proj.weight": gate, "mlp.up_proj.weight": up}
    together = {"mlp.gate_up_proj.weight": torch.cat([gate, up])}
    options = {"prefix": "mlp.gate_up_proj", "scheme": scheme}
    x = random(3, 32, seed=2)
    whole = loaded(Linear(32, legs, **options), apart)(x)
    layers = [
        MergedColumnParallelLinear(32, legs, tp=TensorParallel(rank, 2), **options)
        for rank in range(2)
    ]
    outs = [loaded(layer, together if fused else apart)(x) for layer in layers]
    gates, ups = zip(*(out.split([4, 6], -1) for out in outs), strict=True)
    torch.testing.assert_close(torch.cat([*gates, *ups], -1), whole)


@pytest.mark.parametrize(("size", "kv_heads"), [(1, 2), (2, 2), (4, 2), (4, 1)])
def test_ranks_share_key_and_value_heads_when_there_are_few(size, kv_heads):
    heads, dim = 8, 3
    q, k, v = (random(n * dim, 16, seed=i) for i, n in enumerate((heads, kv_heads, kv_heads)))
    tensors = {"a.q_proj.weight": q, "a.k_proj.weight": k, "a.v_proj.weight": v}
    tensors |= {
        f"a.{n}_proj.bias": random(w.shape[0], seed=7)
        for n, w in zip("qkv", (q, k, v), strict=True)
    }
    x = random(2, 16, seed=5)
    for rank in range(size):
        layer = QKVParallelLinear(
            16, heads, kv_heads, dim, tp=TensorParallel(rank, size), prefix="a.qkv_proj", bias=True
        )
        assert (layer.heads, layer.kv_heads) == (heads // size, max(kv_heads // size, 1))
        mine = rank * kv_heads // size
        rows = slice(mine * dim, (mine + layer.kv_heads) * dim)
        query = slice(rank * heads // size * dim, (rank + 1) * heads // size * dim)
        expected = [
            x @ w[cut].T + tensors[f"a.{n}_proj.bias"][cut]
            for n, w, cut in (("q", q, query), ("k", k, rows), ("v", v, rows))
        ]
        torch.testing.assert_close(loaded(layer, tensors)(x), torch.cat(expected, -1))


def test_a_plan_reaches_a_parallel_layer_by_class_and_name():
    from phyai_quant import Matcher, QuantPlan, Rule, use_quant_plan

    with use_quant_plan(QuantPlan((Rule(Matcher("module_cls", "Linear"), INT8),))):
        layer = ColumnParallelLinear(32, 4, tp=TensorParallel(1, 2), prefix="p")
    assert layer.spec.spec_id.startswith("convrot_int8")


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: TensorParallel(2, 2), ValueError, "rank is 2; allowed: 0 to size - 1"),
        (
            lambda: ColumnParallelLinear(8, 5, tp=TensorParallel(0, 2), prefix="m.fc"),
            ValueError,
            r"m\.fc: N is 5 and cannot be divided among 2 ranks",
        ),
        (
            lambda: RowParallelLinear(9, 4, tp=TensorParallel(0, 2), prefix="m.fc"),
            ValueError,
            r"m\.fc: K is 9 and cannot be divided",
        ),
        (
            lambda: QKVParallelLinear(8, 6, 2, 4, tp=TensorParallel(0, 4)),
            ValueError,
            "heads is 6 and cannot be divided among 4 ranks",
        ),
        (
            lambda: QKVParallelLinear(8, 6, 2, 4, tp=TensorParallel(0, 3)),
            ValueError,
            "kv_heads is 2 and cannot be divided among 3 ranks",
        ),
        (
            lambda: RowParallelLinear(48, 4, tp=TensorParallel(0, 2), scheme=INT8),
            QuantConfigError,
            "rotation_group",
        ),
    ],
)
def test_bad_cuts_are_refused(make, error, message):
    with pytest.raises(error, match=message):
        make()


def test_a_part_of_a_tensor_is_refused():
    layer = ColumnParallelLinear(8, 4, tp=TensorParallel(0, 2), prefix="p", bias=True)
    with pytest.raises(CheckpointError, match=r"p\.bias: .*shape \(2,\).*needs \(4,\)"):
        loaded(layer, {"p.weight": random(4, 8), "p.bias": random(2)})


def rank_output(rank, store):
    """Joins a group of two processes and returns a layer's output there and the expected one."""
    group = torch.distributed
    group.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    layer = RowParallelLinear(64, 7, tp=TensorParallel(rank, 2), prefix="p", bias=True)
    generator = torch.Generator().manual_seed(0)
    weight, bias, x = (torch.randn(s, generator=generator) for s in ((7, 64), (7,), (3, 64)))
    load_into(layer, {"p.weight": lambda: weight, "p.bias": lambda: bias}, source="test")
    try:
        return layer(x.chunk(2, -1)[rank]), x @ weight.T + bias
    finally:
        group.destroy_process_group()


@pytest.mark.slow
def test_two_processes_sum_their_outputs(tmp_path):
    store, saved = tmp_path / "store", tmp_path / "1.pt"
    code = f"import torch, runpy; me = runpy.run_path({__file__!r}); "
    code += f"torch.save(me['rank_output'](1, {str(store)!r}), {str(saved)!r})"
    other = subprocess.Popen([sys.executable, "-c", code])
    here = rank_output(0, store)
    assert other.wait(timeout=120) == 0
    for found, expected in (here, torch.load(saved)):
        torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)
