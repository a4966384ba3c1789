"""``phyai serve`` as a process of its own, and the request that benchmarks send to it."""

import json
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np


class Server:
    """``phyai serve`` on a free port of the loopback, with its log.

    Args:
        checkpoint: What is served.
        replicas: Processes that compute; 0 computes in the server.
        device: Of the engines; None takes the server's choice.
        kernel_policy: File or name of the policy of kernels; None takes the server's choice.
        connections: Most clients at a time; None takes the server's choice.
        show: Print the log's events as they come, to tell what a slow start waits for.

    Attributes:
        process: The server.
        port: Where it listens.
        events: Lines of its log, with the time of this process in `at`.
        ready_s: Seconds from its start until it listened, its engines warm.

    Raises:
        RuntimeError: The server ended before it listened.
        TimeoutError: It did not listen within five minutes.
    """

    def __init__(
        self,
        checkpoint: Path,
        replicas: int,
        device: str | None,
        *,
        kernel_policy: str | None = None,
        connections: int | None = None,
        show: bool = False,
    ) -> None:
        self._show, self._started = show, time.monotonic()
        command = [sys.executable, "-m", "phyai", "serve"]
        self._folder = tempfile.TemporaryDirectory()
        if connections is None:
            command += ["--checkpoint", str(checkpoint)]
        else:
            limits = {"max_connections": connections, "max_queue": connections}
            path = Path(self._folder.name) / "server.yaml"
            arguments = {"checkpoint_dir": str(checkpoint.resolve())}
            path.write_text(json.dumps({"plugin_args": arguments, "server": limits}))
            command.append(str(path))
        command += ["--port", "0", "--replicas", str(replicas), "--max-batch", "16"]
        command += ["--device", device] if device else []
        command += ["--kernel-config", kernel_policy] if kernel_policy else []
        self.process: subprocess.Popen[str] = subprocess.Popen(  # noqa: S603
            command, stderr=subprocess.PIPE, text=True
        )
        self.events: list[dict[str, Any]] = []
        self._said = ""
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()
        try:
            self.port: int = self.wait_for("listening")["port"]
        except BaseException:
            self.close()
            raise
        self.ready_s: float = round(time.monotonic() - self._started, 1)

    def wait_for(self, name: str, count: int = 1, timeout_s: float = 300) -> dict[str, Any]:
        """Return the event `name` when it has come `count` times."""
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline and self.process.poll() is None:
            found = [event for event in self.events if event["event"] == name]
            if len(found) >= count:
                return found[count - 1]
            time.sleep(0.01)
        if self.process.poll() is not None:
            self._thread.join(5)
            raise RuntimeError(
                f"phyai serve ended with status {self.process.returncode}: {self._said}"
            )
        raise TimeoutError(f"no event {name!r} within {timeout_s} s")

    def close(self) -> None:
        """Drain and end; what has not ended within a minute is killed."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            try:
                self.process.wait(60)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()
        self._folder.cleanup()

    def _read(self) -> None:
        for line in self.process.stderr or ():
            if line.startswith("{"):
                self.events.append(json.loads(line) | {"at": time.monotonic()})
                if self._show:
                    print(f"{time.monotonic() - self._started:.1f} s {line.rstrip()}", flush=True)
            elif line.strip():
                self._said = line.strip()


def observation(metadata: Mapping[str, Any], number: int) -> dict[str, Any]:
    """Return a request with random pictures, drawn from the seed `number`."""
    height, width, _ = metadata["image_shape"]
    random = np.random.default_rng(number)
    request: dict[str, Any] = {
        key: random.integers(0, 256, (height, width, 3), np.uint8) for key in metadata["image_keys"]
    }
    request["observation.state"] = np.zeros(metadata["state_dim"], np.float32)
    request["prompt"] = "reach the red disc"
    return request
