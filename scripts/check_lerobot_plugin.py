"""Run the LeRobot plugin inside LeRobot against a server of the reach policy.

    .venv/bin/python scripts/check_lerobot_plugin.py --lerobot-python LEROBOT/bin/python

LEROBOT is an environment with lerobot 0.6.1, examples/lerobot_policy_phyai, msgpack and websockets
and this repository's phyai on its path. LeRobot discovers the plugin, writes and reads the policy
folder, and its processors and policy act in closed loop, with and without real-time chunking.
"""

import argparse
import importlib
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
from check_openpi_client import EXAMPLES, ROOT, ReachServer

EXECUTE = 8


class LeRobotPolicy:
    """A reach policy that acts through LeRobot in its own process."""

    def __init__(self, python: str, port: int, folder: Path, *, rtc: bool) -> None:
        program = str(ROOT / "scripts" / "lerobot_plugin_episodes.py")
        self._file, self._rtc = folder / "observation.npz", rtc
        self._process = subprocess.Popen(
            [python, program, str(folder / "policy"), str(port)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.hello = self._read()

    def __call__(self, observation: Any, *, seed: int) -> np.ndarray:
        """Return the actions [chunk, 2]; LeRobot passes no seed on."""
        del seed
        np.savez(self._file, state=observation.state, **observation.images)
        asked = {"file": str(self._file), "task": observation.task, "rtc": self._rtc}
        asked["execute"] = EXECUTE
        if self._process.stdin is not None:
            self._process.stdin.write(json.dumps(asked) + "\n")
            self._process.stdin.flush()
        return np.array(self._read()["actions"], np.float32)

    def close(self) -> None:
        """End LeRobot's process."""
        self._process.communicate(timeout=60)

    def _read(self) -> dict[str, Any]:
        line = self._process.stdout.readline() if self._process.stdout is not None else ""
        if not line:
            raise RuntimeError("LeRobot's process ended without an answer")
        return json.loads(line)


def main() -> int:
    """Command line."""
    parser = argparse.ArgumentParser(description="the LeRobot plugin against phyai serve")
    parser.add_argument("--lerobot-python", required=True)
    parser.add_argument("--episodes", type=int, default=20)
    args = parser.parse_args()
    sys.path.insert(0, str(EXAMPLES))
    reach = importlib.import_module("reach.evaluate")
    rates = []
    with ReachServer() as server:
        for rtc in (False, True):
            with tempfile.TemporaryDirectory() as folder:
                policy = LeRobotPolicy(args.lerobot_python, server.port, Path(folder), rtc=rtc)
                result = reach.evaluate(policy, args.episodes, execute=EXECUTE)
                policy.close()
            rates.append(result.success_rate)
            print(f"{policy.hello}, rtc {rtc}: success {result.success_rate:.1%}")
    return 0 if min(rates) >= 0.9 else 1


if __name__ == "__main__":
    sys.exit(main())
