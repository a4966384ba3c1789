"""The comparison with the reference rows sees what quantization does, and the page shows it."""

import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from phyai.models.pi05.accuracy import compare_with_reference, questions
from phyai.models.pi05.random_weights import full_size_config
from phyai.models.pi05.sizes import DecoderSizes, VisionSizes

SMALL = replace(
    full_size_config(),
    image_resolution=(28, 28),
    vision=VisionSizes(width=64, layers=2, heads=2, mlp=96, patch=14, tokens=4),
    language=DecoderSizes(256, layers=6, heads=4, kv_heads=1, head_dim=64, mlp=512, vocab=300),
    expert=DecoderSizes(128, layers=6, heads=4, kv_heads=1, head_dim=64, mlp=256),
)
BENCHMARKS = Path(__file__).parents[3] / "benchmarks"
POLICIES = Path(__file__).parents[5] / "examples" / "pi05" / "kernel_policies"


def test_bf16_and_int8_differ_from_the_reference_as_they_should():
    policies = [None, POLICIES / "convrot_int8.yaml"]
    plain, quantized = compare_with_reference(policies, "cpu", inputs=3, config=SMALL)
    assert plain["inputs"] == 3
    assert 0.9995 < quantized["least_cosine"] < plain["least_cosine"] < 1
    assert 0 < plain["largest_relative_error"] < quantized["largest_relative_error"] < 0.03


def test_questions_vary_cameras_and_prompts():
    asked = [setting for setting, _ in questions(SMALL, 21)]
    assert {setting.views for setting in asked} == {1, 2, 3}
    assert {setting.prompt for setting in asked} >= {0, 7, 200}


@pytest.fixture
def page(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    monkeypatch.delitem(sys.modules, "_pi05_page", raising=False)
    from _pi05_page import page

    return page


def test_page(page):
    spent = {"p50": 2.0, "p99": 2.5}
    stages = ("vision", "prefix", "denoise", "chunk", "request")
    result = {
        "setting": {"name": "three views"},
        "ms": dict.fromkeys(stages, spent),
        "floor_ms": {"total": 1.25},
        "ratio": dict.fromkeys(("vision", "prefix", "denoise", "total"), 1.6),
        "kernels": {"vision": 3, "prefix": 4, "denoise": 5},
        "longest": {"vision": [["some_kernel(int)", 3, 18.0]]},
    }
    seen = {
        "inputs": 64, "mean_cosine": 0.9999, "least_cosine": 0.9998,
        "largest_relative_error": 0.01,
    }  # fmt: skip
    document = {
        "date": "2026-01-02",
        "replays": 200,
        "environment": {
            "device": "some GPU", "commit": "abc",
            "clocks": {"cpu_mhz": 2100.0, "clocks.sm": "345 MHz", "clocks.max.sm": "1980 MHz"},
            "versions": {"torch": "2.11"},
        },
        "policies": {"fast": {"results": [result], "accuracy": seen}, "broken": {"error": "no"}},
        "lerobot": {"version": "0.6", "eager": {"p50_ms": 400.0, "most_ms": 500.0}},
    }  # fmt: skip
    text = page(document)
    for part in (
        "some GPU (multiprocessors 345 MHz, at most 1980 MHz), torch 2.11, commit abc, 2026-01-02.",
        "## fast",
        "| three views | " + "2.00 (1.6\N{NO-BREAK SPACE}×) | " * 3 + "**2.00** | 2.50 | 1.25 |",
        "| vision | `some_kernel` | 3 | 18 | 6.0 |",
        "least 0.999800",
        "Not measured: no",
        "| eager | 400.0 | 500.0 | 200.0 |",
    ):
        assert part in text


def test_a_given_commit_is_recorded(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    for name in ("_environment", "_lerobot", "_pi05_page", "_results", "benchmark_pi05"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    import benchmark_pi05

    real = benchmark_pi05.environment
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(benchmark_pi05, "measure_all", lambda *_, **__: iter([{}]))
    monkeypatch.setattr(
        benchmark_pi05, "environment", lambda _, commit: real(torch.device("cpu"), commit)
    )
    stored = {}
    monkeypatch.setattr(benchmark_pi05, "store", lambda document, _: stored.update(document))
    benchmark_pi05.main(["--commit", "abc", "--inputs", "0", "--output", "results.json"])
    assert stored["environment"]["commit"] == "abc"
    assert stored["policies"] == {"default": {"results": [], "error": "KeyError: 'ms'"}}
