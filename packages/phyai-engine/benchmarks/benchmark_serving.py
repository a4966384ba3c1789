"""Latency of a server with 1, 4 and 16 clients, and what a killed replica costs under load.

    python packages/phyai-engine/benchmarks/benchmark_serving.py CHECKPOINT [--replicas N] [--kill]
        [--json FILE]

The server runs in a process of its own on this machine's loopback. Each client asks as soon as it
has its reply. Meanwhile the health page and a new connection are timed. With ``--kill`` one replica
gets SIGKILL in the middle of the run with most clients, and every request is accounted for.
"""

import argparse
import contextlib
import json
import os
import signal
import threading
import time
import urllib.request
from pathlib import Path
from typing import Any

import numpy as np
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
    """Clients that ask back to back."""

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

    def stop(self) -> None:
        """Wait until every client has its last reply."""
        self._stop.set()
        for thread in self._threads:
            thread.join()

    def _ask(self, port: int, number: int) -> None:
        with PolicyClient(port=port, timeout_s=120) as client:
            request = observation(client.metadata, number)
            while not self._stop.is_set():
                with self._lock:
                    self.sent += 1
                started = time.monotonic()
                try:
                    reply = client.infer(request, seed=number)
                except Exception as error:
                    self.errors.append(repr(error))
                else:
                    self.times.append((started, time.monotonic()))
                    self.batches.append(reply["server_timing"]["batch"])


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
    """Run `count` clients for `seconds` and return a row of the table."""
    clients = Clients(server.port, count)
    probes(server.port, 1.0)
    start = time.monotonic()
    page_ms, handshake_ms = probes(server.port, seconds)
    end = time.monotonic()
    clients.stop()
    took = [1e3 * (done - began) for began, done in clients.times if start <= began <= end]
    p50, p90, p99 = np.quantile(took, (0.5, 0.9, 0.99))
    if clients.errors:
        raise RuntimeError(f"{len(clients.errors)} errors: {clients.errors[0]}")
    found = (count, p50, p90, p99, len(took) / (end - start), float(np.mean(clients.batches)))
    return dict(zip(COLUMNS, map(float, (*found, page_ms, handshake_ms)), strict=True))


def kill_one(server: Server, replicas: int, count: int, seconds: float) -> dict[str, float]:
    """Kill a replica under load and return what became of the requests."""
    clients = Clients(server.port, count)
    time.sleep(seconds / 2)
    pid = server.wait_for("replica ready")["pid"]
    killed = time.monotonic()
    os.kill(pid, signal.SIGKILL)
    back = server.wait_for("replica ready", replicas + 1)["at"] - killed
    time.sleep(seconds / 2)
    clients.stop()
    longest = max(done - began for began, done in clients.times)
    moved = sum(event["event"] == "request goes to another replica" for event in server.events)
    found = {
        "clients": count,
        "requests": clients.sent,
        "replies": len(clients.times),
        "errors": len(clients.errors),
        "moved": moved,
        "longest_s": round(longest, 2),
        "back_after_s": round(back, 1),
    }
    print(f"killed 1 of {replicas} replicas: {found}", flush=True)
    if len(clients.times) + len(clients.errors) != clients.sent:
        raise RuntimeError("a request was lost")
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
    document: dict[str, Any] = {"replicas": args.replicas, "rows": []}
    with contextlib.closing(server):
        print(f"| {' | '.join(COLUMNS)} |\n|{' --- |' * len(COLUMNS)}", flush=True)
        for count in args.clients:
            row = measure(server, count, args.seconds)
            cells = (f"{row[name]:.{int(name in ('chunks/s', 'batch'))}f}" for name in COLUMNS)
            print(f"| {' | '.join(cells)} |", flush=True)
            document["rows"].append(row)
        if args.kill:
            document["killed"] = kill_one(server, args.replicas, max(args.clients), args.seconds)
    if args.json is not None:
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
