"""The benchmarks of networks run dry and refuse wrong results."""

import json

import _ffn_providers
import benchmark_ffn
import pytest
import torch
from _ffn_models import BLOCKS, QUICK, FeedForwardCase, build, quantized
from _quality import quality

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="a dry run is for the CPU")


@pytest.mark.parametrize("case", [*QUICK, FeedForwardCase("block", 9, 64, 128, 2)])
def test_quantized_networks_stay_close(case):
    with torch.no_grad():
        model = build(case, torch.device("cpu"))
        x = torch.randn(1, case.rows, case.width, dtype=torch.bfloat16)
        exact = build(case, torch.device("cpu")).float()(x.float())
        packed = quantized(model, 64)
        assert quality(model(x), exact)["sqnr_db"] > 40
        assert quality(packed(x), exact)["sqnr_db"] > 28


def test_weights_are_counted_as_they_are_stored():
    model = build(FeedForwardCase("gelu", 2, 64, 128), torch.device("cpu"))
    biases = 2 * (64 + 128)
    assert _ffn_providers.stored_bytes("bf16", model) == 2 * 2 * 64 * 128 + biases
    assert _ffn_providers.stored_bytes("int_mm", model) == 2 * 64 * 128 + biases
    packed = _ffn_providers.weight_bytes(quantized(model, 64))
    assert packed == 2 * 64 * 128 + 4 * (64 + 128) + biases


def test_operations_of_networks():
    assert FeedForwardCase("swiglu", 2, 3, 5).operations == 2 * 2 * 3 * 15
    assert FeedForwardCase("gelu", 2, 3, 5).operations == 2 * 2 * 2 * 15
    attention = 2 * 2 * 4 * 9 + 4 * 4 * 3
    assert FeedForwardCase("block", 2, 3, 5, 1).operations == 180 + attention
    assert min(case.rows for case in BLOCKS) >= 4096


def test_dry_run_of_networks(tmp_path):
    path = tmp_path / "ffn.json"
    names = ["bf16", "piper_int8", "piper_int8_operator", *_ffn_providers.ALTERNATIVES]
    arguments = ["--quick", "--providers", *names, "--json", str(path)]
    assert benchmark_ffn.main(arguments) == 0
    result = json.loads(path.read_text())
    assert {row["kind"] for row in result["rows"]} == {"swiglu", "gelu"}
    assert {row["provider"] for row in result["rows"]} == set(names)
    for row in result["rows"]:
        if "skipped" in row:
            assert row["provider"] in ("fp8_rowwise", "humming_int8", "humming_w4a16")
            continue
        assert row["ms"] > 0
        assert row["times_bf16"] > 0
        assert row["sqnr_db"] > benchmark_ffn.minimum_sqnr(row["provider"], row["kind"])
        assert row["peak_bytes"] is None
    assert benchmark_ffn.main(["--quick", "--block", *arguments[1:]]) == 0


@pytest.mark.parametrize("kind", [0, 1])
@pytest.mark.parametrize("weights", ["nvfp4", "convrot_nvfp4"])
def test_networks_of_nvfp4_weights_are_as_good_as_required(kind, weights):
    case = QUICK[kind]
    with torch.no_grad():
        model = build(case, torch.device("cpu"))
        x = torch.randn(1, case.rows, case.width, dtype=torch.bfloat16)
        found = quality(quantized(model, 64, weights)(x), model.float()(x.float()))
    assert found["sqnr_db"] > benchmark_ffn.minimum_sqnr(f"piper_{weights}_compiled", case.kind)
    assert _ffn_providers.compile_options(case.kind, weights)


def test_providers_that_the_budget_does_not_reach_are_left_out():
    rows = benchmark_ffn.measure(QUICK[0], ["bf16", "piper_int8"], until=0.0)
    assert [row["skipped"] for row in rows] == ["the budget was over"] * 2
    assert benchmark_ffn.ffn_table(rows).count("the budget was over") == 2


def test_what_is_wrong_depends_on_the_format(monkeypatch):
    assert benchmark_ffn.minimum_sqnr("bf16_compiled", "block") == 44
    assert benchmark_ffn.minimum_sqnr("piper_int8", "gelu") == 30
    assert benchmark_ffn.minimum_sqnr("piper_int8_compiled", "block") == 34
    monkeypatch.setitem(_ffn_providers.MINIMUM_SQNR, "bf16", 60.0)
    rows = benchmark_ffn.measure(benchmark_ffn.QUICK[0], ["bf16", "piper_int8"])
    assert [("ms" in row, "error" in row) for row in rows] == [(False, True), (True, False)]
    assert "60.0 dB expected" in rows[0]["error"]
