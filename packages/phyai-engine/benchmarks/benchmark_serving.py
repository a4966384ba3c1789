"""Latency of a server with 1, 4 and 16 clients, and what a killed replica costs under load.

    python packages/phyai-engine/benchmarks/benchmark_serving.py CHECKPOINT [--replicas N] [--kill]
        [--json FILE]

The server runs in a process of its own on this machine's loopback. Each client asks as soon as it
has its reply. Meanwhile the health page and a new connection are timed. With ``--kill`` one replica
then gets SIGKILL under as many clients as there were at most, and every request is accounted for.
The JSON is written after every part.
"""

import argparse
import contextlib
import os
import signal
import threading
import time
import urllib.request
from pathlib import Path
from typing import Any, Self

import numpy as np
from _results import store
from _serving_load import Server, observation

from phyai.client import PolicyClient

COLUMNS = (
    "clients",
    "p50 ms",
    "p90 ms",
    "p99 ms",
    "chunks/s",
    "batch",
    "healthz ms",
    "handshake ms",
)
ROOM = 8
"""Connections beside those of the clients: one is opened every 0.2 s."""


class Clients:
    """Clients that ask back to back until the context ends.

    Args:
        port: Of the server.
        count: Of clients, a thread and a connection each.

    Attributes:
        times: When each request with a chunk was sent and answered.
        errors: What became of the others.
        batches: How many were computed together, for each chunk.
        sent: Requests, those of a client that could not connect counted as one.
    """

    def __init__(self, port: int, count: int) -> None:
        self.times: list[tuple[float, float]] = []
        self.errors: list[str] = []
        self.batches: list[int] = []
        self.sent = 0
        self._stop, self._lock = threading.Event(), threading.Lock()
        self._threads = [
            threading.Thread(target=self._ask, args=(port, number)) for number in range(count)
        ]
        for thread in self._threads:
            thread.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        """Wait until every client has its last reply."""
        self._stop.set()
        for thread in self._threads:
            thread.join()

    def _ask(self, port: int, number: int) -> None:
        try:
            client = PolicyClient(port=port, timeout_s=120)
        except Exception as error:
            self._count()
            self.errors.append(repr(error))
            return
        with client:
            request = observation(client.metadata, number)
            while not self._stop.is_set():
                self._count()
                started = time.monotonic()
                try:
                    reply = client.infer(request, seed=number)
                except Exception as error:
                    self.errors.append(repr(error))
                    self._stop.wait(0.1)
                else:
                    self.times.append((started, time.monotonic()))
                    self.batches.append(reply["server_timing"]["batch"])

    def _count(self) -> None:
        with self._lock:
            self.sent += 1


def probes(port: int, seconds: float) -> tuple[float, float]:
    """Return the longest time in milliseconds of a health page and of a new connection."""
    pages, handshakes = [], []
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        started = time.monotonic()
        urllib.request.urlopen(f"http://127.0.0.1:{port}/healthz", timeout=10).read()
        pages.append(time.monotonic() - started)
        started = time.monotonic()
        PolicyClient(port=port).close()
        handshakes.append(time.monotonic() - started)
        time.sleep(0.2)
    return 1e3 * max(pages), 1e3 * max(handshakes)


def measure(server: Server, count: int, seconds: float) -> dict[str, float]:
    """Run `count` clients for `seconds` and return a row of the table.

    Raises:
        RuntimeError: A request failed, or none was answered in time.
    """
    with Clients(server.port, count) as clients:
        probes(server.port, 1.0)
        start = time.monotonic()
        page_ms, handshake_ms = probes(server.port, seconds)
        end = time.monotonic()
    took = [1e3 * (done - began) for began, done in clients.times if start <= began <= end]
    if clients.errors or not took:
        raise RuntimeError(
            f"{len(clients.errors)} errors, {len(took)} chunks: {[*clients.errors, ''][0]}"
        )
    p50, p90, p99 = np.quantile(took, (0.5, 0.9, 0.99))
    found = (count, p50, p90, p99, len(took) / (end - start), float(np.mean(clients.batches)))
    row = zip(COLUMNS, (*found, page_ms, handshake_ms), strict=True)
    rounded = {name: round(float(value), 3) for name, value in row}
    return rounded | {"seconds": round(end - start, 1)}


def kill_one(server: Server, replicas: int, count: int, seconds: float) -> dict[str, Any]:
    """Kill a replica under load and return what became of the requests.

    Args:
        server: With replicas.
        replicas: How many.
        count: Of clients.
        seconds: Of load, half of it before the death and half after the replica is back.
    """
    with Clients(server.port, count) as clients:
        time.sleep(seconds / 2)
        pid = server.wait_for("replica ready")["pid"]
        killed = time.monotonic()
        os.kill(pid, signal.SIGKILL)
        back = server.wait_for("replica ready", replicas + 1)["at"] - killed
        time.sleep(seconds / 2)
    moved = sum(event["event"] == "request goes to another replica" for event in server.events)
    found: dict[str, Any] = {
        "clients": count,
        "requests": clients.sent,
        "replies": len(clients.times),
        "lost": clients.sent - len(clients.times),
        "moved": moved,
        "longest_s": round(max((done - began for began, done in clients.times), default=0), 2),
        "back_after_s": round(back, 1),
    }
    if clients.errors:
        found["first_error"] = clients.errors[0]
    print(f"killed 1 of {replicas} replicas: {found}", flush=True)
    return found


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description="Latency of phyai serve")
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("--device")
    parser.add_argument("--replicas", type=int, default=0)
    parser.add_argument("--clients", type=int, nargs="+", default=[1, 4, 16])
    parser.add_argument("--seconds", type=float, default=8.0)
    parser.add_argument("--kill", action="store_true")
    parser.add_argument("--kill-seconds", type=float, help="of load around it; default: --seconds")
    parser.add_argument("--kernel-config", help="policy of kernels; default: the server's")
    parser.add_argument("--json", type=Path, help="also store the table")
    parser.add_argument("--events", action="store_true", help="print the server's log")
    args = parser.parse_args()
    if args.kill and not args.replicas:
        parser.error("--kill needs a replica to kill; add --replicas N")
    server = Server(
        args.checkpoint,
        args.replicas,
        args.device,
        kernel_policy=args.kernel_config,
        connections=max(args.clients) + ROOM,
        show=args.events,
    )
    document: dict[str, Any] = {"replicas": args.replicas, "ready_s": server.ready_s, "rows": []}
    with contextlib.closing(server):
        print(f"ready after {server.ready_s} s", flush=True)
        print(f"| {' | '.join(COLUMNS)} |\n|{' --- |' * len(COLUMNS)}", flush=True)
        for count in args.clients:
            row = measure(server, count, args.seconds)
            cells = (f"{row[name]:.{int(name in ('chunks/s', 'batch'))}f}" for name in COLUMNS)
            print(f"| {' | '.join(cells)} |", flush=True)
            document["rows"].append(row)
            store(document, args.json)
        if args.kill:
            seconds = args.seconds if args.kill_seconds is None else args.kill_seconds
            killed = kill_one(server, args.replicas, max(args.clients), seconds)
            document["killed"] = killed
            store(document, args.json)
            if killed["lost"]:
                raise RuntimeError(f"{killed['lost']} requests have no chunk: {killed}")


if __name__ == "__main__":
    main()
