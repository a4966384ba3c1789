"""Soak of a server on loopback: four clients for half an hour, and nothing may grow.

    python packages/phyai-engine/benchmarks/soak_serving.py CHECKPOINT --output soak.json
    python packages/phyai-engine/benchmarks/soak_serving.py --table soak.json

The server runs in a process of its own. Its clients ask at a fixed rate, each in its own way: one
goes on with one connection, one continues its last chunk in a session, one connects anew all the
time under a new session name and at times leaves before the reply, one sends every second request
with a picture that can not be used. Every ``--every`` seconds resident memory, open files and
threads of the server and its replicas and the length of its queue are written down. The run fails
when a median of the last fifth exceeds that of the second fifth by more than the bound, when more
requests wait than two for each client, when a reply is missing, or when a connection or a file is
left after the clients have gone. Reads ``/proc``, so it runs on Linux.
"""

import argparse
import contextlib
import json
import statistics
import sys
import threading
import time
import urllib.request
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import torch
from _environment import environment
from _results import store
from _serving_load import Server, observation
from websockets.sync.client import connect

from phyai.client import PolicyClient, ServerError
from phyai.client.codec import packb

# The largest growth of the median from the second fifth of the run to the last one.
BOUNDS = {"rss_mib": 8.0, "open_files": 2.0, "threads": 2.0}
# What must be zero once the clients have gone.
GONE = ("queue", "connections")
_NEW_CONNECTION_EVERY = 10


class Client:
    """One client with a habit, in a thread of its own, at a fixed rate."""

    def __init__(self, port: int, number: int, rate: float) -> None:
        self.times: list[tuple[float, float]] = []
        self.refused: int = 0
        self.left: int = 0
        self.errors: list[str] = []
        self._port, self._number, self._pause = port, number, 1 / rate
        self._stop = threading.Event()
        habits = (self._steady, self._continuing, self._reconnecting, self._mistaken)
        self._thread = threading.Thread(target=self._run, args=(habits[number % len(habits)],))
        self._thread.start()

    def stop(self) -> None:
        """Wait for the last reply."""
        self._stop.set()
        self._thread.join()

    def _run(self, habit: Any) -> None:
        while not self._stop.is_set():
            try:
                habit()
            except Exception as error:
                self.errors.append(repr(error))

    def _ask(self, client: PolicyClient, rounds: int | None = None, **options: Any) -> None:
        """Send requests at the rate until told to stop, or so many."""
        request = observation(client.metadata, self._number)
        while not self._stop.is_set() and rounds != 0:
            started = time.monotonic()
            client.infer(request, seed=self._number, **options)
            done = time.monotonic()
            self.times.append((started, done))
            rounds = None if rounds is None else rounds - 1
            self._stop.wait(max(self._pause - (done - started), 0))

    def _steady(self) -> None:
        with PolicyClient(port=self._port, timeout_s=120) as client:
            self._ask(client)

    def _continuing(self) -> None:
        session = f"robot {self._number}"
        with PolicyClient(port=self._port, timeout_s=120, session=session) as client:
            self._ask(client, rtc={"executed": 4, "delay": 2})

    def _reconnecting(self) -> None:
        session = f"episode {len(self.times)}"
        with PolicyClient(port=self._port, timeout_s=120, session=session) as client:
            self._ask(client, _NEW_CONNECTION_EVERY, rtc={"executed": 4})
            frame = packb(observation(client.metadata, self._number))
        with connect(f"ws://127.0.0.1:{self._port}", compression=None) as socket:
            socket.recv()
            socket.send(frame)
            self.left += 1

    def _mistaken(self) -> None:
        with PolicyClient(port=self._port, timeout_s=120) as client:
            request = observation(client.metadata, self._number)
            wrong = request | {client.metadata["image_keys"][0]: b"no picture"}
            while not self._stop.is_set():
                self._ask(client, 1)
                try:
                    client.infer(wrong)
                except ServerError:
                    self.refused += 1
                else:
                    self.errors.append("a request without a picture got an answer")


def family(pid: int) -> list[int]:
    """Return the process and all below it."""
    try:
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    except OSError:
        return []
    return [pid, *(below for child in children for below in family(int(child)))]


def resources(pid: int) -> dict[str, float]:
    """Return memory, open files and threads of a process and all below it, summed."""
    total = dict.fromkeys(BOUNDS, 0.0)
    for member in family(pid):
        try:
            status = Path(f"/proc/{member}/status").read_text()
            files = len(list(Path(f"/proc/{member}/fd").iterdir()))
        except OSError:
            continue  # it has just ended
        fields = dict(line.split(":", 1) for line in status.splitlines())
        total["rss_mib"] += int(fields["VmRSS"].split()[0]) / 1024
        total["threads"] += int(fields["Threads"])
        total["open_files"] += files
    return total


def gauge(port: int, name: str) -> float:
    """Return a number from the server's metrics."""
    page = urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=30).read().decode()
    return float(next(line.split()[1] for line in page.splitlines() if line.startswith(name + " ")))


def sample(server: Server, started: float) -> dict[str, float]:
    """Return what the server holds now."""
    return {
        "at_s": round(time.monotonic() - started, 1),
        "queue": gauge(server.port, "phyai_queue_length"),
        "connections": gauge(server.port, "phyai_connections"),
        **resources(server.process.pid),
    }


def latencies(times: Sequence[tuple[float, float]], started: float) -> list[dict[str, float]]:
    """Return requests, p50 and p99 in milliseconds of every minute."""
    minutes: dict[int, list[float]] = {}
    for began, done in times:
        minutes.setdefault(int((began - started) // 60), []).append(1e3 * (done - began))
    return [
        {
            "minute": minute,
            "requests": len(took),
            "p50_ms": round(float(np.quantile(took, 0.5)), 1),
            "p99_ms": round(float(np.quantile(took, 0.99)), 1),
        }
        for minute, took in sorted(minutes.items())
    ]


def growth(samples: Sequence[Mapping[str, float]], name: str) -> float:
    """Return how much the median of the last fifth exceeds that of the second fifth."""
    fifth = max(len(samples) // 5, 1)
    early = statistics.median(found[name] for found in samples[fifth : 2 * fifth] or samples)
    return statistics.median(found[name] for found in samples[-fifth:]) - early


def faults(document: Mapping[str, Any], bounds: Mapping[str, float]) -> list[str]:
    """Return what is wrong with a run, one sentence each."""
    samples, after = document["samples"], document["after"]
    found = [
        f"{name} grew by {growth(samples, name):.1f}, allowed {bound:g}"
        for name, bound in bounds.items()
        if growth(samples, name) > bound
    ]
    longest, clients = max(each["queue"] for each in samples), document["clients"]
    if longest > 2 * clients:
        found.append(f"{longest:g} requests waited, from {clients} clients")
    found += [f"{after[name]:g} {name} after the clients" for name in GONE if after[name]]
    left = after["open_files"] - document["before"]["open_files"]
    if left > bounds["open_files"]:
        found.append(f"{left:g} files are open that were not before the clients")
    if document["errors"]:
        found.append(f"{len(document['errors'])} errors, the first: {document['errors'][0]}")
    return found


def settled(server: Server, started: float, timeout_s: float = 60) -> dict[str, float]:
    """Return what the server holds once the last connection is closed, or after the timeout."""
    deadline = time.monotonic() + timeout_s
    while True:
        found = sample(server, started)
        if not any(found[name] for name in GONE) or time.monotonic() > deadline:
            return found
        time.sleep(0.1)


def soak(server: Server, options: argparse.Namespace) -> dict[str, Any]:
    """Run the clients for so long and return what was seen."""
    place = environment(torch.device("cpu"), options.commit)
    started = time.monotonic()
    before = sample(server, started)
    clients = [Client(server.port, number, options.rate) for number in range(options.clients)]
    samples: list[dict[str, float]] = []
    try:
        while not all(client.times or client.errors for client in clients):
            time.sleep(0.05)  # a client that comes late is no growth
        began = time.monotonic()
        while time.monotonic() - began < 60 * options.minutes:
            time.sleep(options.every)
            samples.append(sample(server, started))
    finally:
        for client in clients:
            client.stop()
    times = [time for client in clients for time in client.times]
    return {
        "date": datetime.now(UTC).date().isoformat(),
        "environment": place,
        "minutes": options.minutes,
        "clients": options.clients,
        "rate_hz": options.rate,
        "replicas": options.replicas,
        "replies": len(times),
        "refused": sum(client.refused for client in clients),
        "left_early": sum(client.left for client in clients),
        "errors": [error for client in clients for error in client.errors],
        "latencies": latencies(times, started),
        "before": before,
        "samples": samples,
        "after": settled(server, started),
    }


def table(document: Mapping[str, Any]) -> str:
    """Return a run as a table: one line for each sixth of it."""
    samples, minutes = document["samples"], document["latencies"]
    lines = [
        "| minutes | replies | p50 ms | p99 ms | resident MiB | open files | threads | queue |",
        "| --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    step = max(round(document["minutes"] / 6), 1)
    for first in range(0, round(document["minutes"]), step):
        inside = [each for each in samples if first <= each["at_s"] / 60 < first + step]
        rows = [each for each in minutes if first <= each["minute"] < first + step]
        median = {name: statistics.median(each[name] for each in inside) for name in BOUNDS}
        lines.append(
            f"| {first}–{first + step} | {sum(each['requests'] for each in rows)} | "
            f"{statistics.median(each['p50_ms'] for each in rows):.0f} | "
            f"{max(each['p99_ms'] for each in rows):.0f} | {median['rss_mib']:.1f} | "
            f"{median['open_files']:.0f} | {median['threads']:.0f} | "
            f"{max(each['queue'] for each in inside):.0f} |"
        )
    return "\n".join(lines)


def main(words: Sequence[str] | None = None) -> int:
    """Command line; the status is 1 when something grew, was lost or was left."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("checkpoint", type=Path, nargs="?")
    parser.add_argument("--table", type=Path, metavar="FILE", help="print the table of a run")
    parser.add_argument("--output", type=Path, help="JSON of everything that was seen")
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--every", type=float, default=10.0, help="seconds between samples")
    parser.add_argument("--clients", type=int, default=4)
    parser.add_argument("--rate", type=float, default=2.0, help="requests a second and client")
    parser.add_argument("--replicas", type=int, default=0)
    parser.add_argument("--max-growth-mib", type=float, default=BOUNDS["rss_mib"])
    parser.add_argument("--commit")
    options = parser.parse_args(words)
    if options.table:
        print(table(json.loads(options.table.read_text(encoding="utf-8"))))
        return 0
    if options.checkpoint is None:
        parser.error("a checkpoint is needed, such as examples/pi05/reach/checkpoint")
    bounds = BOUNDS | {"rss_mib": options.max_growth_mib}
    with contextlib.closing(Server(options.checkpoint, options.replicas, "cpu")) as server:
        document = soak(server, options)
    document["growth"] = {name: round(growth(document["samples"], name), 2) for name in bounds}
    document["bounds"] = bounds
    store(document, options.output)
    print(f"{document['replies']} replies, growth {document['growth']}")
    wrong = faults(document, bounds)
    for line in wrong:
        print(line, file=sys.stderr)
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
