"""`phyai tune`: one chunk is computed, rivals are measured once, and the times are kept."""

import json
from pathlib import Path
from types import SimpleNamespace

import pytest

from phyai.cli import engines, tune
from phyai.dispatch.benchmark import InterleavedBenchmark
from phyai.dispatch.trace import CandidateTrace, SelectionTrace

CHECKPOINT = Path(__file__).parents[1] / "fixtures" / "pi05_tiny"
CONVROT = """
schema: phyai.kernel/v1
quantization:
  rules:
    - match: {regex: '.*language_model\\.layers\\.\\d+\\.mlp\\.down_proj'}
      weight: {dtype: int8, granularity: per_channel, rotation_group: 16}
      input: {dtype: int8, granularity: per_channel, dynamic: true}
"""
pytestmark = pytest.mark.usefixtures("plain_environment")


@pytest.fixture
def compared(monkeypatch):
    """Notes which rows were compared."""
    seen = []
    compare = InterleavedBenchmark.compare

    def record(self, selections):
        seen.append({item.kernel_id for item in selections})
        return compare(self, selections)

    monkeypatch.setattr(InterleavedBenchmark, "compare", record)
    return seen


@pytest.fixture
def run(phyai, tmp_path):
    policy = tmp_path / "policy.yaml"
    policy.write_text(CONVROT)

    def call(*extra):
        return phyai(
            *("tune", "--checkpoint", CHECKPOINT, "--device", "cpu", "--steps", 1),
            *("--policy", policy, "--store", tmp_path / "times.json"),
            *extra,
        )

    return call


def test_rivals_are_measured_once_and_kept(run, compared, tmp_path):
    first = run("--json")
    assert first.code == 0, first.err
    rivals = {"piper.gemm.convrot_int8", "torch.gemm.convrot_int8"}
    assert {"sdpa.attention", "eager.attention"} in compared
    assert rivals in compared
    calls = first.json["calls"]
    assert {call["op"] for call in calls} == {"attention", "gemm"}
    assert all(call["selected_ms"] <= call["first_ms"] for call in calls)
    gemm = next(call for call in calls if call["op"] == "gemm")
    assert (gemm["first"], {gemm["selected"]} | rivals) == ("piper.gemm.convrot_int8", rivals)
    assert "K=" in gemm["shape"]
    assert first.json["choices"] > sum(call["sites"] for call in calls)
    stored = json.loads((tmp_path / "times.json").read_text())["workloads"].values()
    assert {tuple(sorted(entry["milliseconds"])) for entry in stored} == {
        ("eager.attention", "sdpa.attention"),
        tuple(sorted(rivals)),
    }
    compared.clear()
    second = run("--json")
    assert second.json["calls"] == calls
    assert compared == []
    text = run().out
    assert "piper.gemm.convrot_int8" in text
    assert "PHYAI_KERNEL_PROFILE=autotune PHYAI_KERNEL_AUTOTUNE_CACHE=" in text


def test_other_batch_sizes_are_other_workloads(run, compared):
    assert run("--batch", 1, "--batch", 3).code == 0
    assert compared.count({"sdpa.attention", "eager.attention"}) == 2


def test_the_options_reach_the_engine(phyai, tmp_path, monkeypatch):
    requests, batches = [], []
    engine = SimpleNamespace(
        infer_batch=lambda observations, **options: batches.append((observations, options)),
        plugin=SimpleNamespace(call_sites=list),
    )
    monkeypatch.setattr(engines, "synthetic_observation", lambda engine: "seen")
    monkeypatch.setattr(engines, "build_engine", lambda request: requests.append(request) or engine)
    result = phyai(
        *("tune", "--checkpoint", tmp_path, "--policy", "p.yaml", "--store", tmp_path / "t.json"),
        *("--device", "cuda:1", "--dtype", "bf16", "--batch", 2, "--steps", 3),
    )
    assert result.code == 0
    assert batches == [(["seen", "seen"], {"seed": 0, "num_steps": 3})]
    assert requests == [
        engines.EngineRequest(
            checkpoint=tmp_path,
            device="cuda:1",
            dtype=engines.Precision.BF16,
            kernel_config=Path("p.yaml"),
            allow_identity_norm=True,
            autotune_cache=tmp_path / "t.json",
        )
    ]
    assert "choices  0, 0 of them by measurement" in result.out


def test_the_store_is_the_flag_the_variable_or_the_users(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", "/home/robot")
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    assert tune.store_path(None) == Path("/home/robot/.cache/phyai/autotune.json")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert tune.store_path(None) == tmp_path / "phyai" / "autotune.json"
    monkeypatch.setenv("PHYAI_KERNEL_AUTOTUNE_CACHE", "~/named.json")
    assert tune.store_path(None) == Path("/home/robot/named.json")
    assert tune.store_path(Path("~/mine.json")) == Path("/home/robot/mine.json")


def trace(times, selected, *, autotuned=True, **shape):
    rows = tuple(
        CandidateTrace(name, True, "always", benchmark_ms=value) for name, value in times.items()
    )
    facts = {f"shape.{name}": value for name, value in shape.items()}
    return SelectionTrace("gemm", "mlp", facts, "autotune", (), rows, selected, autotuned)


def test_calls_are_merged_and_compared_with_priority():
    times = {"a.gemm": 2.0, "b.gemm": None, "c.gemm": 1.0}
    calls = tune.tuned_calls(
        [
            trace(times, "c.gemm", M=1, N=2),
            trace(times, "c.gemm", M=1, N=2),
            trace(times, "c.gemm", M=8, N=2),
            trace({"a.gemm": None}, "a.gemm", autotuned=False, M=1),
        ]
    )
    assert [(call.shape, call.sites) for call in calls] == [("M=1 N=2", 2), ("M=8 N=2", 1)]
    assert (calls[0].selected, calls[0].selected_ms) == ("c.gemm", 1.0)
    assert (calls[0].first, calls[0].first_ms) == ("a.gemm", 2.0)
