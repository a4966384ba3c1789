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


def test_branches_on_two_ranks(monkeypatch):
    monkeypatch.setattr(bench_parallel, "Workers", OneProcess)
    monkeypatch.setattr(bench_parallel.Rank, "memory", lambda self: [1, 2])
    places = []
    monkeypatch.setattr(
        bench_parallel, "join", lambda **sizes: places.append(sizes) or bench_parallel.Parallel()
    )
    action = ActionLayout(3, 0, (0,), 4, 2)
    layout = Layout(2, 4, 4, clean_frames=(0,), fps=15.0, action=action)
    found = bench_parallel.time_ranks(
        CONFIG, layout, Sampling(2, 3.0, 5.0), dtype=torch.float32, kind="cpu", runs=2
    )
    assert places == [{"cfg_size": 2, "tp_size": 1}, {"cfg_size": 1, "tp_size": 2}]
    assert len(found["one_device_ms"]) == 2
    for how in ("branches", "layers"):
        shared = found[how]
        assert shared["relative_difference"] == 0
        assert shared["most_bytes"] == [1, 2]
        least = min(found["one_device_ms"]) / min(shared["ms"])
        assert shared["speedup"] == pytest.approx(least, rel=1e-2, abs=1e-3)


def test_four_ranks_share_branches_and_layers():
    found = bench_parallel.time_ranks(
        CONFIG, Layout(2, 4, 4, fps=15.0), Sampling(2, 3.0, 5.0),
        grids=[(2, 2)], dtype=torch.float32, kind="cpu", runs=1,
    )  # fmt: skip
    shared = found["cfg 2 x tp 2"]
    assert shared["relative_difference"] < 1e-5
    assert len(shared["ms"]) == 1
    assert shared["most_bytes"] == [0] * 4


def test_grids_of_different_sizes_are_refused():
    with pytest.raises(ValueError, match=r"\[2, 4\] devices; they must have the same"):
        bench_parallel.time_ranks(
            CONFIG, Layout(2, 4, 4, fps=15.0), Sampling(2, 3.0, 5.0), grids=[(2, 1), (2, 2)]
        )
