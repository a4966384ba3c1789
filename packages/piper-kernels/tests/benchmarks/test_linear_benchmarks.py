"""The benchmarks of linears run dry, refuse wrong results and agree with their page."""

import json
import re

import _linear_compilation
import benchmark_ffn
import benchmark_linear
import linear_page
import pytest
import torch
from _ffn_models import QUICK
from _graph_timing import REPEATS, Variant, _repeats, time_variants
from _linear_cases import FOUR_BIT_ALL, FULL, INT8_ALL, LinearCase
from _linear_cases import QUICK as SMALL
from _linear_providers import PROVIDERS, Operator
from _linear_tables import linear_table
from _linear_targets import TARGETS, evaluate
from _pages import Page
from _quality import quality
from _report import HERE

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="a dry run is for the CPU")


def test_unknown_cases_are_refused():
    with pytest.raises(SystemExit, match=r"no name contains any of \['M=999'\]; the cases are\nM="):
        benchmark_linear.main(["--quick", "--providers", "bf16", "--cases", "M=999"])


def test_dry_run_of_linears(tmp_path, capsys):
    path = tmp_path / "linear.json"
    assert benchmark_linear.main(["--quick", "--json", str(path), "--commit", "abc"]) == 0
    result = json.loads(path.read_text())
    assert (result["schema"], result["commit"], result["not_started"]) == (1, "abc", [])
    ran = {row["provider"] for row in result["rows"] if "phases" in row}
    assert ran >= {name for name in PROVIDERS if name.startswith("piper")}
    assert ran >= {"bf16", "int_mm", "torchao_int8"}
    for row in result["rows"]:
        assert ("phases" in row) != ("skipped" in row)
        if "skipped" in row:
            assert any(word in row["skipped"] for word in ("GPU", "activation", "installed"))
            continue
        assert row["sqnr_db"] >= PROVIDERS[row["provider"]].minimum_sqnr
        assert all(phase["ms"] > 0 for phase in row["phases"].values())
        if row["provider"] == "piper_int8":
            assert row["phases"].keys() == {"preparation", "product", "total"}
            assert row["of_copy"] > 0
    assert "| ConvRot INT8 |" in capsys.readouterr().out


def test_providers_and_cases_can_be_chosen(tmp_path):
    path = tmp_path / "linear.json"
    arguments = ["--quick", "--providers", "bf16", "--cases", "swiglu", "--json", str(path)]
    assert benchmark_linear.main(arguments) == 0
    rows = json.loads(path.read_text())["rows"]
    assert [row["provider"] for row in rows] == ["bf16"]
    assert rows[0]["activation"] == "swiglu"


def test_no_case_starts_after_the_budget(capsys):
    assert benchmark_linear.main(["--quick", "--budget", "-1"]) == 1
    assert "not started" in capsys.readouterr().out


def test_shares_cover_all_cases(monkeypatch, capfd):
    seen = []
    real = _linear_compilation.make_operands

    def made(case, most):
        seen.append(case.name)
        return real(case, most)

    monkeypatch.setattr(_linear_compilation, "make_operands", made)
    for index in ("0", "1"):
        assert benchmark_linear.main(["--quick", "--share", index, "2"]) == 0
    assert sorted(seen) == sorted(case.name for case in SMALL)
    assert "Error" not in capfd.readouterr().out


def test_processes_compile_ahead_and_are_awaited(tmp_path, capsys):
    program = f"import sys; open(f'{tmp_path}/' + '-'.join(sys.argv[1:]), 'w')"
    _linear_compilation.compile_ahead(2, ["-c", program, "--quick"])
    assert {path.name for path in tmp_path.iterdir()} == {
        f"--quick---share-{index}-2" for index in (0, 1)
    }
    said = capsys.readouterr().out
    assert "compiled ahead in" in said
    assert "failed" not in said


def test_processes_that_fail_to_compile_are_counted(capsys):
    program = "import sys; sys.exit(sys.argv[2] == '1')"
    _linear_compilation.compile_ahead(3, ["-c", program])
    assert "1 of 3 compiling processes failed" in capsys.readouterr().out


@pytest.mark.parametrize("factor", [torch.nan, 1.3])
def test_a_wrong_linear_is_not_timed(monkeypatch, factor):
    real = PROVIDERS["piper_int8"]

    def build_wrong(case, weight, bias):
        right = real.build(case, weight, bias)
        return Operator(lambda x: right.linear(x) * factor, right.prepare, right.multiply)

    wrong = type(real)(real.label, 8, real.minimum_sqnr, real.refusal, build_wrong)
    monkeypatch.setitem(PROVIDERS, "piper_int8", wrong)
    rows = benchmark_linear.measure(LinearCase(5, 32, 256, ("piper_int8",)), ["piper_int8"])
    assert rows[0]["error"].startswith("WrongResultError")
    assert "phases" not in rows[0]


def test_a_result_worse_than_its_reference_is_not_timed(monkeypatch):
    real = PROVIDERS["piper_int8"]

    def build_worse(case, weight, bias):
        right = real.build(case, weight, bias)
        noise = 0.02 * float(weight.shape[1]) ** 0.5

        def linear(x):
            result = right.linear(x)
            return result + noise * torch.randn_like(result)

        return Operator(linear, reference=right.reference)

    worse = type(real)(real.label, 8, real.minimum_sqnr, real.refusal, build_worse)
    monkeypatch.setitem(PROVIDERS, "piper_int8", worse)
    rows = benchmark_linear.measure(LinearCase(5, 32, 256, ("piper_int8",)), ["piper_int8"])
    assert re.search(r"the reference has", rows[0]["error"])


def test_full_cases_cover_every_target_and_provider():
    rows = [
        {
            "case": case.name,
            "m": case.m,
            "n": case.n,
            "k": case.k,
            "activation": case.activation,
            "provider": provider,
        }
        for case in FULL
        for provider in case.providers
    ]
    for target in TARGETS:
        assert any(target.applies(row) for row in rows), target.text
    assert {row["provider"] for row in rows} == set(PROVIDERS)
    assert len({case.name for case in FULL}) == len(FULL)
    assert set(INT8_ALL) | set(FOUR_BIT_ALL) == set(PROVIDERS)


def test_targets_compare_rows_of_one_case():
    shared = {"m": 8192, "n": 8192, "k": 8192, "activation": None, "case": "cube"}
    rows = [
        shared
        | {"provider": "piper_int8", "product_tops": 1300.0, "times_bf16": 1.3, "of_copy": 0.8},
        shared | {"provider": "int_mm", "product_tops": 1000.0},
    ]
    found = {(entry["target"], entry["required"]): entry for entry in evaluate(rows)}
    assert found["INT8 product, TOP/s", 1250]["met"]
    assert found["INT8 product over cuBLAS INT8", 1.3]["found"] == pytest.approx(1.3)
    assert not found["INT8 linear over bf16", 1.4]["met"]
    assert found["INT8 preparation over a copy", 0.7]["met"]
    rows[0]["times_bf16"] = None
    missing = {entry["target"]: entry["met"] for entry in evaluate(rows)}
    assert missing["INT8 linear over bf16"] is False
    rows[0] = shared | {"provider": "piper_int8", "skipped": "reason"}
    assert evaluate(rows) == []


def test_operands_are_larger_than_the_caches():
    for case in FULL:
        for provider in case.providers:
            bits = PROVIDERS[provider].weight_bits
            sets = case.sets(bits)
            size = case.n * case.k * bits / 8 + 2 * case.m * case.input_features
            assert sets >= 2
            assert sets * size >= 120e6 or sets == 24


def test_quality():
    exact = torch.tensor([3.0, 4.0])
    assert quality(exact, exact)["sqnr_db"] is None
    found = quality(exact * 1.1, exact)
    assert found["sqnr_db"] == pytest.approx(20, abs=1e-4)
    assert found["cosine"] == pytest.approx(1)
    assert found["relative_l2"] == pytest.approx(0.1, abs=1e-6)
    assert quality(exact * torch.tensor([torch.inf, 1]), exact)["nonfinite"] == 1
    zero = quality(torch.zeros(2), torch.zeros(2))
    assert (zero["sqnr_db"], zero["cosine"], zero["relative_l2"]) == (None, None, 0.0)


def test_what_a_clock_does_not_see_is_started_most_often():
    assert _repeats(0.0) == REPEATS[1]
    assert _repeats(1e9) == REPEATS[0]


def test_a_variant_that_fails_does_not_stop_the_others():
    def fail(index):
        raise RuntimeError("no such kernel")

    seen = []
    found = time_variants({"bad": Variant(fail, 1), "good": Variant(seen.append, 2)})
    assert found["bad"] == {"error": "RuntimeError: no such kernel"}
    assert found["good"]["ms"] >= 0
    assert set(seen) == {0, 1}


def test_rows_without_times_show_their_reason():
    row = {"provider": "int_mm", "skipped": "more rows needed"}
    assert "| torch._int_mm composition | more rows needed |" in linear_table([row])


def test_the_page_shows_the_stored_results():
    page = linear_page.PAGE.path.read_text(encoding="utf-8")
    assert linear_page.PAGE.render(page) == page


def test_a_page_that_differs_is_found_and_written(tmp_path, capsys):
    """``--check`` writes nothing."""
    path = tmp_path / "page.md"
    path.write_text(before := "<!-- part -->\nold\n<!-- end of part -->\n")
    page = Page(path, lambda _folder: {"part": "new"})
    assert page.main("What it does.", ["--check"]) == 1
    assert path.read_text() == before
    assert f"{path} differs" in capsys.readouterr().out
    assert page.main("What it does.", []) == 0
    assert path.read_text() == before.replace("old", "new")
    assert page.main("What it does.", ["--check"]) == 0


def test_the_page_is_made_from_results(tmp_path):
    folder = tmp_path
    arguments = ["--quick", "--providers", "piper_int8", "bf16", "--cases", "swiglu"]
    benchmark_linear.main([*arguments, "--json", str(folder / "linear.json")])
    page = linear_page.PAGE.path.read_text(encoding="utf-8")
    rendered = linear_page.PAGE.render(page, folder)
    assert "### M=17 N=48 K=512 swiglu g64" in rendered
    assert "| ConvRot INT8 |" in rendered
    assert linear_page.PAGE.render(rendered, folder) == rendered


@pytest.mark.parametrize("arguments", [[], ["--block"]])
def test_a_stopped_run_keeps_what_it_measured(tmp_path, monkeypatch, arguments):
    """Every case is stored before the next one starts."""
    path = tmp_path / "result.json"
    module = benchmark_ffn if arguments else benchmark_linear
    cases = [*QUICK, *QUICK] if arguments else [LinearCase(m, 32, 256, ("bf16",)) for m in (3, 5)]
    monkeypatch.setattr(module, "QUICK_BLOCKS" if arguments else "QUICK", cases)
    real, seen = module.measure, []

    def measure(case, names, *until):
        if seen:
            stored = json.loads(path.read_text())
            assert {row["case"] for row in stored["rows"]} == {seen[0].name}
            assert case.name in stored["not_started"]
            raise KeyboardInterrupt
        seen.append(case)
        return real(case, names, *until)

    monkeypatch.setattr(module, "measure", measure)
    with pytest.raises(KeyboardInterrupt):
        module.main([*arguments, "--quick", "--json", str(path), "--providers", "bf16"])


def test_the_readme_lists_the_programs():
    page = (HERE / "README.md").read_text()
    for path in [*HERE.glob("benchmark_*.py"), *HERE.glob("*_page.py")]:
        assert f"`{path.name}`" in page
