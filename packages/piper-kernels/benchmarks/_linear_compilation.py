"""Compilation of the kernels of all linears before they are measured, by processes in parallel."""

import subprocess
import sys
import time
from collections.abc import Sequence

import torch
from _harness import device
from _linear_cases import LinearCase
from _linear_operands import make_operands
from _linear_providers import PROVIDERS
from _report import say


def compile_share(cases: Sequence[LinearCase], names: Sequence[str]) -> None:
    """Run every phase of some cases once, so that its kernels are in the caches on disk."""
    for case in cases:
        operands = make_operands(case, most=1)
        x = operands.inputs[0]
        for name in (name for name in case.providers if name in names):
            provider = PROVIDERS[name]
            if provider.refusal(case, device()):
                continue
            try:
                operator = provider.build(case, operands.weight, operands.bias)
                operator.linear(x)
                if operator.prepare is not None and operator.multiply is not None:
                    operator.multiply(operator.prepare(x))
            except Exception as error:  # the measuring process meets it again and reports it
                say(f"{case.name} {name}: {type(error).__name__}: {error}"[:200])
        torch.cuda.empty_cache()


def compile_ahead(processes: int, arguments: Sequence[str]) -> None:
    """Compile the kernels of all cases in processes beside each other.

    Args:
        processes: Number of processes.
        arguments: Script and arguments of this run.
    """
    start = time.perf_counter()
    command = [sys.executable, *arguments]
    shares = [
        subprocess.Popen([*command, "--share", str(index), str(processes)])  # noqa: S603
        for index in range(processes)
    ]
    failed = sum(share.wait() != 0 for share in shares)
    say(f"compiled ahead in {time.perf_counter() - start:.0f} s")
    if failed:
        say(f"{failed} of {processes} compiling processes failed; what they left is compiled later")
