"""The benchmark of Cosmos3, rehearsed on the CPU, and the page of its results."""

import importlib
import json
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).resolve().parents[1] / "benchmarks"


@pytest.fixture(scope="module")
def benchmark():
    sys.path.insert(0, str(BENCHMARKS))
    yield importlib.import_module("benchmark_cosmos3")
    sys.path.remove(str(BENCHMARKS))


@pytest.fixture(scope="module")
def document(benchmark, tmp_path_factory):
    """Results of two policies and of a video, in two runs that share a file."""
    folder = tmp_path_factory.mktemp("cosmos3")
    portable = folder / "portable.yaml"
    portable.write_text("schema: phyai.kernel/v1\nprofile: static\n")
    refused = folder / "refused.yaml"
    refused.write_text(f"{portable.read_text()}overrides: [{{use: piper.attention}}]\n")
    output = folder / "results.json"
    common = ["--tiny", "--commit", "abc", "--output", str(output)]
    policies = [f"--policy={portable}", f"--policy={refused}", "--requests=1"]
    policies.append(f"--one-stream={portable}")
    benchmark.main([*common, *policies])
    benchmark.main([*common, "--video", "--diffusers"])
    return json.loads(output.read_text())


def test_runs_are_merged_and_refusals_kept(document):
    assert document["environment"]["commit"] == "abc"
    measured, refused, alone = document["policies"].values()
    assert list(document["policies"])[2] == "portable on one stream"
    assert alone["actions_to_first"]["least_cosine"] == pytest.approx(1)
    assert measured["ms"]["total"]["p50"] > 0
    assert measured["tokens"] > 0
    assert "actions" not in measured
    assert refused["error"].startswith("NoKernelError: ")
    assert "\n" not in refused["error"]
    rows = document["video"]["rows"]
    assert rows["cuDNN"]["ms"]
    assert "error" in rows["dense Piper"]
    names = [name for name, found in document["policies"].items() if "ms" in found]
    assert list(document["diffusers"]["beside"]) == names


def test_the_page_shows_every_part(benchmark, document):
    document = json.loads(json.dumps(document))
    (name, measured), *_ = document["policies"].items()
    document["policies"]["other"] = {
        **measured,
        "floor_ms": {"encode": 2.5, "prefill": 0.0, "denoise": 300.0, "total": 302.5},
        "actions_to_first": {"mean_cosine": 0.9, "least_cosine": 0.8, "largest_radians": 0.1},
        "longest": [("gemm(float)", 4, 100.0)],
    }
    document["diffusers"] = {
        "version": "1.2",
        "beside": {"other": 500.0},
        "eager": {"p50_ms": 900.0, "transformer_ms": 700.0, "first_ms": 2000.0},
        "error": "TimeoutError: too slow",
    }
    document["parallel"] = {
        "other": {
            "one_device_ms": [10.0],
            "branches": {"ms": [5.5], "speedup": 1.818},
            "layers": {"ms": [8.0], "speedup": 1.25},
        },
        "half": {
            "one_device": {"ms": [12.0]},
            "branches": {"ms": [6.0], "speedup": 2.0},
            "layers": {"error": "OutOfMemoryError: too large"},
        },
        "large": {
            "one_device": {"error": "OutOfMemoryError: too large"},
            "branches": {"error": "OutOfMemoryError: too large"},
            "layers": {"ms": [7.0]},
        },
    }
    text = benchmark.page(document)
    spent = measured["ms"]["request"]["p50"]
    assert f"| `{name}` |" in text
    assert f"**{spent:.1f}**" in text
    assert "| floor in bf16 |  | 2.5 | 0.0 |" in text, "the larger one"
    assert "| 300.0 |" in text
    assert "| floor in 8 bits |" in text
    for stage in ("preprocess", "encode", "prefill", "denoise"):
        assert f" {stage} |" in text
    assert "| `other` | 0.9 | 0.8 | 0.1 |" in text
    assert "`refused` was not measured: NoKernelError" in text
    assert "Requests of the engine in that run: other 500.0." in text
    assert "| eager | 900.0 | 700.0 | 2000.0 | 1.80 |" in text
    assert "Not measured further: TimeoutError: too slow" in text
    assert "| cuDNN |" in text
    assert "dense Piper was not measured" in text
    assert "| `other` | 10.0 | a branch each | 5.5 | 1.818 |" in text
    assert "| `other` | 10.0 | half of every layer each | 8.0 | 1.25 |" in text
    assert "| `half` | 12.0 | a branch each | 6.0 | 2.0 |" in text
    assert "`half`, layers, was not measured: OutOfMemoryError: too large" in text
    assert "| `large` |  | half of every layer each | 7.0 |  |" in text
    assert "`large`, one_device, was not measured: OutOfMemoryError: too large" in text
    assert "| `gemm` | 4 | 100 | 25.0 |" in text
    alone = {"environment": document["environment"], "date": "2026"}
    assert "diffusers" not in benchmark.page(alone)
    document["diffusers"]["beside"] = {}
    text = benchmark.page(alone | {"diffusers": document["diffusers"]})
    assert "| eager | 900.0 | 700.0 | 2000.0 |  |" in text


def test_parts_of_other_files_are_added_to_the_page(benchmark, document, tmp_path, monkeypatch):
    first, second = tmp_path / "first.json", tmp_path / "second.json"
    page = tmp_path / "page.md"
    monkeypatch.setattr(benchmark, "PAGE", page)
    parts = {"one": {"video": document["video"]}, "two": {"policies": document["policies"]}}
    for path, part in zip((first, second), parts.values(), strict=True):
        common = {"date": "2026", "environment": document["environment"]}
        path.write_text(json.dumps({**common, **part}))
    benchmark.main(["--page", str(first), "--merge", str(second)])
    merged = json.loads(first.read_text())
    assert (merged["video"], merged["policies"]) == (document["video"], document["policies"])
    assert "## DROID policy" in page.read_text()
    assert "## One step of a long video" in page.read_text()
    assert "`policies` was measured on 2026 at commit abc." in page.read_text()
    later = {"date": "2027", "environment": {**document["environment"], "commit": "def"}}
    second.write_text(json.dumps(later))
    benchmark.main(["--page", str(second), "--merge", str(first)])
    origins = json.loads(second.read_text())["origins"]
    assert {origin["commit"] for origin in origins.values()} == {"abc"}
    assert origins["policies"] == merged["origins"]["policies"], "an origin moves with its part"
    second.write_text(json.dumps({**parts["one"], "video": {}, "environment": {"device": "cpu"}}))
    benchmark.main(["--page", str(first), "--merge", str(second)])
    assert json.loads(first.read_text()) == merged, "what is there stays"
    second.write_text(json.dumps({"environment": {"device": "another"}}))
    with pytest.raises(ValueError, match=r"second.json has results of another, .* of cpu"):
        benchmark.main(["--page", str(first), "--merge", str(second)])


def test_without_a_gpu_it_says_what_to_do(benchmark, monkeypatch, capsys):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    with pytest.raises(SystemExit):
        benchmark.main([])
    assert "--tiny rehearses it on the CPU" in capsys.readouterr().err
