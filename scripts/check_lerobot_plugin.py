"""Run the LeRobot plugin inside LeRobot against a server of the reach policy.

    .venv/bin/python scripts/check_lerobot_plugin.py --lerobot-python LEROBOT/bin/python

LEROBOT is an environment with lerobot 0.6.1, examples/lerobot_policy_phyai, msgpack and websockets
and this repository's phyai on its path. LeRobot discovers the plugin, writes and reads the policy
folder, and its processors and policy act in closed loop, with and without real-time chunking.
LeRobot passes no seed on, so the noise of every chunk is the server's.
"""

import argparse
import importlib
import sys
import tempfile
from pathlib import Path

from check_openpi_client import EXAMPLES, PipedPolicy, ReachServer

EXECUTE = 8


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
                words = ("lerobot_plugin_episodes.py", f"{folder}/policy", str(server.port))
                asked = {"rtc": rtc, "execute": EXECUTE}
                policy = PipedPolicy(args.lerobot_python, words, Path(folder), **asked)
                result = reach.evaluate(policy, args.episodes, execute=EXECUTE)
                policy.close()
            rates.append(result.success_rate)
            print(f"{policy.hello}, rtc {rtc}: success {result.success_rate:.1%}")
    return 0 if min(rates) >= 0.9 else 1


if __name__ == "__main__":
    sys.exit(main())
