"""The soak of the server runs, sees what a process holds, and fails on what it should."""

import copy
import importlib.util
import json
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from .conftest import REACH, REPOSITORY

BENCHMARKS = REPOSITORY / "packages" / "phyai-engine" / "benchmarks"
pytestmark = pytest.mark.skipif(
    not Path("/proc/self/task").exists(), reason="the soak reads /proc, which only Linux has"
)


@pytest.fixture(scope="module")
def soak():
    sys.path.insert(0, str(BENCHMARKS))
    spec = importlib.util.spec_from_file_location("soak_serving", BENCHMARKS / "soak_serving.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    yield module
    sys.path.remove(str(BENCHMARKS))


def sample(minute, **changed):
    held = {"queue": 1.0, "connections": 4.0, "rss_mib": 600.0, "open_files": 12.0, "threads": 3.0}
    return {"at_s": 60.0 * minute, **held} | changed


@pytest.fixture
def steady():
    """A run of 30 minutes in which nothing grew."""
    idle = {"queue": 0.0, "connections": 0.0}
    return {
        "minutes": 30.0,
        "clients": 4,
        "errors": [],
        "before": sample(0, open_files=8.0, **idle),
        "samples": [sample(minute) for minute in range(30)],
        "after": sample(30, open_files=8.0, **idle),
        "latencies": [
            {"minute": minute, "requests": 480, "p50_ms": 40.0, "p99_ms": 90.0 + minute}
            for minute in range(30)
        ],
    }


def test_a_short_soak_of_the_real_server_passes(soak, tmp_path, monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    file = tmp_path / "soak.json"
    words = [str(REACH), "--minutes", "0.05", "--every", "0.5", "--output", str(file)]
    assert soak.main([*words, "--max-growth-mib", "256", "--commit", "abc"]) == 0
    document = json.loads(file.read_text())
    assert document["errors"] == []
    assert document["replies"] == sum(each["requests"] for each in document["latencies"])
    assert (document["clients"], document["environment"]["commit"]) == (4, "abc")
    assert all(each["rss_mib"] > 50 and each["threads"] >= 1 for each in document["samples"])
    assert (document["after"]["connections"], document["after"]["queue"]) == (0, 0)


def test_files_threads_and_processes_are_counted(soak):
    before = soak.resources(os.getpid())
    done = threading.Event()
    threads = [threading.Thread(target=done.wait) for _ in range(3)]
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    files = [os.open(os.devnull, os.O_RDONLY) for _ in range(20)]
    for thread in threads:
        thread.start()
    try:
        now = soak.resources(os.getpid())
        assert child.pid in soak.family(os.getpid())
        assert now["open_files"] >= before["open_files"] + 20
        assert now["threads"] >= before["threads"] + 3 + 1
    finally:
        done.set()
        for file in files:
            os.close(file)
        child.communicate()
    assert soak.family(child.pid) == []


def test_a_steady_run_has_no_fault_and_its_table_covers_it(soak, steady):
    assert soak.faults(steady, soak.BOUNDS) == []
    lines = soak.table(steady).splitlines()
    assert len(lines) == 2 + 6
    assert lines[2] == "| 0–5 | 2400 | 40 | 94 | 600.0 | 12 | 3 | 1 |"


def test_the_stored_run_passes_and_the_page_shows_it(soak):
    run = json.loads((BENCHMARKS / "results" / "cpu" / "soak.json").read_text())
    assert run["minutes"] >= 30
    assert soak.faults(run, soak.BOUNDS) == []
    page = (REPOSITORY / "docs" / "serving.md").read_text(encoding="utf-8")
    assert soak.table(run) in page
    assert f"{run['replies']} replies, {run['refused']} refusals" in " ".join(page.split())


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda run: grow(run, "rss_mib", 1.0), "rss_mib grew by 18.0, allowed 8"),
        (lambda run: grow(run, "open_files", 0.25), "open_files grew by 4.5"),
        (lambda run: grow(run, "threads", 0.25), "threads grew by 4.5"),
        (lambda run: run["samples"][7].update(queue=9.0), "9 requests waited, from 4 clients"),
        (lambda run: run["after"].update(connections=1.0), "1 connections after the clients"),
        (lambda run: run["after"].update(queue=2.0), "2 queue after the clients"),
        (lambda run: run["after"].update(open_files=11.0), "3 files are open"),
        (lambda run: run["errors"].append("TimeoutError()"), "1 errors, the first: TimeoutError()"),
    ],
)
def test_what_grows_or_is_left_is_a_fault(soak, steady, change, said):
    run = copy.deepcopy(steady)
    change(run)
    (found,) = soak.faults(run, soak.BOUNDS)
    assert said in found


def grow(run, name, per_minute):
    for minute, each in enumerate(run["samples"]):
        each[name] += per_minute * minute


def test_memory_of_the_first_fifth_is_not_growth(soak, steady):
    """Arenas and caches fill then."""
    for each in steady["samples"][:6]:
        each["rss_mib"] -= 100
    assert soak.faults(steady, soak.BOUNDS) == []
