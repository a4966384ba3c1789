"""Run the ``gpu`` tests on an NVIDIA device with the Python that runs this file.

Fails, instead of skipping, where there is no such device. With ``--benchmarks`` every benchmark
runs after tests that passed, an estimated 30 minutes on an H200, and stores its JSON; on that
device the pages and pictures that show the results are written again. ``--benchmarks-only`` leaves
out the tests. Further arguments go to pytest.
"""

import sys

from _benchmark_runs import run_benchmarks
from _device_run import DeviceMissingError, require_device, run_device_tests, use_this_checkout

BENCHMARKS, ALONE = "--benchmarks", "--benchmarks-only"


def main(arguments: list[str]) -> int:
    """Run the tests, then the benchmarks if they are asked for; return the first failure."""
    failed = 0
    if ALONE not in arguments:
        failed = run_device_tests([a for a in arguments if a != BENCHMARKS], vendor="nvidia")
    if failed or not {BENCHMARKS, ALONE} & {*arguments}:
        return failed
    use_this_checkout()
    import torch

    try:
        require_device(torch, vendor="nvidia")
    except DeviceMissingError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    torch.cuda.empty_cache()  # what the tests kept is for the benchmarks
    return run_benchmarks(torch.cuda.get_device_name(0).lower().replace(" ", "-"))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
