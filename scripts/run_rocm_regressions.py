"""Run the ``gpu`` tests on an RDNA4 device with the Python of an existing ROCm environment.

Do not provision that environment with ``uv sync``: the workspace resolves the CUDA build of
PyTorch. Fails, instead of skipping, where there is no such device. Further arguments go to pytest.
"""

import sys

from _device_run import run_device_tests

RDNA4 = ("gfx1200", "gfx1201")

if __name__ == "__main__":
    sys.exit(run_device_tests(sys.argv[1:], vendor="amd", architectures=RDNA4))
