"""Which Humming kernel a product asks for, without the library or a GPU."""

import json
import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch
from torch import nn

from phyai.kernels import humming_product
from phyai.kernels.humming_params import locks_needed
from phyai.kernels.humming_product import Buckets, Options, multiply, warm_up

INTERVALS = [[0, 8, {"tile": 8}], [8, 64, {"tile": 64}], [64, 2**30, {"tile": 128}]]


class Config(SimpleNamespace):
    shape_k, pad_shape_k, param_dtype = 32, 0, torch.bfloat16

    __hash__ = object.__hash__
    __eq__ = object.__eq__

    def to_str(self):
        return "config"


@pytest.fixture
def calls(monkeypatch):
    """Replaces the library by one that records its calls."""
    recorded = SimpleNamespace(forward=[], heuristics=[], capturing=False)

    def humming_forward(config, **arguments):
        recorded.forward.append(arguments)
        return arguments["inputs"].new_ones(arguments["inputs"].shape[0], 64)

    def get_heuristics_config(config, **arguments):
        recorded.heuristics.append(arguments)
        return INTERVALS

    modules = {name: ModuleType(name) for name in ("humming", "humming.forward", "humming.tune")}
    modules["humming.forward"].humming_forward = humming_forward
    modules["humming.tune"].get_heuristics_config = get_heuristics_config
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr(humming_product, "_compiled", set())
    humming_product.buckets_of.cache_clear()
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: recorded.capturing)
    stream = SimpleNamespace(cuda_stream=7)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: stream)
    yield recorded
    humming_product.buckets_of.cache_clear()


@pytest.fixture
def layer():
    layer = nn.Module()
    layer.prefix = "expert.mlp"
    layer.humming_config = Config()
    layer.weight = torch.zeros(4, 32, dtype=torch.int32)
    layer.weight_scale = torch.ones(1, 64)
    return layer


def rows(count, columns=32, dtype=torch.bfloat16):
    return torch.ones(count, columns, dtype=dtype)


@pytest.mark.parametrize(
    ("count", "tile"), [(1, 8), (8, 8), (9, 64), (64, 64), (65, 128), (2**30, 128), (2**31, 128)]
)
def test_intervals_exclude_their_low_end(count, tile):
    assert json.loads(Buckets(INTERVALS).text(count)) == {"tile": tile}


def test_each_kernel_is_asked_for_once_and_by_text(calls, layer):
    options = Options({"use_batch_invariant": True})
    for count in (1, 7, 9, 1000, 2):
        assert multiply(layer, rows(count), options).shape == (count, 64)
    assert calls.heuristics == [
        {
            "gemm_type": "dense",
            "device": None,
            "use_f16_accum": False,
            "use_batch_invariant": True,
            "use_m_major_input_scale": False,
        }
    ]
    tunings = [call["tuning_config"] for call in calls.forward]
    assert [json.loads(text)["tile"] for text in tunings] == [8, 8, 64, 128, 8]
    assert tunings[0] is tunings[1] is tunings[4]
    computes = {call["compute_config"] for call in calls.forward}
    assert [json.loads(text) for text in computes] == [
        {"gemm_type": "dense", "use_batch_invariant": True}
    ]


def test_a_policy_can_name_the_kernel(calls, layer):
    multiply(layer, rows(3), Options({}, [[0, 64, {"tile": 1}]]))
    assert json.loads(calls.forward[0]["tuning_config"]) == [[0, 64, {"tile": 1}]]
    assert not calls.heuristics


def test_optional_tensors_are_passed(calls, layer):
    multiply(layer, rows(1), Options({}))
    assert calls.forward[0]["weight_scale_2"] is None
    layer.weight_scale_2 = torch.ones(1)
    multiply(layer, rows(1), Options({}))
    assert calls.forward[1]["weight_scale_2"] is layer.weight_scale_2
    assert "bias" not in calls.forward[1]


def test_locks_are_kept_per_stream_and_fresh_under_capture(calls, layer):
    options = Options({})
    for capturing in (False, False, True, True):
        calls.capturing = capturing
        multiply(layer, rows(1), options)
    first, second, third, fourth = (call["locks"] for call in calls.forward)
    assert first is second
    assert len({tensor.data_ptr() for tensor in (first, third, fourth)}) == 3
    assert first.dtype is torch.int32
    assert first.numel() == humming_product.LOCKS
    assert not any(tensor.any() for tensor in (first, third, fourth))


def test_a_kernel_is_compiled_before_capture(calls, layer):
    calls.capturing = True
    with pytest.raises(RuntimeError, match=r"'expert\.mlp' was never run with M = 9.*warm_up"):
        multiply(layer, rows(9), Options({}))
    calls.capturing = False
    multiply(layer, rows(10), Options({}))
    calls.capturing = True
    multiply(layer, rows(9), Options({}))
    with pytest.raises(RuntimeError, match="never run with M = 65"):
        multiply(layer, rows(65), Options({}))


def test_warming_up_runs_each_kernel_once(calls, layer):
    assert warm_up(layer, [1, 5, 8, 10, 50, 51]) == 2
    assert [call["inputs"].shape[0] for call in calls.forward] == [8, 51]
    calls.capturing = True
    multiply(layer, rows(3), Options({}))
    calls.capturing = False
    assert warm_up(layer, [1, 5], Options({}, {"tile": 4})) == 1


@pytest.mark.parametrize(
    ("x", "text"),
    [
        (rows(1, dtype=torch.float16), r"is of torch\.float16, the packed weight needs torch\.bf"),
        (rows(1, 48), "has K = 48, the packed weight needs 32"),
        (rows(1).to("meta"), "is on meta, the packed weight needs cpu"),
    ],
)
def test_inputs_that_the_packed_weight_cannot_take(x, text, calls, layer):
    with pytest.raises(ValueError, match=text):
        multiply(layer, x, Options({}))
    assert not calls.forward


def test_rows_keep_leading_sizes_and_add_the_bias(calls, layer, row):
    run = row("humming.gemm.w4a16", **{"shape.N": 64})
    bias = torch.arange(64, dtype=torch.bfloat16)
    out = run(layer, torch.ones(2, 64, 3, dtype=torch.bfloat16).transpose(1, 2)[..., ::2], bias)
    assert torch.equal(out, (1 + bias).expand(2, 3, 64))
    assert calls.forward[0]["inputs"].is_contiguous()
    assert run(layer, rows(0).view(2, 0, 32), bias).shape == (2, 0, 64)
    assert len(calls.forward) == 1


def test_humming_needs_a_prepared_layer(row):
    run = row("humming.gemm.w4a16", **{"shape.N": 64})
    layer = nn.Linear(64, 64)
    layer.prefix = "expert.mlp"
    with pytest.raises(RuntimeError, match=r"'expert\.mlp' has no humming_config.*quantiz"):
        run(layer, torch.zeros(1, 64), None)


_WIDE = {"block_shape": [128, 256, 64], "warp_shape": [64, 32, 64]}


@pytest.mark.parametrize(
    ("tuning", "count"),
    [
        ({}, 145),
        ({"num_ctas_per_sm": 2}, 290),
        ({"multi_cast_size_a": 2}, 144),
        ({"multi_cast_size_a": 2, "multi_cast_size_b": 2}, 144),
        (_WIDE, 580),
        ({**_WIDE, "num_ctas_per_sm": 4}, 2320),
        ({**_WIDE, "mma_type": "mma"}, 145),
        ({**_WIDE, "output_chunk_rows": 16}, 145),
        ({**_WIDE, "use_stream_k": False}, 0),
    ],
)
def test_locks_of_a_split_along_k_on_132_multiprocessors(tuning, count):
    """Values of the launcher's own check: a tenth more than the clusters, per warp group."""
    assert locks_needed(tuning, multiprocessors=132) == count
