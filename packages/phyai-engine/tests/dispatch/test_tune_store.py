"""The file of measured times: several writers, broken files, files that cannot be written."""

import json
import logging
import subprocess
import sys
import time

import pytest
from filelock import FileLock

from phyai.dispatch import tune_store
from phyai.dispatch.tune_store import SCHEMA, TuneStore, read_entries
from phyai.dispatch.tune_workload import Workload

WRITERS, ENTRIES = 4, 25

WRITER = """
import sys
from phyai.dispatch.tune_store import TuneStore
from phyai.dispatch.tune_workload import Workload

path, writer, entries = sys.argv[1], sys.argv[2], int(sys.argv[3])
store = TuneStore(path)
print("ready", flush=True)
sys.stdin.readline()
for number in range(entries):
    store.add(Workload({"shared": number}), {f"row{writer}": float(number)})
    store.add(Workload({"writer": writer, "number": number}), {"row": float(number)})
"""


def workload(**content):
    return Workload(content)


def entry(times, **content):
    return {"workload": content, "milliseconds": times}


def document(**workloads):
    return json.dumps({"schema": SCHEMA, "workloads": workloads})


def test_times_are_kept_and_read_by_another_store(tmp_path):
    path = tmp_path / "deep" / "times.json"
    store = TuneStore(path)
    other = TuneStore(path)
    store.add(workload(M=1), {"a": 1.0, "b": None})
    assert store.times(workload(M=1)) == {"a": 1.0, "b": None}
    assert other.times(workload(M=1)) == {"a": 1.0, "b": None}
    assert other.times(workload(M=2)) == {}
    content = json.loads(path.read_text())
    assert content["schema"] == "phyai.autotune/v1"
    assert content["workloads"] == {workload(M=1).digest: entry({"a": 1.0, "b": None}, M=1)}


def test_without_a_path_times_stay_in_memory(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    store = TuneStore(None)
    store.add(workload(M=1), {"a": 1.0})
    assert store.times(workload(M=1)) == {"a": 1.0}
    assert list(tmp_path.iterdir()) == []


def test_later_times_replace_those_of_the_same_rows_alone(tmp_path):
    path = tmp_path / "times.json"
    first, second = TuneStore(path), TuneStore(path)
    first.add(workload(M=1), {"a": 1.0, "b": 2.0})
    second.add(workload(M=1), {"b": 3.0, "c": 4.0})
    assert TuneStore(path).times(workload(M=1)) == {"a": 1.0, "b": 3.0, "c": 4.0}


def test_processes_that_write_one_file_lose_nothing(tmp_path):
    path = tmp_path / "times.json"
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", WRITER, str(path), str(writer), str(ENTRIES)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for writer in range(WRITERS)
    ]
    for process in processes:
        assert process.stdout.readline() == "ready\n"
    for process in processes:
        process.stdin.write("go\n")
        process.stdin.flush()
    seen = 0
    while any(process.poll() is None for process in processes):
        if path.exists():
            # Strict: a reader may never find half a file.
            found = len(json.loads(path.read_text())["workloads"])
            assert found >= seen
            seen = found
        time.sleep(0.002)
    assert [process.wait() for process in processes] == [0] * WRITERS
    store = TuneStore(path)
    for number in range(ENTRIES):
        rows = {f"row{writer}": float(number) for writer in range(WRITERS)}
        assert store.times(workload(shared=number)) == rows
        for writer in range(WRITERS):
            own = workload(writer=str(writer), number=number)
            assert store.times(own) == {"row": float(number)}
    assert {item.name for item in tmp_path.iterdir()} <= {"times.json", "times.json.lock"}


def test_a_writer_that_dies_leaves_the_old_file(tmp_path, monkeypatch):
    path = tmp_path / "times.json"
    TuneStore(path).add(workload(M=1), {"a": 1.0})
    before = path.read_text()

    def die(*args, **kwargs):
        raise KeyboardInterrupt

    monkeypatch.setattr(tune_store.json, "dump", die)
    with pytest.raises(KeyboardInterrupt):
        TuneStore(path).add(workload(M=2), {"a": 1.0})
    assert path.read_text() == before
    assert not list(tmp_path.glob("*.tmp"))


def test_a_lock_that_is_not_released_costs_a_warning(tmp_path, monkeypatch, caplog):
    path = tmp_path / "times.json"
    monkeypatch.setattr(tune_store, "LOCK_SECONDS", 0.05)
    store = TuneStore(path)
    with FileLock(f"{path}.lock"), caplog.at_level(logging.WARNING):
        store.add(workload(M=1), {"a": 1.0})
    assert "was not written" in caplog.text
    assert str(path) in caplog.text
    assert store.times(workload(M=1)) == {"a": 1.0}
    store.add(workload(M=2), {"a": 2.0})
    assert TuneStore(path).times(workload(M=1)) == {"a": 1.0}, "what failed is written later"


def test_a_folder_that_cannot_be_made_costs_a_warning(tmp_path, caplog):
    (tmp_path / "file").write_text("")
    store = TuneStore(tmp_path / "file" / "times.json")
    store.add(workload(M=1), {"a": 1.0})
    assert "was not written" in caplog.text
    assert store.times(workload(M=1)) == {"a": 1.0}


@pytest.mark.parametrize(
    "content",
    ["", "[1]", "{broken", "{}", '{"schema": "phyai.autotune/v9", "workloads": {}}', "\udcff"],
)
def test_files_of_another_kind_are_ignored_with_a_warning(tmp_path, caplog, content):
    path = tmp_path / "times.json"
    path.write_text(content, errors="surrogateescape")
    assert read_entries(path) == {}
    assert "is ignored" in caplog.text


def test_a_missing_file_is_no_reason_to_warn(tmp_path, caplog):
    assert read_entries(tmp_path / "times.json") == {}
    assert caplog.text == ""


@pytest.mark.parametrize(
    "broken",
    [
        1,
        {"milliseconds": {"a": 1.0}},
        entry([1.0], M=1),
        entry({"a": "1"}, M=1),
        entry({"a": True}, M=1),
        entry({"a": -1.0}, M=1),
        entry({"a": float("nan")}, M=1),
    ],
)
def test_entries_that_make_no_sense_are_left_out(tmp_path, broken):
    path = tmp_path / "times.json"
    path.write_text(document(bad=broken, good=entry({"a": 1.0}, M=1)))
    assert set(read_entries(path)) == {"good"}


def test_the_file_is_as_readable_as_any_other(tmp_path):
    path, other = tmp_path / "times.json", tmp_path / "other"
    other.write_text("")
    TuneStore(path).add(workload(M=1), {"a": 1.0})
    assert path.stat().st_mode == other.stat().st_mode


def test_the_users_folder_is_expanded(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    TuneStore("~/times.json").add(workload(M=1), {"a": 1.0})
    assert (tmp_path / "times.json").exists()
