"""Every benchmark runs dry on the CPU, and refuses to time a wrong result."""

import importlib
import json
import re

import _harness
import bench_gguf_conversion
import pytest
import run_all
import torch
from _report import HERE

from piper_kernels.weights.convrot.int8 import ConvRotInt8Tensor

NAMES = run_all.benchmark_names()
FIELDS = {"case", "ms", "gbps", "baseline_ms", "ratio"}

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="a dry run is for the CPU")


@pytest.mark.parametrize("name", NAMES)
def test_dry_run(name):
    result = importlib.import_module(f"bench_{name}").run(True)
    json.dumps(result)
    assert result["rows"]
    cases = [row["case"] for row in result["rows"]]
    assert len(set(cases)) == len(cases)
    for row in result["rows"]:
        assert row.keys() >= FIELDS
        assert min(row[field] for field in FIELDS - {"case"}) > 0


def test_run_all_stores_what_a_result_depends_on(tmp_path, capsys):
    names = ["weight_preparation"]
    assert run_all.run_all(names, quick=True, out=tmp_path, budget=60, revision="abc") == []
    stored = json.loads((tmp_path / "cpu" / "weight_preparation.json").read_text())
    assert stored["commit"] == "abc"
    assert stored["versions"]["torch"] == torch.__version__
    assert {"device", "quick", "seconds", "rows"} <= stored.keys()
    assert "| case | ms |" in capsys.readouterr().out


def test_a_wrong_result_is_not_timed(tmp_path, capsys, monkeypatch):
    def wrong(dense, *, group_size):
        return ConvRotInt8Tensor(
            torch.zeros(dense.shape, dtype=torch.int8),
            torch.ones(dense.shape[0], 1),
            group_size,
            dense.dtype,
        )

    monkeypatch.setattr(ConvRotInt8Tensor, "from_hp", wrong)
    names = ["weight_preparation"]
    assert run_all.run_all(names, quick=True, out=tmp_path, budget=60) == names
    output = capsys.readouterr().out
    assert re.search(r"WrongResultError: .* relative error .* not timed", output)
    assert not list(tmp_path.rglob("*.json"))


def test_nan_is_a_wrong_result():
    exact = torch.randn(4, 4)
    _harness.require_as_exact("same", exact + 0.1, exact + 0.1, exact)
    with pytest.raises(_harness.WrongResultError, match="nan"):
        _harness.require_as_exact("nan", exact * torch.nan, exact + 0.1, exact)


def test_no_benchmark_starts_after_the_budget(capsys):
    assert run_all.run_all(["weight_update"], quick=True, out=None, budget=-1) == ["weight_update"]
    assert "not started" in capsys.readouterr().out


def test_random_gguf_rows_are_finite():
    for kind in bench_gguf_conversion._FACTORS:
        rows = bench_gguf_conversion.random_rows(kind, (4, 512))
        dense = bench_gguf_conversion.dequantize(rows, kind)
        assert dense.shape == (4, 512)
        assert torch.isfinite(dense).all()
        assert dense.std() > 0


def test_the_readme_lists_every_program():
    page = (HERE / "README.md").read_text()
    for path in [*HERE.glob("bench_*.py"), *HERE.glob("study_*.py")]:
        assert f"`{path.name}`" in page
