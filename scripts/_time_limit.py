"""Stops what takes too long: code of this process, and programs that it started."""

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Iterator, Sequence


class OverLimitError(BaseException):
    """A time limit has passed; what goes on after any ordinary exception must not after this."""


@contextlib.contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """Raise `OverLimitError` in the main thread when the context takes longer.

    Systems without interval timers, such as Windows, have no limit.
    """
    if not hasattr(signal, "setitimer"):
        yield
        return

    def stop(*_: object) -> None:
        raise OverLimitError(f"not done after {seconds:g} s")

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


@contextlib.contextmanager
def program(command: Sequence[str], *, grace_s: float = 20.0) -> Iterator[subprocess.Popen[bytes]]:
    """Run a program in a process group of its own, which ends with the context.

    Args:
        command: of the program.
        grace_s: how long it and what it started may take to end before they are killed.
    """
    process = subprocess.Popen(command, process_group=0 if os.name == "posix" else None)
    try:
        yield process
    finally:
        _end(process, grace_s)


def _end(process: subprocess.Popen[bytes], grace_s: float) -> None:
    if os.name != "posix":
        process.terminate()
        process.wait()
        return
    deadline = time.monotonic() + grace_s
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGTERM)
        while time.monotonic() < deadline:
            process.poll()  # a child that has ended stays in the group until this sees it
            os.killpg(process.pid, 0)
            time.sleep(0.05)
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
