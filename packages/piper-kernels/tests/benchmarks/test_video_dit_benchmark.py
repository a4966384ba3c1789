"""The benchmark of the video block runs dry, refuses wrong results and agrees with its page."""

import json

import _video_dit_exact as exact
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
    assert 1e-3 < rows["bf16"]["error"] < 0.01
    assert 0.01 < rows["int8_dense"]["error"] < 0.03
    assert 0.01 < rows["int8_sparse"]["error"] < 0.03
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


@pytest.mark.parametrize("attention", ["torch", "sparse"])
def test_exact_rows_are_those_of_a_wide_block(attention):
    """All tiles are routed, so that the operators of the library are exact but for INT8 codes."""
    tokens, config = 320, benchmark.example.BlockConfig(128, 2, 256, keep=1.0, attention=attention)
    block = benchmark.example.make_block(config, torch.device("cpu"), torch.bfloat16)
    x = exact.video_tokens(tokens, 128)
    tables = benchmark.example.rope_tables(tokens, 64, torch.device("cpu"))
    rows = exact.checked_rows(tokens)
    assert rows.unflatten(0, (-1, 64))[:, 0].tolist() == [0, 64, 128, 256]
    with torch.no_grad():
        actual = exact.exact_change(block, x, *tables, rows)
        wide = block.double() if attention == "torch" else block.float()
        like = x.double() if attention == "torch" else x.float()
        change = (wide(like, *tables) - like)[0, rows]
    error = benchmark.relative_error(actual, change)
    assert error < (1e-5 if attention == "torch" else 0.01)


def test_a_share_of_the_tiles_is_read():
    """Keys far above the others are in the only tile that is kept, for every query."""
    generator = torch.Generator().manual_seed(0)
    query, key, value, gate = (torch.randn(256, 64, generator=generator) for _ in range(4))
    query[:, 0] = 4.0
    key[128:192, 0] = 40.0
    whole = exact._attend(query, key[128:192], value[128:192])
    actual = exact._sparse(query, key, value, torch.zeros_like(gate), 0.25)
    torch.testing.assert_close(actual, whole, rtol=1e-5, atol=1e-6)
    gated = exact._sparse(query, key, value, gate, 0.25)
    coarse = value[128:192].mean(0)  # of the only tile with a large score
    torch.testing.assert_close(gated - actual, gate * coarse, rtol=1e-4, atol=1e-5)


def test_neighbouring_tokens_are_alike():
    tokens = exact.video_tokens(4096, 256)[0].float().unflatten(0, (-1, 64))
    assert abs(float(tokens.var()) - 1) < 0.02
    assert abs(float(tokens.mean(1).var()) - 0.9) < 0.03


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
