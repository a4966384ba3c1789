"""Let the real openpi-client drive the reach policy over a socket, and compare with the engine.

Makes an isolated environment in .cache/openpi-client (openpi-client needs NumPy below 2, so it can
not live beside the engine), serves the reach checkpoint on a free port of this machine, and runs
the same episodes twice: once through openpi's ``WebsocketClientPolicy`` and once in this process.
"""

import argparse
import asyncio
import importlib
import json
import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parent.parent
ENVIRONMENT = ROOT / ".cache" / "openpi-client"
# openpi-client imports typing_extensions without asking for it.
REQUIREMENTS = ("openpi-client==0.1.2", "typing_extensions")
EXAMPLES = ROOT / "examples" / "pi05"
CHECKPOINT = EXAMPLES / "reach" / "checkpoint"


def find_python() -> Path | None:
    """Return a Python that NumPy below 2 has wheels for, None when this machine has none."""
    candidates = [shutil.which(f"python3.{minor}") for minor in (12, 11, 10)]
    versions = Path.home() / ".pyenv" / "versions"
    candidates += [
        str(path) for minor in (12, 11, 10) for path in versions.glob(f"3.{minor}.*/bin/python")
    ]
    for candidate in filter(None, candidates):
        works = subprocess.run(
            [candidate, "-c", "import sys; sys.exit(sys.version_info >= (3, 13))"],
            capture_output=True,
            check=False,
        )
        if works.returncode == 0:
            return Path(candidate)
    return None


def environment_python() -> Path | None:
    """Return the Python of the isolated environment, making it first; None where that fails."""
    python = ENVIRONMENT / "bin" / "python"
    probe = [
        str(python),
        "-c",
        "import openpi_client.websocket_client_policy, numpy; assert numpy.__version__ < '2'",
    ]
    if python.is_file() and subprocess.run(probe, capture_output=True, check=False).returncode == 0:
        return python
    base = find_python()
    if base is None:
        return None
    shutil.rmtree(ENVIRONMENT, ignore_errors=True)
    for command in (
        [str(base), "-m", "venv", str(ENVIRONMENT)],
        [str(python), "-m", "pip", "install", "--quiet", *REQUIREMENTS],
    ):
        if subprocess.run(command, check=False, timeout=300).returncode != 0:
            return None
    return python


class PipedPolicy:
    """A reach policy that asks the server from a program in another environment.

    Args:
        python: Of that environment.
        words: Program of this folder and its arguments.
        folder: Where observations are handed over.
        extra: Is said with every observation.

    Attributes:
        hello: What the program said first.
    """

    def __init__(
        self, python: str | Path, words: Sequence[str], folder: Path, **extra: Any
    ) -> None:
        program, *arguments = words
        self._file, self._extra = folder / "observation.npz", extra
        self._process = subprocess.Popen(
            [str(python), str(ROOT / "scripts" / program), *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.hello = self._read()

    def __call__(self, observation: Any, *, seed: int) -> np.ndarray:
        """Return the actions [chunk, 2] for one observation."""
        np.savez(self._file, state=observation.state, **observation.images)
        asked = {"file": str(self._file), "task": observation.task, "seed": seed, **self._extra}
        if self._process.stdin is not None:
            self._process.stdin.write(json.dumps(asked) + "\n")
            self._process.stdin.flush()
        return np.array(self._read()["actions"], np.float32)

    def close(self) -> None:
        """End the program."""
        self._process.communicate(timeout=60)

    def _read(self) -> dict[str, Any]:
        line = self._process.stdout.readline() if self._process.stdout is not None else ""
        if not line:
            raise RuntimeError(f"{self._process.args} ended without an answer")
        return json.loads(line)


class ReachServer:
    """The reach policy on a free port, in a thread."""

    def __init__(self) -> None:
        self._started = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._main()), daemon=True)
        self.port = 0

    def __enter__(self) -> "ReachServer":
        self._thread.start()
        if not self._started.wait(120):
            raise RuntimeError("the server did not start within 120 s")
        return self

    def __exit__(self, *exception: object) -> None:
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(30)

    async def _main(self) -> None:
        from phyai.serving import PolicyConfig, ServeConfig, ServerConfig, running_server

        self._loop, self._stop = asyncio.get_running_loop(), asyncio.Event()
        config = ServeConfig(PolicyConfig(CHECKPOINT, device="cpu"), ServerConfig(port=0))
        async with running_server(config) as running:
            self.port = running.port
            self._started.set()
            await self._stop.wait()


def compare(python: Path, episodes: int) -> dict[str, Any]:
    """Run `episodes` over the socket and in this process.

    Returns:
        The successes and outcomes of both, and what the client said.
    """
    sys.path.insert(0, str(EXAMPLES))
    reach = importlib.import_module("reach.evaluate")
    with ReachServer() as server, tempfile.TemporaryDirectory() as folder:
        words = ("openpi_client_episodes.py", str(server.port))
        policy = PipedPolicy(python, words, Path(folder))
        remote = reach.evaluate(policy, episodes)
        policy.close()
    engine = reach.load_engine(CHECKPOINT, "cpu", "float32")
    local = reach.evaluate(reach.EngineRollout(engine), episodes)
    return {
        "episodes": episodes,
        "numpy": policy.hello["numpy"],
        "metadata": policy.hello["metadata"],
        "socket": [(item.success, item.steps) for item in remote.episodes],
        "in_process": [(item.success, item.steps) for item in local.episodes],
        "socket_ms": remote.ms_per_chunk,
        "in_process_ms": local.ms_per_chunk,
    }


def main() -> int:
    """Command line."""
    parser = argparse.ArgumentParser(description="openpi-client against phyai serve")
    parser.add_argument("--episodes", type=int, default=50)
    args = parser.parse_args()
    python = environment_python()
    if python is None:
        print("no isolated environment: it needs Python 3.10 to 3.12 and openpi-client")
        return 1
    found = compare(python, args.episodes)
    for where in ("socket", "in_process"):
        won = sum(success for success, _ in found[where])
        time_ms = found[f"{where}_ms"]
        print(f"{where:<11} {won} of {found['episodes']} episodes, {time_ms:.1f} ms per chunk")
    same = found["socket"] == found["in_process"]
    print(f"openpi-client with NumPy {found['numpy']}; every episode the same: {same}")
    return 0 if same else 1


if __name__ == "__main__":
    sys.exit(main())
