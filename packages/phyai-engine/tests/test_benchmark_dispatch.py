"""The benchmark of the dispatcher runs, checks what it times, and imports stay light."""

import importlib.util
import json
import sys
from pathlib import Path

import pytest
import torch

from phyai.dispatch import reset_kernel_selector

IMPORTS = [("phyai", ""), ("phyai.dispatch", ""), ("phyai.engine", "torch")]
BENCHMARKS = Path(__file__).resolve().parents[1] / "benchmarks"


@pytest.fixture(scope="module")
def benchmark():
    sys.path.insert(0, str(BENCHMARKS))
    spec = importlib.util.spec_from_file_location(
        "benchmark_dispatch", BENCHMARKS / "benchmark_dispatch.py"
    )
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    yield module
    sys.path.remove(str(BENCHMARKS))
    del sys.modules[spec.name]


@pytest.fixture(autouse=True)
def _no_selector():
    yield
    reset_kernel_selector()


def test_the_result_says_what_it_depends_on(benchmark, tmp_path, capsys, monkeypatch):
    # Fresh interpreters that load torch are slow to start; the test below starts them.
    imports = []
    monkeypatch.setattr(
        benchmark,
        "_import",
        lambda *names: imports.append(names) or {"seconds": 0.5, "loaded": []},
    )
    target = tmp_path / "dispatch.json"
    code = benchmark.main(["--quick", "--device", "cpu", "--output", str(target)])
    result = json.loads(target.read_text())
    assert result["device"] == "cpu"
    assert result["quick"]
    assert {"python", "torch", "phyai-engine"} <= set(result["versions"])
    assert result["commit"]
    assert set(result["clocks"]) == {"cpu_mhz"}
    rows = {row["case"]: row for row in result["rows"]}
    assert {"call site, frozen", "Selector.select, warm", "import phyai"} <= set(rows)
    assert all(row["median"] >= row["best"] >= 0 for row in rows.values())
    assert code == (0 if all(row["within"] for row in rows.values()) else 1)
    assert rows["call site, frozen"]["median"] < rows["Selector.select, cold"]["median"]
    for row in rows.values():
        assert row.get("gpu_libraries", []) == []
    assert set(imports) == {*IMPORTS, ("torch", "")}
    assert "call site, frozen" in capsys.readouterr().out


def test_a_wrong_choice_is_not_timed(benchmark):
    (case, *_) = benchmark.cases(torch.device("cpu"))
    with pytest.raises(AssertionError, match="not timed"):
        benchmark.expect(case.call, "nonsense.gemm")()


@pytest.mark.parametrize(("module", "before"), IMPORTS)
def test_no_gpu_library_is_imported(benchmark, module, before):
    found = benchmark._import(module, before)
    assert found["loaded"] == []
    assert found["seconds"] > 0


def test_an_imported_gpu_library_is_seen(benchmark, monkeypatch):
    monkeypatch.setattr(benchmark, "GPU_LIBRARIES", ("fractions",))
    assert benchmark._import("fractions", "")["loaded"] == ["fractions"]


def test_repeated_choices_are_cheap(benchmark):
    """Ten times the bounds of a quiet machine, so that a busy one passes."""
    for row in benchmark.measure(benchmark.cases(torch.device("cpu")), rounds=5, calls=500):
        assert row["bound"] is None or row["best"] < 10 * row["bound"], row
