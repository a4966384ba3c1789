"""Run the ``gpu`` tests on an NVIDIA device with the Python that runs this file.

Fails, instead of skipping, where there is no such device. With ``--benchmarks`` every benchmark
runs after tests that passed, and stores its JSON. Further arguments go to pytest.
"""

import subprocess
import sys

from _device_run import ROOT, run_device_tests

BENCHMARKS = "--benchmarks"


def main(arguments: list[str]) -> int:
    """Run the tests, then the benchmarks if they are asked for; return the first failure."""
    failed = run_device_tests([a for a in arguments if a != BENCHMARKS], vendor="nvidia")
    if failed or BENCHMARKS not in arguments:
        return failed
    for script in sorted(ROOT.glob("packages/*/benchmarks/run_all.py")):
        failed = subprocess.run([sys.executable, str(script)], check=False).returncode or failed
    return failed


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
