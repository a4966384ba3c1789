"""The benchmark of Cosmos3's VAE runs on a CPU, counts its work and refuses wrong results."""

import importlib.util
import json
import sys
from pathlib import Path

import pytest
import torch

from phyai.models.cosmos3.vae import WanVAEConfig

BENCHMARKS = Path(__file__).resolve().parents[1] / "benchmarks"
NAME = "benchmark_cosmos3_vae"
CASES = {
    "encode 1 frame",
    "encode 5 frames",
    "encode all frames",
    "decode 1 frame",
    "decode all frames",
}


@pytest.fixture(scope="module")
def benchmark():
    sys.path.insert(0, str(BENCHMARKS))
    spec = importlib.util.spec_from_file_location(NAME, BENCHMARKS / f"{NAME}.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[NAME] = module
    spec.loader.exec_module(module)
    yield module
    sys.path.remove(str(BENCHMARKS))
    del sys.modules[NAME]


def test_a_dry_run_times_every_case(benchmark, tmp_path):
    target = tmp_path / "vae.json"
    arguments = ["--tiny", "--device", "cpu", "--repeats", "1", "--no-diffusers"]
    assert benchmark.main([*arguments, "--output", str(target)]) == 0
    document = json.loads(target.read_text())
    assert document["shape"] == list(benchmark.TINY)
    assert document["environment"]["commit"]
    assert set(document["layouts"]) == {"volume", "stacked"}
    for found in document["layouts"].values():
        assert set(found["rows"]) == CASES | {"decode all frames in tiles"}
        assert all(0 <= error < benchmark.TOLERANCE for error in found["errors"].values())
        assert all(found["rows"][name]["tera_operations"] > 0 for name in CASES)


def test_a_wrong_result_is_not_timed(benchmark, monkeypatch):
    monkeypatch.setattr(benchmark, "TOLERANCE", 0.0)
    with pytest.raises(ValueError, match=r"differs from fp32 by .*; nothing is timed"):
        benchmark.main(["--tiny", "--device", "cpu", "--repeats", "1", "--no-diffusers"])


def test_the_work_of_the_published_size(benchmark):
    work = benchmark.tera_operations(WanVAEConfig(), (33, 528, 640))
    assert set(work) == CASES
    # A frame needs a third of the 27 taps: 1.87 / 3, and the repeated cells 4 of 9 products.
    assert work["encode 1 frame"] == pytest.approx(0.554, abs=1e-3)
    assert work["decode all frames"] == pytest.approx(187.05, abs=0.01)


def test_a_gpu_is_asked_for_by_default(benchmark, monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit):
        benchmark.main([])
    assert "--tiny --device cpu" in capsys.readouterr().err
