"""Copies of arguments for measurements, and arguments that a running model offers."""

import threading
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from phyai.dispatch import CallSite, Selector, policy_from_mapping, set_kernel_selector
from phyai.dispatch.bench_inputs import BenchInputs, InputSets, live_inputs, offered_inputs
from phyai.dispatch.benchmark import ROUNDS, WARM_UPS, InterleavedBenchmark
from phyai.dispatch.catalog import build_catalog
from phyai.layers.attention import CachelessAttention, PagedAttention
from phyai.runtime.paged import PagedKVCache, PagedPlan


def test_sets_exceed_the_cache_and_are_handed_out_in_turn():
    x = torch.arange(16, dtype=torch.float32)
    sets = InputSets(BenchInputs((x,)), cache_bytes=200)
    assert sets.bytes_per_set == 64
    assert (sets.count - 1) * sets.bytes_per_set >= 200
    seen = [sets.next().args[0] for _ in range(sets.count)]
    assert len({value.data_ptr() for value in seen} | {x.data_ptr()}) == sets.count + 1
    assert all(value.data_ptr() % 256 == seen[0].data_ptr() % 256 for value in seen)
    assert sets.next().args[0].data_ptr() == seen[0].data_ptr()


@pytest.mark.parametrize("cache_bytes", [0, 100])
def test_work_in_place_reaches_neither_the_original_nor_the_next_round(cache_bytes):
    x = torch.ones(4)
    sets = InputSets(BenchInputs((x,), {"y": x}), cache_bytes)
    for _ in range(2 * sets.count + 1):
        inputs = sets.next()
        assert inputs.args[0].eq(1).all()
        assert inputs.kwargs["y"].eq(1).all()
        inputs.args[0].add_(1)
    assert x.eq(1).all()


def test_an_input_larger_than_the_cache_has_one_copy():
    sets = InputSets(BenchInputs((torch.ones(1000),)), cache_bytes=100)
    assert sets.count == 1


@pytest.mark.parametrize("kind", ["transposed", "sliced", "expanded", "empty", "fp8"])
def test_copies_keep_values_strides_and_dtype(kind):
    base = torch.randn(6, 8)
    x = {
        "transposed": base.t(),
        "sliced": base[1:, 1:7:2],
        "expanded": base[:, :1].expand(6, 5),
        "empty": base[:0],
        "fp8": base.to(torch.float8_e4m3fn),
    }[kind]
    (copy,) = InputSets(BenchInputs((x,)), cache_bytes=1000).next().args
    assert (copy.shape, copy.stride(), copy.dtype) == (x.shape, x.stride(), x.dtype)
    assert torch.equal(copy.float(), x.float())


def test_layers_are_copied_with_their_tensors():
    layer = nn.Linear(4, 3)
    layer.register_buffer("scale", torch.ones(3))
    layer.work = {}
    sets = InputSets(BenchInputs((layer, 7)), cache_bytes=150)
    assert sets.bytes_per_set == 4 * (12 + 3 + 3)
    first, number = sets.next().args
    second = sets.next().args[0]
    assert number == 7
    assert type(first) is nn.Linear
    assert first.work is layer.work
    for name in ("weight", "bias", "scale"):
        tensors = [getattr(item, name) for item in (layer, first, second)]
        assert len({tensor.data_ptr() for tensor in tensors}) == 3
        assert torch.equal(tensors[0], tensors[2])
    first.weight.zero_()
    assert layer.weight.abs().sum() > 0
    namespace = SimpleNamespace(weight=torch.ones(3), name="w")
    (copy,) = InputSets(BenchInputs((namespace,)), cache_bytes=0).next().args
    assert (copy.name, copy.weight.data_ptr() != namespace.weight.data_ptr()) == ("w", True)


def test_weights_of_their_own_class_are_cloned():
    from phyai_quant import QuantScheme, TensorQuant, materialize
    from phyai_quant.specs.base import AllocationRequest

    spec = materialize(
        QuantScheme(
            TensorQuant("int8", "per_channel", rotation_group=16),
            TensorQuant("int8", "per_channel", dynamic=True),
            online=True,
        )
    )
    layer = nn.Module()
    spec.allocate(layer, AllocationRequest((4, 32), torch.float32))
    spec.load_weight(layer, "weight", torch.randn(4, 32))
    spec.process_after_loading(layer)
    sets = InputSets(BenchInputs((layer,)), cache_bytes=1000)
    copies = [sets.next().args[0] for _ in range(sets.count + 1)]
    assert all(type(copy.weight) is type(layer.weight.detach()) for copy in copies)
    assert all(copy.weight is not layer.weight for copy in copies)
    assert torch.equal(spec.dequantize_weight(copies[0]), spec.dequantize_weight(layer))


def test_arguments_without_tensors_are_passed_on():
    plan = object()
    inputs = InputSets(BenchInputs((plan,), {"scale": 0.5}), cache_bytes=10**9).next()
    assert inputs.args[0] is plan
    assert inputs.kwargs == {"scale": 0.5}


def test_offers_end_with_their_context_and_stay_in_their_thread():
    seen = []
    with live_inputs("toy", 1, scale=2.0):
        inputs = offered_inputs("toy")
        assert (inputs.args, inputs.kwargs) == ((1,), {"scale": 2.0})
        assert offered_inputs("other") is None
        thread = threading.Thread(target=lambda: seen.append(offered_inputs("toy")))
        thread.start()
        thread.join()
        with live_inputs("toy", 3):
            assert offered_inputs("toy").args == (3,)
        assert offered_inputs("toy").args == (1,)
    with pytest.raises(KeyError), live_inputs("toy", 1):
        raise KeyError
    assert seen == [None]
    assert offered_inputs("toy") is None


class Recorder(InterleavedBenchmark):
    """Notes what the rows were called with."""

    def __init__(self, catalog):
        super().__init__(catalog)
        self.compared = []

    def compare(self, selections):
        self.compared.append(([item.kernel_id for item in selections], offered_inputs("attention")))
        return super().compare(selections)


@pytest.fixture
def tuned():
    """Installs a selector that measures, with a second row for paged attention."""
    from phyai.dispatch.conditions import eq
    from phyai.dispatch.opspec import Impl

    catalog = build_catalog()
    reference = catalog.impl("eager.attention_paged")
    calls = []

    def prepare(facts, params):
        run = reference.prepare(facts, params)

        def record(*args, **kwargs):
            calls.append((args, kwargs))
            return run(*args, **kwargs)

        return record

    catalog.register(
        Impl(
            kernel_id="other.attention_paged",
            op="attention_paged",
            when=eq("op", "attention_paged"),
            prepare=prepare,
            priority=19,
        )
    )
    policy = policy_from_mapping({"profile": "autotune"}, catalog=catalog)
    hook = Recorder(catalog)
    set_kernel_selector(Selector(catalog, policy, device="cpu", benchmark=hook))
    return SimpleNamespace(hook=hook, calls=calls)


def test_paged_attention_is_measured_on_the_running_models_cache_and_plan(tuned):
    cache = PagedKVCache.allocate(
        layers=2, slots=6, kv_heads=1, head_dim=4, dtype=torch.float32, device="cpu"
    )
    cache.keys.normal_()
    cache.values.normal_()
    plan = PagedPlan.from_slots([3], [torch.tensor([0, 2, 5])], "cpu")
    layers = [PagedAttention(2, 1, 4, layer=index, role="expert") for index in range(2)]
    query = torch.randn(3, 2, 4)
    before = cache.keys.clone()
    outputs = [layer(query, cache, plan) for layer in layers]
    assert len(tuned.hook.compared) == 1, "the second layer asks for the same workload"
    measured = [args for args, _ in tuned.calls][: WARM_UPS + ROUNDS]
    assert len(measured) == WARM_UPS + ROUNDS
    for q, k_pages, v_pages, used in measured:
        assert used is plan
        assert torch.equal(q, query)
        assert q.data_ptr() != query.data_ptr()
        assert torch.equal(k_pages, cache.keys[0])
        assert torch.equal(v_pages, cache.values[0])
    assert all(kwargs == {"scale": 0.5} for _, kwargs in tuned.calls)
    assert torch.equal(cache.keys, before)
    assert all(layer._site.trace().autotuned for layer in layers)
    assert outputs[0].shape == query.shape
    assert not torch.equal(outputs[0], outputs[1])


def test_cacheless_attention_is_measured_on_its_own_inputs(tuned):
    layer = CachelessAttention(2, 4, role="vision")
    q, k, v = (torch.randn(2, 3, 2, 4) for _ in range(3))
    layer(q, k, v)
    ((rows, offered),) = tuned.hook.compared
    assert set(rows) == {"sdpa.attention", "eager.attention"}
    assert offered.args[0] is q
    assert layer._site.trace().autotuned
    assert offered_inputs("attention") is None


def test_attention_outside_a_running_model_falls_back_to_priority(tuned):
    site = CallSite("attention", attrs={"layout": "padded", "causal": False})
    site.select(device="cpu", dtype={"input": "fp32"})
    trace = site.trace()
    assert (trace.selected, trace.autotuned) == ("sdpa.attention", False)
    assert "where a running model offers its own" in trace.text
