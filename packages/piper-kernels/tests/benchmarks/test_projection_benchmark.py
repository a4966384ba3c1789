"""The benchmark of projections runs dry and refuses wrong results."""

import json

import benchmark_convrot_int8_projection as benchmark
import pytest
import torch
from _projection_cases import FULL, LABELS, QUICK

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="a dry run is for the CPU")


def test_dry_run(tmp_path, capsys):
    path = tmp_path / "projection.json"
    assert benchmark.main(["--quick", "--json", str(path), "--commit", "abc"]) == 0
    result = json.loads(path.read_text())
    assert (result["schema"], result["commit"], result["not_started"]) == (1, "abc", [])
    assert [row["provider"] for row in result["rows"]] == list(LABELS)
    for row in result["rows"]:
        assert row["ms"] > 0
        assert row["tops"] > 0
        assert ("times_unfused" in row) == (row["provider"] not in benchmark.PARTS)
        if row["provider"] in ("sparse", "dense"):
            assert 1e-4 < row["relative_l2"] < 0.025
    assert f"| {LABELS['sparse']} |" in capsys.readouterr().out


def test_a_wrong_result_is_not_timed(monkeypatch, capsys):
    monkeypatch.setattr(benchmark, "MOST_ERROR", 1e-6)
    assert benchmark.main(["--quick"]) == 1
    assert "relative error" in capsys.readouterr().out


def test_no_case_starts_after_the_budget(capsys):
    assert benchmark.main(["--quick", "--budget", "-1"]) == 1
    assert capsys.readouterr().out.count("not started") == len(QUICK)


def test_operations_of_a_case():
    assert FULL[1].operations == 2 * 32_768 * 4096 * 4096
    with pytest.raises(SystemExit, match="no name contains any of"):
        benchmark.main(["--quick", "--cases", "7 rows"])
