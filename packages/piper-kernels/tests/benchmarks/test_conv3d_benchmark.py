"""The benchmark of convolutions runs dry, refuses wrong results and agrees with its page."""

import json

import benchmark_convrot_int8_conv3d as benchmark
import conv3d_page
import pytest
import torch
from _conv3d_cases import FULL, LABELS, QUICK

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="a dry run is for the CPU")


def test_dry_run(tmp_path, capsys):
    path = tmp_path / "conv3d.json"
    assert benchmark.main(["--quick", "--json", str(path), "--commit", "abc"]) == 0
    result = json.loads(path.read_text())
    assert (result["schema"], result["commit"], result["not_started"]) == (1, "abc", [])
    assert [row["provider"] for row in result["rows"]] == list(LABELS) * len(QUICK)
    for row in result["rows"]:
        assert row["ms"] > 0
        assert row["tops"] > 0
        assert row["error"] < (2e-3 if "fp16" in row["provider"] else 0.02)
        assert row["error"] > 1e-3 or "fp16" in row["provider"]
    assert [target["case"] for target in result["targets"]] == [case.name for case in QUICK]
    assert "| ConvRot INT8, contiguous |" in capsys.readouterr().out
    text = conv3d_page.PAGE.render(conv3d_page.PAGE.path.read_text(), tmp_path)
    assert f"### {QUICK[0].name}" in text
    assert "| reached |" in text or "| missed |" in text


def test_a_wrong_result_is_not_timed(monkeypatch, capsys):
    monkeypatch.setattr(benchmark, "MOST_ERROR", 1e-3)
    assert benchmark.main(["--quick", "--providers", "piper", "--cases", "64 to 32"]) == 1
    assert "failed: 64 to 32 channels" in capsys.readouterr().out


def test_no_case_starts_after_the_budget(capsys):
    assert benchmark.main(["--quick", "--budget", "-1"]) == 1
    assert capsys.readouterr().out.count("not started") == len(QUICK)


def test_unknown_cases_and_tiles_without_a_gpu():
    with pytest.raises(SystemExit, match="no name contains any of"):
        benchmark.main(["--quick", "--cases", "7 channels"])
    with pytest.raises(SystemExit):
        benchmark.main(["--tiles"])


def test_the_encoder_shapes():
    assert len({case.name for case in FULL}) == 6
    assert {case.channels for case in FULL} == {128, 256, 512, 1024}
    first = FULL[0]
    assert first.geometry.out_shape == (1, 128, 5, 512, 512)
    assert first.operations == 2 * 27 * 128 * 128 * 5 * 512 * 512
    assert FULL[4].geometry.out_shape == (1, 512, 3, 64, 64)


def test_the_page_shows_the_stored_results():
    assert conv3d_page.PAGE.main(conv3d_page.__doc__, ["--check"]) == 0
