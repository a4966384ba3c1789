"""What the benchmark reports, with graphs on the CPU and a clock that counts."""

from dataclasses import replace

import pytest
import torch

from phyai.models.pi05 import bench
from phyai.models.pi05.bench import Setting
from phyai.models.pi05.floor import floor_ms
from phyai.models.pi05.runtime import PI05Runtime


class Clock:
    """Stands for a CUDA event; every record is one millisecond later."""

    now = 0

    def __init__(self, *, enable_timing):
        assert enable_timing

    def record(self):
        Clock.now += 1
        self.at = Clock.now

    def synchronize(self):
        pass

    def elapsed_time(self, later):
        return float(later.at - self.at)


@pytest.fixture(autouse=True)
def _on_cpu(monkeypatch, recorded):
    monkeypatch.setattr(torch.cuda, "Event", Clock)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device=None: None)
    monkeypatch.setattr(bench, "kernel_times", lambda replay: [("slow", 2, 9.0), ("fast", 5, 1.0)])


def test_measure(load_model):
    model = load_model("pi05")
    most = model.config.tokenizer_max_length
    setting = Setting("all", len(model.config.cameras), most, chunk=model.config.chunk_size)
    found = bench.measure(PI05Runtime(model), setting, replays=4, kernels=1)
    assert {name: found["ms"][name]["p50"] for name in (*bench.STAGES, "chunk")} == {
        "vision": 1.0,
        "prefix": 1.0,
        "denoise": 1.0,
        "chunk": 3.0,
    }
    assert found["ms"]["request"]["p50"] > 0
    assert found["kernels"] == dict.fromkeys(bench.STAGES, 7)
    assert found["longest"] == {name: [("slow", 2, 9.0)] for name in bench.STAGES}
    assert found["prefix_rows"] == model.config.longest_prefix
    floor = floor_ms(model.config, views=setting.views, prompt=most)["total"]
    assert found["ratio"]["total"] == pytest.approx(3.0 / floor, rel=1e-3)


def test_another_chunk_shares_the_weights(load_model):
    model = load_model("pi05")
    longer = bench.with_chunk(model, model.config.chunk_size + 3)
    assert longer.expert is model.expert
    inputs = bench.request(longer, Setting("x", 1, 2))
    actions = PI05Runtime(longer).sample_actions(inputs, seed=0, num_steps=2)
    assert actions.shape[1] == model.config.chunk_size + 3
    assert bench.with_chunk(model, model.config.chunk_size) is model
    assert replace(longer.config, chunk_size=model.config.chunk_size) == model.config
