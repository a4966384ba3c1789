"""The benchmarks of attention run dry, refuse wrong results and agree with their page."""

import json
from dataclasses import replace

import _attention_run
import _graph_timing
import attention_page
import benchmark_attention
import benchmark_sparse_attention
import pytest
import torch
from _attention_cases import DENSE, FULL, FULL_SPARSE, AttentionCase, SparseCase
from _attention_operands import (
    KINDS,
    attention_quality,
    captured_operands,
    checked_rows,
    exact_rows,
    random_operands,
)
from _attention_phases import phase_of
from _attention_providers import PROVIDERS
from _attention_tables import attention_table
from _attention_targets import TARGETS, evaluate

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="a dry run is for the CPU")


def test_dry_run_of_dense_attention(tmp_path, capsys):
    path = tmp_path / "attention.json"
    assert benchmark_attention.main(["--json", str(path), "--commit", "abc"]) == 0
    result = json.loads(path.read_text())
    assert (result["schema"], result["commit"], result["not_started"]) == (1, "abc", [])
    ran = {row["provider"] for row in result["rows"] if "ms" in row}
    assert ran == {"piper", "sage", "flash"}
    for row in result["rows"]:
        assert ("ms" in row) != ("skipped" in row)
        if "skipped" in row:
            assert any(word in row["skipped"] for word in ("GPU", "installed"))
            continue
        assert row["sqnr_db"] >= PROVIDERS[row["provider"]].minimum_sqnr
        assert row["ms"] > 0
        assert row["sustained_ms"] > 0
    assert {row["operands"] for row in result["quality"]} == set(KINDS)
    captured = [row for row in result["quality"] if row["operands"] == "captured"]
    found = {row["provider"]: row["sqnr_db"] for row in captured if "sqnr_db" in row}
    assert found["piper"] > 34
    assert found["sage"] > 27
    assert "| Piper attention |" in capsys.readouterr().out


def test_dry_run_of_sparse_attention(tmp_path, capsys):
    path = tmp_path / "sparse.json"
    assert benchmark_sparse_attention.main(["--json", str(path)]) == 0
    result = json.loads(path.read_text())
    rows, measured = result["rows"], result["quality"]
    assert {row["operands"] for row in measured} == set(KINDS)
    assert {row["provider"] for row in measured} == {"sparse_minmax", "sparse_mean"}
    assert all(row["relative_l2"] < 0.025 and row["worst_head_db"] > 30 for row in measured)
    ran = {row["provider"] for row in rows if "ms" in row}
    assert ran == {"sparse_minmax", "sparse_mean", "piper", "flash"}
    for row in rows:
        if row["provider"].startswith("sparse"):
            assert row["relative_l2"] < 0.025
            assert row["kept_tops"] <= row["tops"]
    assert "Sparse Piper, minmax" in capsys.readouterr().out


def test_no_case_starts_after_the_budget(capsys):
    arguments = ["--budget", "-1", "--providers", "piper"]
    assert benchmark_sparse_attention.main(arguments) == 1
    assert "not started" in capsys.readouterr().out


def test_unknown_cases_are_refused():
    with pytest.raises(SystemExit, match=r"any of \['S999'\]; the cases are\nB1 H2 S130 D64 full"):
        benchmark_attention.main(["--providers", "flash", "--cases", "S999", "--budget", "-1"])


@pytest.mark.parametrize("providers", [[], ["--providers", *DENSE[1:]]])
def test_only_runs_of_all_providers_are_stored(tmp_path, monkeypatch, providers):
    path = tmp_path / "attention.json"
    monkeypatch.setattr(_attention_run, "result_path", lambda _facts, _name: path)
    parser = _attention_run.parser_of("About.", DENSE, 1)
    monkeypatch.setattr(_attention_run, "device", lambda: torch.device("cuda"))
    options = _attention_run.parse(parser, [*providers, "--commit", "abc"])
    options.quick = True  # facts of this machine
    _attention_run.finish(options, "attention", {"rows": [], "not_started": []}, [])
    assert path.exists() == (not providers)


@pytest.mark.parametrize("factor", [torch.nan, 1.1])
@pytest.mark.parametrize(
    ("module", "case"),
    [
        (benchmark_attention, AttentionCase(70, 64, heads=2, kv_heads=2)),
        (benchmark_sparse_attention, SparseCase(70, 64, 1.0, heads=2)),
    ],
)
def test_wrong_attention_is_not_timed(monkeypatch, factor, module, case):
    real = PROVIDERS["piper"]

    def build(operands, is_causal):
        run = real.build(operands, is_causal)
        return lambda: run() * factor

    monkeypatch.setitem(PROVIDERS, "piper", replace(real, build=build))
    rows = module.measure(case, ["piper"])
    assert "not timed" in rows[0]["error"]
    assert "ms" not in rows[0]
    assert "WrongResultError" in attention_table(rows)


def test_exact_rows_are_attention():
    operands = random_operands(AttentionCase(300, 64, True, heads=4, kv_heads=2))
    rows = checked_rows(300)
    assert len(rows) == 128
    assert (rows[0], rows[-1]) == (0, 299)
    exact = exact_rows(operands, rows, is_causal=True)
    key, value = (x.double().repeat_interleave(2, 1) for x in (operands.key, operands.value))
    wanted = torch.nn.functional.scaled_dot_product_attention(
        operands.query.double(), key, value, is_causal=True
    )
    torch.testing.assert_close(exact, wanted[:, :, rows])


def test_quality_finds_the_worst_head():
    exact = torch.randn(1, 3, 50, 64, dtype=torch.float64)
    actual = exact.clone()
    actual[:, 1] += 0.1
    actual[:, 2] += 0.001
    found = attention_quality(actual, exact)
    assert 19 < found["worst_head_db"] < 21 < found["sqnr_db"]
    assert found["relative_l1"] == pytest.approx(0.101 / 3 / 0.798, rel=0.05)


def test_captured_operands_are_of_a_trained_model():
    operands = captured_operands()
    assert operands.query.shape == (4, 8, 90, 64)
    assert operands.key.shape == operands.value.shape == (4, 1, 90, 64)
    # Layers and features of a trained model are not alike, as those of random numbers are.
    spread = operands.key.float().std((0, 1, 2))
    assert spread.max() > 3 * spread.min()


def test_operations():
    assert AttentionCase(8, 64, heads=2).operations == 4 * 2 * 64 * 64
    assert AttentionCase(8, 64, True, heads=2).operations == 4 * 2 * 36 * 64
    assert SparseCase(640, 64, 0.2, heads=1).kept_operations == 4 * 640 * 128 * 64


def test_phases_are_those_of_the_kernels():
    assert phase_of("quantize_kernel") == "preparation"
    assert phase_of("select_kernel") == "routing"
    assert phase_of("dense_attention_kernel") == "attention"


def test_calls_are_made_before_they_are_measured(capsys):
    made = []

    def fail():
        raise RuntimeError

    _attention_run.compile_in_threads([lambda: made.append(torch.is_grad_enabled()), fail])
    assert made == [False]
    assert "compiled" in capsys.readouterr().out
    assert len(list(benchmark_attention.calls_to_compile())) == 12
    assert len(list(benchmark_sparse_attention.calls_to_compile())) == 4 * len(FULL_SPARSE) + 2


def test_every_target_is_measured():
    rows = [
        {"case": case.name, "provider": name, "rows": case.rows, "causal": case.causal}
        | {"head_dim": case.head_dim, "times_cudnn": 1.3, "tops": 700.0}
        for case in FULL
        for name in DENSE
    ]
    rows += [
        {"case": case.name, "provider": "sparse_minmax", "rows": case.rows, "causal": False}
        | {"head_dim": case.head_dim, "keep": case.keep, "times_cudnn": 3.0}
        for case in FULL_SPARSE
    ]
    found = evaluate(rows)
    assert {entry["target"] for entry in found} == {target.text for target in TARGETS}
    met = {entry["target"]: entry["met"] for entry in found}
    assert met["Piper over cuDNN, D128, full"]
    assert not met["Piper, TOP/s, D128, full"]
    assert not met["SageAttention2++ over cuDNN, D128"]


@pytest.mark.parametrize("failing", ["piper", "cudnn"])
def test_a_target_is_not_met_where_a_provider_fails(monkeypatch, failing):
    """Neither by what was found before it failed nor without the baseline."""
    case = AttentionCase(70, 64, heads=2, kv_heads=2)
    calls = {name: [lambda: torch.zeros(1)] for name in ("piper", "cudnn")}

    def fail():
        raise RuntimeError

    calls[failing] = [fail]
    rows = [
        {"case": case.name, "provider": name, "rows": 8192, "causal": False, "head_dim": 64}
        for name in calls
    ]
    _attention_run.time_rows(rows, calls, case.operations)
    (entry,) = evaluate(rows)
    assert (entry["provider"], entry["found"], entry["met"]) == ("piper", None, False)


def test_the_page_shows_the_stored_results():
    page = attention_page.PAGE.path.read_text(encoding="utf-8")
    assert attention_page.PAGE.render(page) == page


def test_the_page_says_once_who_is_absent():
    ran = {"case": "one", "provider": "piper", "ms": 1.0}
    late = {"case": "two", "provider": "piper", "skipped": "the budget was over"}
    rows = [ran, {"case": "one", "provider": "sageattention", "skipped": "not installed"}, late]
    rows.append({"case": "two", "provider": "sageattention", "skipped": "not installed"})
    assert attention_page.measured(rows) == [ran, late]
    assert attention_page.absent(rows) == "\n\nNot measured: SageAttention (not installed)."
    assert attention_page.absent([ran]) == ""
    failed = {"case": "one", "provider": "cudnn", "error": "no"}
    assert attention_page.measured([failed]) == [failed]


def test_targets_tell_turns_and_alone_apart():
    case = FULL[0]
    row = {"case": case.name, "provider": "piper", "rows": case.rows, "causal": case.causal}
    row |= {"head_dim": case.head_dim, "tops": 700.0, "times_cudnn": 1.1}
    [ratio, _] = evaluate([row | {"sustained_times_cudnn": 1.3}])
    assert (ratio["found"], ratio["alone"], ratio["met"]) == (1.1, 1.3, False)
    assert [entry["alone"] for entry in evaluate([row])] == [None, None]
    # The rate follows from the time alone, 5/6 of that in turns.
    [_, rate] = evaluate([row | {"ms": 6.0, "sustained_ms": 5.0}])
    assert (rate["found"], rate["alone"], rate["met"]) == (700.0, pytest.approx(840.0), False)


def test_a_variant_is_repeated_alone_and_the_first_half_does_not_count(monkeypatch):
    times = iter([9.0, 9.0, 2.0, 4.0, 2.0, 99.0])
    monkeypatch.setattr(_graph_timing, "device", lambda: torch.device("cuda"))
    monkeypatch.setattr(_graph_timing, "_milliseconds", lambda replay, turn: next(times))
    replay = _graph_timing.Replay(lambda turn: None, 2, True, 5)
    assert _graph_timing.sustain(replay, span_ms=26.0) == 1.0
    assert next(times) == 99.0
