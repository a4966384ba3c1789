"""Run the ``gpu`` tests on an NVIDIA device with the Python that runs this file.

Fails, instead of skipping, where there is no such device. Further arguments go to pytest.
"""

import sys

from _device_run import run_device_tests

if __name__ == "__main__":
    sys.exit(run_device_tests(sys.argv[1:], vendor="nvidia"))
