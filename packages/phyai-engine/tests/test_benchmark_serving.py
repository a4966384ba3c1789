"""The load on a server: every request is accounted for, and results are stored as they come."""

import importlib
import json
import sys
import threading
import time
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).resolve().parents[1] / "benchmarks"


@pytest.fixture
def serving(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    for name in ("benchmark_serving", "_serving_load"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    return importlib.import_module("benchmark_serving")


class Robot:
    """A client whose second request fails; the first client is refused."""

    made = 0

    def __init__(self, port, timeout_s=30.0):
        type(self).made += 1
        self.number = self.made
        if self.number == 1:
            raise ConnectionError("refused")
        self.asked = 0
        self.metadata = {"image_shape": (2, 2, 3), "image_keys": ["a"], "state_dim": 3}

    def __enter__(self):
        return self

    def __exit__(self, *exception):
        pass

    def infer(self, request, seed):
        assert request["a"].shape == (2, 2, 3)
        time.sleep(0.01)
        self.asked += 1
        if self.asked == 2:
            raise RuntimeError("the server is busy")
        return {"server_timing": {"batch": 2}}


class Behind:
    """A server with replicas, one of which comes back."""

    port = 1
    ready_s = 3.5

    def __init__(self, *arguments, **options):
        self.events = [{"event": "request goes to another replica"}]
        self.closed = False

    def wait_for(self, name, count=1):
        assert name == "replica ready"
        if count == 3:
            time.sleep(0.3)
        return {"pid": 7, "at": time.monotonic()}

    def close(self):
        self.closed = True


@pytest.fixture
def clients(serving, monkeypatch):
    robot = type("Robot", (Robot,), {"made": 0})
    monkeypatch.setattr(serving, "PolicyClient", robot)
    killed = []
    monkeypatch.setattr(serving.os, "kill", lambda pid, signal: killed.append(pid))
    monkeypatch.setattr(serving, "probes", lambda port, seconds: time.sleep(seconds) or (1.0, 2.0))
    return robot, killed


def test_a_killed_replica_and_every_request(serving, clients, capsys):
    robot, killed = clients
    threads = threading.active_count()
    found = serving.kill_one(Behind(), 2, 3, 0.4)
    assert killed == [7]
    assert found["lost"] == 3, "one not connected, and one of each other client"
    assert found["replies"] == found["requests"] - 3 > 0
    assert "refused" in found["first_error"]
    assert (found["clients"], found["moved"]) == (3, 1)
    assert found["back_after_s"] >= 0.3
    assert threading.active_count() == threads, "the clients have ended"
    robot.made = 1
    robot.infer = lambda self, request, seed: time.sleep(0.01) or {"server_timing": {"batch": 2}}
    found = serving.kill_one(Behind(), 2, 2, 0.4)
    assert found["lost"] == 0
    assert "first_error" not in found
    assert "'lost': 0" in capsys.readouterr().out


def test_clients_end_where_the_replica_does_not_come_back(serving, clients):
    class Gone(Behind):
        def wait_for(self, name, count=1):
            if count == 3:
                raise TimeoutError("no event 'replica ready' within 300 s")
            return super().wait_for(name, count)

    threads = threading.active_count()
    with pytest.raises(TimeoutError):
        serving.kill_one(Gone(), 2, 2, 0.1)
    assert threading.active_count() == threads


def test_a_row_is_no_row_with_errors(serving, clients):
    with pytest.raises(RuntimeError, match=r"\d errors, \d+ chunks: ConnectionError\('refused'\)"):
        serving.measure(Behind(), 2, 0.3)
    robot, _ = clients
    robot.infer = lambda self, request, seed: time.sleep(0.01) or {"server_timing": {"batch": 2}}
    row = serving.measure(Behind(), 2, 0.5)
    assert tuple(row) == (*serving.COLUMNS, "seconds")
    assert row["batch"] == 2
    assert (row["healthz ms"], row["handshake ms"]) == (1, 2)
    assert 10 <= row["p50 ms"] <= row["p90 ms"] <= row["p99 ms"]
    assert row["seconds"] >= 0.5


def test_what_came_before_a_lost_reply_is_stored(serving, monkeypatch, tmp_path):
    servers = []
    monkeypatch.setattr(
        serving, "Server", lambda *a, **o: servers.append(Behind(*a, **o)) or servers[-1]
    )
    row = dict.fromkeys(serving.COLUMNS, 1.0)
    monkeypatch.setattr(serving, "measure", lambda *_: row)
    seen = []

    def kill_one(server, replicas, count, seconds):
        seen.append((replicas, count, seconds, json.loads(output.read_text())))
        return {"lost": 2}

    monkeypatch.setattr(serving, "kill_one", kill_one)
    output = tmp_path / "folder" / "found.json"
    options = ["--replicas", "2", "--clients", "1", "4", "--kill", "--json", str(output)]
    monkeypatch.setattr(sys, "argv", ["benchmark", "checkpoint", *options, "--kill-seconds", "3"])
    with pytest.raises(RuntimeError, match="2 requests have no chunk"):
        serving.main()
    before = {"replicas": 2, "ready_s": 3.5, "rows": [row, row]}
    assert seen == [(2, 4, 3.0, before)]
    assert json.loads(output.read_text()) == before | {"killed": {"lost": 2}}
    assert [path.name for path in output.parent.iterdir()] == ["found.json"]
    assert servers[0].closed


def test_a_server_that_does_not_listen_in_time_is_ended(serving, monkeypatch):
    load = sys.modules["_serving_load"]
    sleeper = [sys.executable, "-c", "import time; time.sleep(60)"]
    started = []
    make = load.subprocess.Popen
    monkeypatch.setattr(
        load.subprocess, "Popen", lambda _, **o: started.append(make(sleeper, **o)) or started[-1]
    )

    def late(self, name, count=1, timeout_s=0.0):
        raise TimeoutError(name)

    monkeypatch.setattr(load.Server, "wait_for", late)
    with pytest.raises(TimeoutError, match="listening"):
        load.Server(Path("checkpoint"), 0, None)
    assert started[0].poll() is not None
