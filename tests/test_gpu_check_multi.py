"""scripts/gpu_check_multi.py: its parts, what fails or takes too long, and what is stored."""

import importlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

SCRIPTS = Path(__file__).resolve().parent.parent / "scripts"
MODULES = (
    "gpu_check_multi",
    "_multi_parts",
    "_time_limit",
    "_device_run",
    "_environment",
    "_results",
)
posix = pytest.mark.skipif(os.name != "posix", reason="needs process groups and interval timers")


@pytest.fixture
def multi(monkeypatch):
    monkeypatch.syspath_prepend(str(SCRIPTS))
    for name in MODULES:
        monkeypatch.delitem(sys.modules, name, raising=False)
    module = importlib.import_module("gpu_check_multi")
    monkeypatch.setattr(module, "use_this_checkout", lambda: None)
    monkeypatch.setattr(sys, "path", [*sys.path])
    return module


@pytest.fixture
def parts(multi):
    return sys.modules["_multi_parts"]


@pytest.fixture
def asked(monkeypatch):
    """What the timing of ranks is asked for."""
    calls = []
    bench = importlib.import_module("phyai.models.cosmos3.bench_parallel")
    monkeypatch.setattr(
        bench, "time_ranks", lambda config, *_, **more: calls.append((config, more)) or {}
    )
    return calls


def rows(rate, **more):
    return {"rows": [{"chunks/s": rate}], **more}


@pytest.mark.parametrize(
    ("devices", "expected"),
    [(2, [(2, 1), (1, 2)]), (3, [(1, 3)]), (4, [(2, 2), (1, 4)]), (8, [(2, 4), (1, 8)])],
)
def test_devices_share_branches_first(parts, devices, expected):
    assert parts.grids(devices) == expected


def test_without_gpus_it_says_how_many_it_needs(multi, monkeypatch, capsys):
    monkeypatch.setattr("torch.cuda.device_count", lambda: 1)
    assert multi.main([]) == 2
    assert "1 GPUs; this check needs 2 or more" in capsys.readouterr().err


def test_results_are_stored_as_they_come_and_one_that_fails_stops_no_other(
    multi, parts, monkeypatch, tmp_path, capsys
):
    calls, stored = [], []
    output = tmp_path / "results" / "multi.json"

    def time_ranks(config, layout, sampling, *, grids, alone, kind, report, **_):
        calls.append((grids, alone, kind))
        report("one_device", {"ms": [2.0]})
        stored.append(json.loads(output.read_text()))
        if len(calls) == 2:
            raise RuntimeError("a rank has ended\nits message")
        report("layers", {"error": "OutOfMemoryError: too large"})

    def serve(self, checkpoint, replicas, seconds, folder, keep):
        calls.append((checkpoint, replicas, seconds))
        keep(rows(10.0 * replicas))
        return rows(10.0 * replicas)

    bench = importlib.import_module("phyai.models.cosmos3.bench_parallel")
    monkeypatch.setattr(bench, "time_ranks", time_ranks)
    monkeypatch.setattr(parts.Pi05, "_serve", serve)
    asked = ["--tiny", "--json", str(output), "--commit", "abc", "--one-seconds", "7"]
    assert multi.main(asked) == 1
    grids = [(2, 1), (1, 2)]
    assert calls == [
        (grids, True, "cpu"),
        (grids, True, "cpu"),
        (parts.REACH, 1, 7),
        (parts.REACH, 2, 60),
    ]
    assert [name for name in stored[0] if name.startswith("cosmos3")] == ["cosmos3_nano"]
    assert stored[1]["cosmos3_nano"]["layers"] == {"error": "OutOfMemoryError: too large"}
    assert stored[1]["cosmos3_super"]["one_device"] == {"ms": [2.0]}
    found = json.loads(output.read_text())
    assert found["devices"] == 2
    assert found["cosmos3_super"]["error"] == "RuntimeError: a rank has ended"
    assert found["cosmos3_super"]["one_device"] == {"ms": [2.0]}
    assert found["pi05"]["speedup"] == 2
    for part in multi.PARTS:
        assert found[part]["environment"]["commit"] == "abc"
        assert found[part]["seconds"] >= 0
    said = capsys.readouterr()
    assert said.err.splitlines()[-2:] == ["failed: cosmos3_nano", "failed: cosmos3_super"]
    assert 's] cosmos3_nano one_device {"ms": [2.0]}' in said.out


def test_parts_that_are_left_out_stay_as_they_were(multi, asked, tmp_path):
    output = tmp_path / "devices-2.json"
    output.write_text(json.dumps({"pi05": {"speedup": 1.9}, "cosmos3_nano": {"error": "old"}}))
    assert multi.main(["--tiny", "--json", str(output), "--only", "cosmos3_nano"]) == 0
    found = json.loads(output.read_text())
    assert len(asked) == 1
    assert found["pi05"] == {"speedup": 1.9}
    assert "error" not in found["cosmos3_nano"]
    assert "cosmos3_super" not in found


@posix
def test_a_part_that_takes_too_long_is_stopped_and_the_next_runs(multi, monkeypatch, tmp_path):
    bench = importlib.import_module("phyai.models.cosmos3.bench_parallel")
    calls = []

    def time_ranks(*_, report, **more):
        calls.append(report("one_device", {"ms": [2.0]}))
        try:
            time.sleep(60)
        except Exception:
            calls.append("a part goes on behind its limit")

    monkeypatch.setattr(bench, "time_ranks", time_ranks)
    output = tmp_path / "found.json"
    options = ["--tiny", "--json", str(output), "--limit", "2"]
    assert multi.main([*options, "--only", "cosmos3_nano", "cosmos3_super"]) == 1
    found = json.loads(output.read_text())
    assert len(calls) == 2
    for part in ("cosmos3_nano", "cosmos3_super"):
        assert found[part]["error"] == "OverLimitError: not done after 2 s"
        assert found[part]["one_device"] == {"ms": [2.0]}


def test_what_was_found_before_a_signal_is_stored(multi, monkeypatch, tmp_path):
    bench = importlib.import_module("phyai.models.cosmos3.bench_parallel")

    def time_ranks(*_, report, **more):
        report("one_device", {"ms": [2.0]})
        sys.exit(143)

    monkeypatch.setattr(bench, "time_ranks", time_ranks)
    output = tmp_path / "found.json"
    with pytest.raises(SystemExit):
        multi.main(["--tiny", "--json", str(output)])
    found = json.loads(output.read_text())
    assert found["cosmos3_nano"]["one_device"] == {"ms": [2.0]}
    assert found["cosmos3_nano"]["error"] == "stopped before its end"
    assert "pi05" not in found


def test_the_full_sizes_are_those_of_the_models(parts, asked):
    from phyai.models.cosmos3.config import Cosmos3Config

    kept = {}
    cosmos3 = parts.Cosmos3(8, 150e9, tiny=False)
    cosmos3.measure(kept.__setitem__, large=False)
    assert kept == {}
    cosmos3.measure(kept.__setitem__, large=True)
    (nano, first), (large, second) = asked
    assert (nano, large) == (Cosmos3Config.nano(), Cosmos3Config.super_())
    for call in (first, second):
        assert call["grids"] == [(2, 4), (1, 8)]
        assert call["alone"] is True
        assert call["policy"].is_file()
    assert (first["exact"], second["exact"]) == (True, False)
    assert kept == {
        "fp32": {
            "reason": "weights of 253 GB and 10 GB for the rest; a GPU has 150 GB",
        }
    }


def test_what_the_devices_have_no_memory_for_is_not_tried(parts, asked):
    kept = {}
    parts.Cosmos3(2, 80e9, tiny=False).measure(kept.__setitem__, large=True)
    ((_, call),) = asked
    assert (call["grids"], call["alone"], call["exact"]) == ([(1, 2)], False, False)
    assert sorted(kept) == ["branches", "fp32", "one_device"]
    assert kept["branches"]["reason"].startswith("weights of 126 GB and 10 GB")
    parts.Cosmos3(2, 48e9, tiny=False).measure(kept.__setitem__, large=True)
    assert len(asked) == 1, "two devices of 48 GB hold no half of Super"
    assert kept["layers"]["reason"].startswith("weights of 63 GB and 10 GB")


def serve_with(parts, tmp_path, code, keep):
    """Run a program in place of the load; it can `write` its results."""
    script = tmp_path / "benchmark_serving.py"
    script.write_text(f"{WRITE}\n{code}")
    options = type("Options", (), {"tiny": True, "clients": 3, "kill_seconds": 1.0})()
    return parts.Pi05(options, 2, tmp_path)._serve(Path("checkpoint"), 2, 5.0, tmp_path, keep)


WRITE = """
import json, pathlib, subprocess, sys, time
out = pathlib.Path(sys.argv[sys.argv.index("--json") + 1])
def write(value):
    out.with_suffix(".part").write_text(json.dumps(value))
    out.with_suffix(".part").replace(out)
"""


def runs(pid):
    """Whether a process exists; one that has ended may still wait for its parent to notice."""
    try:
        os.kill(pid, 0)
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (ProcessLookupError, FileNotFoundError):
        return False
    return state != "Z"


def test_the_load_is_asked_for_and_its_results_kept_as_they_come(parts, tmp_path):
    kept = []
    code = "write([1]); time.sleep(1); write(sys.argv[1:])"
    found = serve_with(parts, tmp_path, code, kept.append)
    assert kept[0] == [1]
    assert kept[-1] == found
    words = ["--replicas", "2", "--clients", "3", "--seconds", "5.0", "--json"]
    assert found == [
        *("checkpoint", *words, str(tmp_path / "2.json")),
        *("--device", "cpu", "--kill", "--kill-seconds", "1.0"),
    ]


def test_a_load_that_fails_keeps_what_it_found(parts, tmp_path):
    kept = []
    with pytest.raises(RuntimeError, match="2 replicas ended with status 3"):
        serve_with(parts, tmp_path, "write([1]); sys.exit(3)", kept.append)
    assert kept == [[1]]


@posix
def test_what_a_load_started_ends_with_it(parts, tmp_path):
    pids = []

    def stop(pid):
        pids.append(pid)
        raise KeyboardInterrupt

    code = "write(subprocess.Popen(['sleep', '60']).pid); time.sleep(60)"
    with pytest.raises(KeyboardInterrupt):
        serve_with(parts, tmp_path, code, stop)
    until = time.monotonic() + 30
    while runs(pids[0]):
        assert time.monotonic() < until
        time.sleep(0.05)


@posix
def test_a_program_that_does_not_end_is_killed(multi, tmp_path):
    limit = sys.modules["_time_limit"]
    ready = tmp_path / "ready"
    code = (
        "import pathlib, signal, sys, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); "
        "pathlib.Path(sys.argv[1]).touch(); time.sleep(600)"
    )
    with limit.program([sys.executable, "-c", code, str(ready)], grace_s=0.3) as process:
        while not ready.exists():
            assert process.poll() is None
            time.sleep(0.02)
    assert process.returncode == -signal.SIGKILL
    with limit.program([sys.executable, "-c", ""]) as process:
        process.wait()
    assert process.returncode == 0


@posix
def test_no_limit_is_left_behind(multi):
    limit = sys.modules["_time_limit"]
    before = signal.getsignal(signal.SIGALRM)
    with limit.time_limit(30):
        assert signal.getitimer(signal.ITIMER_REAL)[0] > 0
    assert signal.getitimer(signal.ITIMER_REAL) == (0, 0)
    assert signal.getsignal(signal.SIGALRM) == before


@pytest.mark.slow
def test_a_rehearsal_runs_every_part(tmp_path):
    output = tmp_path / "devices-2.json"
    options = ["--clients", "4", "--seconds", "1", "--kill-seconds", "1", "--json", str(output)]
    command = [sys.executable, str(SCRIPTS / "gpu_check_multi.py"), "--tiny", *options]
    subprocess.run(command, check=True, timeout=600)
    found = json.loads(output.read_text())
    for size in ("cosmos3_nano", "cosmos3_super"):
        for how in ("branches", "layers"):
            assert max(found[size][how]["difference"].values()) < 1e-5
    killed = found["pi05"]["many"]["killed"]
    assert killed["lost"] == 0
    assert killed["requests"] == killed["replies"] > 4
