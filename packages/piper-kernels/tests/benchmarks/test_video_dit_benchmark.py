"""The benchmark of the video block runs dry, refuses wrong results and agrees with its page."""

import json

import benchmark_video_dit_block as benchmark
import pytest
import torch
import video_dit_block_page as page

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="a dry run is for the CPU")


def test_dry_run(tmp_path, capsys):
    path = tmp_path / "video_dit_block.json"
    assert benchmark.main(["--quick", "--json", str(path), "--commit", "abc"]) == 0
    result = json.loads(path.read_text())
    assert (result["schema"], result["commit"], result["not_started"]) == (1, "abc", [])
    rows = {row["provider"]: row for row in result["rows"]}
    assert list(rows) == list(benchmark.LABELS)
    for row in rows.values():
        assert row["ms"] > 0
        assert row["times_bf16"] > 0
        assert row["peak_bytes"] is None
    assert rows["bf16"]["error"] == 0
    assert 1e-3 < rows["int8_dense"]["error"] < 0.04
    assert 1e-3 < rows["int8_sparse"]["error"] < 0.04
    assert rows["int8_sparse"]["weight_bytes"] < rows["bf16"]["weight_bytes"]
    assert [target["met"] for target in result["targets"]] == [None, None]
    assert "| ConvRot INT8, sparse Piper attention" in capsys.readouterr().out
    text = page.PAGE.render(page.PAGE.path.read_text(), tmp_path)
    assert f"### {benchmark.QUICK[0].name}" in text
    assert "| not measured |" in text


def test_a_wrong_result_is_not_timed(monkeypatch, capsys):
    monkeypatch.setitem(benchmark.MOST_ERROR, "int8_dense", 1e-4)
    assert benchmark.main(["--quick", "--providers", "int8_dense"]) == 1
    assert "WrongResultError" in capsys.readouterr().out


def test_budget_and_lengths(capsys):
    assert benchmark.main(["--quick", "--budget", "-1"]) == 1
    assert "not started" in capsys.readouterr().out
    with pytest.raises(SystemExit, match="no name contains any of"):
        benchmark.main(["--quick", "--tokens", "7"])


def test_cases_and_targets():
    assert [case.tokens for case in benchmark.FULL] == [16_384, 32_768, 65_536]
    case = benchmark.FULL[0]
    assert case.config.head_dim == 128
    assert case.operations == 2 * 16_384 * (4 * 7168**2 + 3 * 7168 * 19_200) + 4 * 16_384**2 * 7168
    rows = [
        {"provider": "int8_sparse", "tokens": 32_768, "times_bf16": 1.9},
        {"provider": "int8_dense", "tokens": 32_768, "times_bf16": 1.2},
        {"provider": "int8_dense", "tokens": 65_536, "times_bf16": 9.0},
    ]
    assert [target["met"] for target in benchmark.targets_of(rows)] == [True, False]


def test_the_page_shows_the_stored_results():
    assert page.PAGE.main(page.__doc__, ["--check"]) == 0
