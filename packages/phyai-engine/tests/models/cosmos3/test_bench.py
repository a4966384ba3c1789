"""What the benchmarks report, at sizes that run on a CPU."""

import numpy as np
import pytest
import torch

from phyai.models.cosmos3 import bench, bench_parallel
from phyai.models.cosmos3.bench_video import attention_rules, sqnr_db, time_video_step
from phyai.models.cosmos3.config import Cosmos3Config
from phyai.models.cosmos3.droid import PolicyContract
from phyai.models.cosmos3.random_weights import random_transformer
from phyai.models.cosmos3.sampler import Sampling
from phyai.models.cosmos3.state import ActionLayout, Layout
from phyai.models.cosmos3.vae.random_weights import tiny_config

CONFIG = Cosmos3Config.tiny(
    num_hidden_layers=2, latent_channel=6, patch_latent_dim=24, num_embodiment_domains=9
)
SMALL = PolicyContract(chunk=4, tier="256", sampling=Sampling(2, 3.0, 5.0))
FP8 = {
    "quantization": {
        "rules": [
            {
                "match": {"regex": r"gen_layers\.\d+\.mlp\.\w+$"},
                "weight": {"dtype": "fp8_e4m3"},
                "input": {"dtype": "fp8_e4m3"},
                "stored_by": "fp8_rows",
            }
        ]
    }
}


def measure(policy):
    return bench.measure_policy(
        CONFIG,
        tiny_config(),
        policy,
        device="cpu",
        dtype=torch.float32,
        contract=SMALL,
        requests=2,
        listed=2,
    )


def test_a_policys_stages_floor_and_actions():
    found = measure(None)
    assert found["actions"].shape == (2, 4, 8)
    stages = {"preprocess", "encode", "prefill", "denoise", "total", "request"}
    assert stages <= set(found["ms"])
    assert all(found["ms"][name]["p50"] > 0 for name in stages)
    assert found["ms"]["request"]["p50"] >= found["ms"]["denoise"]["p50"]
    assert found["ratio"]["denoise"] == pytest.approx(
        found["ms"]["denoise"]["p50"] / found["floor_ms"]["denoise"], rel=0.5
    )
    assert found["longest"] == []
    assert found["floor_ms"]["prefill"] == 0, "texts are cached"
    assert np.array_equal(measure(None)["actions"], found["actions"])
    narrow = measure(FP8)
    assert narrow["floor_ms"]["denoise"] != found["floor_ms"]["denoise"]
    compared = bench.cosines(narrow["actions"], found["actions"])
    assert 0.9 < compared["least_cosine"] <= compared["mean_cosine"] < 1
    assert compared["largest_radians"] > 0


def test_requests_of_a_seed_are_equal_and_texts_have_the_asked_length():
    one, other = bench.droid_request(3), bench.droid_request(3)
    assert np.array_equal(one.wrist, other.wrist)
    assert not np.array_equal(one.wrist, bench.droid_request(4).wrist)
    assert one.seed is None
    tokens = bench.CountedTokens(50)
    assert [len(tokens.encode(text)) for text in ("a", "")] == [82, 10]
    assert tokens.encode("a") == tokens.encode("a") != tokens.encode("b")


def test_a_video_step_with_each_row():
    model = random_transformer(CONFIG, params_dtype=torch.float32, device="cpu")
    layout = Layout(2, 6, 6, fps=24.0)

    def step(row, params=(), reference=None):
        rules = attention_rules(row, dict(params))
        return time_video_step(model, layout, rules, reference, runs=2)

    found, video = step("eager.attention")
    assert len(found["ms"]) == 2
    assert "sqnr_db" not in found
    assert video.shape == (6, 2, 6, 6)
    same, _ = step("sdpa.attention", {"sdpa_backend": "flash"}, video)
    assert same["sqnr_db"] > 80
    absent, nothing = step("piper.attention", reference=video)
    assert absent["error"].startswith("NoKernelError: no usable implementation of 'attention'")
    assert nothing is None
    assert sqnr_db(torch.tensor([1.1]), torch.tensor([1.0])) == pytest.approx(20, abs=1e-3)
    assert sqnr_db(video, video) == pytest.approx(200)


class OneProcess:
    """Calls the object of rank 0 here; what two ranks exchange is tested with the model."""

    def __init__(self, ranks, make, *arguments, backend):
        assert backend == "gloo"
        self.rank = make(0, *arguments)

    def call(self, method, *arguments, **options):
        return getattr(self.rank, method)(*arguments, **options)

    def close(self):
        self.rank = None


@pytest.fixture
def places(monkeypatch):
    """The grids that ranks join, of which only the first runs."""
    joined = []
    monkeypatch.setattr(bench_parallel, "Workers", OneProcess)
    monkeypatch.setattr(bench_parallel.Rank, "memory", lambda self: [1, 2])
    monkeypatch.setattr(
        bench_parallel, "join", lambda **sizes: joined.append(sizes) or bench_parallel.Parallel()
    )
    return joined


def time_two(**options):
    action = ActionLayout(3, 0, (0,), 4, 2)
    layout = Layout(2, 4, 4, clean_frames=(0,), fps=15.0, action=action)
    sampling = Sampling(2, 3.0, 5.0)
    options = {"dtype": torch.float32, "kind": "cpu", "runs": 2} | options
    return bench_parallel.time_ranks(CONFIG, layout, sampling, **options)


def test_branches_on_two_ranks(places):
    told = []
    found = time_two(report=lambda name, result: told.append((name, result)))
    assert places == [{"cfg_size": 2, "tp_size": 1}, {"cfg_size": 1, "tp_size": 2}]
    assert told == [*found.items()]
    assert list(found) == ["one_device", "branches", "layers"]
    assert len(found["one_device"]["ms"]) == 2
    assert set(found["one_device"]) == {"ms", "most_bytes"}
    for how in ("branches", "layers"):
        shared = found[how]
        assert shared["difference"] == {"video": 0, "action": 0}
        assert shared["most_bytes"] == [1, 2]
        least = min(found["one_device"]["ms"]) / min(shared["ms"])
        assert shared["speedup"] == pytest.approx(least, rel=1e-2, abs=1e-3)


def test_the_error_of_bf16_is_told_from_that_of_sharing(places):
    found = time_two(dtype=torch.bfloat16, exact=True)
    for name in ("one_device", "branches", "layers"):
        errors = found[name]["difference_to_fp32"]
        assert set(errors) == {"video", "action"}
        assert all(1e-3 < error < 0.2 for error in errors.values()), "the same weights, rounded"
    wide = time_two(exact=True)
    assert wide["layers"]["difference_to_fp32"] == {"video": 0, "action": 0}
    assert "difference_to_fp32" not in time_two()["layers"]


def test_what_fails_stops_nothing_else(places, monkeypatch):
    make, told = bench_parallel.Rank._make, []

    def whole_is_too_large(self, parallel, dtype):
        if len(places) < 2:
            raise torch.OutOfMemoryError("too large\nfor this device")
        return make(self, parallel, dtype)

    monkeypatch.setattr(bench_parallel.Rank, "_make", whole_is_too_large)
    found = time_two(exact=True, report=lambda name, _: told.append(name))
    assert told == ["fp32", "one_device", "branches", "layers"]
    for name in told[:3]:
        assert found[name] == {"error": "OutOfMemoryError: too large"}
    assert set(found["layers"]) == {"ms", "most_bytes"}


def test_models_are_made_anew_where_parts_differ(places, monkeypatch):
    make, made = bench_parallel.Rank._make, []
    monkeypatch.setattr(
        bench_parallel.Rank, "_make", lambda *all: made.append(len(places)) or make(*all)
    )
    time_two(grids=[(2, 1), (1, 2)])
    assert made == [0, 2], "one for itself and its branch, one for its half of every layer"


def test_four_ranks_share_branches_and_layers():
    found = bench_parallel.time_ranks(
        CONFIG, Layout(2, 4, 4, fps=15.0), Sampling(2, 3.0, 5.0),
        grids=[(2, 2)], dtype=torch.float32, kind="cpu", runs=1, exact=True,
    )  # fmt: skip
    shared = found["cfg 2 x tp 2"]
    assert shared["difference"]["video"] < 1e-5
    assert 0 < shared["difference_to_fp32"]["video"] < 1e-5
    assert len(shared["ms"]) == 1
    assert shared["most_bytes"] == [0] * 4


@pytest.mark.parametrize("size", ["nano", "super_"])
def test_the_bytes_of_the_weights_are_those_of_the_published_sizes(size):
    config = getattr(Cosmos3Config, size)()
    whole = {"nano": 2 * 6_946_071_552 + 622_329_856, "super_": 2 * 31_206_293_504 + 777_912_320}
    for parts in (1, 2, 8):
        found = bench_parallel.weight_bytes(config, parts)
        assert found == pytest.approx(2 * whole[size] / parts, rel=1e-3)


def test_grids_of_different_sizes_are_refused():
    with pytest.raises(ValueError, match=r"\[2, 4\] devices; they must have the same"):
        bench_parallel.time_ranks(
            CONFIG, Layout(2, 4, 4, fps=15.0), Sampling(2, 3.0, 5.0), grids=[(2, 1), (2, 2)]
        )
