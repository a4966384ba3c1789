"""scripts/gpu_check_multi.py: its parts, what fails, and what is stored."""

import importlib
import json
import sys
from pathlib import Path

import pytest

SCRIPTS = Path(__file__).resolve().parent.parent / "scripts"


@pytest.fixture
def multi(monkeypatch):
    monkeypatch.syspath_prepend(str(SCRIPTS))
    for name in ("gpu_check_multi", "_device_run", "_environment"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    module = importlib.import_module("gpu_check_multi")
    monkeypatch.setattr(module, "use_this_checkout", lambda: None)
    monkeypatch.setattr(sys, "path", [*sys.path])
    return module


@pytest.mark.parametrize(
    ("devices", "expected"),
    [(2, [(2, 1), (1, 2)]), (3, [(1, 3)]), (4, [(2, 2), (1, 4)]), (8, [(2, 4), (1, 8)])],
)
def test_devices_share_branches_first(multi, devices, expected):
    assert multi.grids(devices) == expected


def test_without_gpus_it_says_how_many_it_needs(multi, monkeypatch, capsys):
    monkeypatch.setattr("torch.cuda.device_count", lambda: 1)
    assert multi.main([]) == 2
    assert "1 GPUs; this check needs 2 or more" in capsys.readouterr().err


def test_parts_are_stored_and_one_that_fails_stops_no_other(multi, monkeypatch, tmp_path, capsys):
    calls = []

    def time_ranks(config, layout, sampling, *, grids, alone, kind, **_):
        calls.append((grids, alone, kind))
        if not alone:
            raise RuntimeError("out of memory")
        return {"one_device_ms": [2.0]}

    def serve(self, checkpoint, replicas, output):
        calls.append((checkpoint, replicas))
        return {"rows": [{"chunks/s": 10.0 * replicas}]}

    bench = importlib.import_module("phyai.models.cosmos3.bench_parallel")
    monkeypatch.setattr(bench, "time_ranks", time_ranks)
    monkeypatch.setattr(multi.Check, "_serve", serve)
    output = tmp_path / "results" / "multi.json"
    assert multi.main(["--tiny", "--json", str(output), "--commit", "abc"]) == 1
    assert calls == [
        ([(2, 1), (1, 2)], True, "cpu"),
        ([(2, 1), (1, 2)], False, "cpu"),
        (multi.REACH, 1),
        (multi.REACH, 2),
    ]
    found = json.loads(output.read_text())
    assert found["devices"] == 2
    assert found["environment"]["commit"] == "abc"
    assert found["cosmos3_nano"] == {"one_device_ms": [2.0]}
    assert found["cosmos3_super"] == {"error": "RuntimeError: out of memory"}
    assert found["pi05"]["speedup"] == 2
    assert "failed: cosmos3_super" in capsys.readouterr().err


def test_the_full_sizes_are_those_of_the_models(multi, monkeypatch):
    from phyai.models.cosmos3 import bench_parallel
    from phyai.models.cosmos3.config import Cosmos3Config

    asked = []
    monkeypatch.setattr(
        bench_parallel, "time_ranks", lambda config, *_, **more: asked.append((config, more)) or {}
    )
    options = type("Options", (), {"tiny": False})()
    check = multi.Check(options, 8, None, {})
    check.cosmos3(large=False)
    check.cosmos3(large=True)
    (nano, first), (large, second) = asked
    assert (nano, large) == (Cosmos3Config.nano(), Cosmos3Config.super_())
    assert (first["grids"], first["alone"]) == ([(2, 4), (1, 8)], True)
    assert (second["grids"], second["alone"]) == ([(2, 4)], False)
    assert first["policy"].is_file()
