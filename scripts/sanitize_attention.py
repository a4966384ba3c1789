"""Run compute-sanitizer's memcheck and racecheck on a small set of attention calls.

    python scripts/sanitize_attention.py [--tools memcheck racecheck] [--calls TEXT ...]
        [--sanitizer FILE]

Needs a CUDA device and compute-sanitizer, which CUDA toolkits contain. Every call runs in a process
of its own, with allocations that the caching allocator does not merge, and sizes that end within a
tile. The exit status is 1 when a tool finds an error or a call fails, 2 without the tool or a call.

Racecheck reports a race where Triton hands work to groups of warps, see ``_race_reports``. Where it
does so for a kernel that only adds numbers in such groups, these reports are not errors of ours;
they count as clean and are said.
"""

import argparse
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from _race_reports import is_hand_over

if TYPE_CHECKING:
    from torch import Tensor

TOOLS = ("memcheck", "racecheck")
ERROR_STATUS = 86
TIMEOUT = 600
CONTROL = "control"
HERE = Path(__file__).resolve().parent
KERNELS = HERE.parent / "packages/piper-kernels/src/piper_kernels/attention/_sm90_kernels"
PLACES = ("/usr/local/cuda/bin/compute-sanitizer", "/usr/local/cuda/compute-sanitizer")


def find_sanitizer() -> str | None:
    """Return the path of compute-sanitizer, or ``None``."""
    home = os.environ.get("CUDA_HOME")
    places = [*PLACES] if home is None else [f"{home}/bin/compute-sanitizer", *PLACES]
    found = shutil.which("compute-sanitizer")
    return found or next((place for place in places if Path(place).is_file()), None)


def _random(*shape: int) -> "Tensor":
    import torch

    return torch.randn(shape, dtype=torch.bfloat16, device="cuda")


def _dense(name: str, head_dim: int, is_causal: bool) -> None:
    import piper_kernels

    operator = getattr(piper_kernels, name)
    kv_heads = 2 if name == "piper_attention" else 4
    queries, keys = (193, 193) if is_causal else (129, 65)
    query, key = _random(1, 4, queries, head_dim), _random(1, kv_heads, keys, head_dim)
    value = _random(1, keys, kv_heads, head_dim).transpose(1, 2)
    operator(query, key, value, is_causal=is_causal)


def _sparse(head_dim: int, routing: str, has_lengths: bool) -> None:
    import torch

    from piper_kernels import SparsePiperAttention

    rows = 320 if has_lengths else 333
    query, key, value = (_random(1, rows, heads, head_dim) for heads in (4, 2, 2))
    lengths = None
    if has_lengths:
        lengths = torch.tensor([64, 1, 33, 64, 17], dtype=torch.int32, device="cuda")
    module = SparsePiperAttention([0.2, 0.5, 0.7, 1.0], routing=routing)
    counts = {"sparse_key_blocks": 4, "sparse_query_blocks": 3}
    module(query, key, value, block_lengths=lengths, **counts)


def calls() -> dict[str, Callable[[], None]]:
    """Return the attention calls by name; they make their operands themselves."""
    found: dict[str, Callable[[], None]] = {}
    for head_dim in (64, 128):
        for mask in ("full", "causal"):
            for name in ("piper_attention", "sage_attention_2pp"):
                call = partial(_dense, name, head_dim, mask == "causal")
                found[f"{name} D{head_dim} {mask}"] = call
        found[f"sparse D{head_dim} minmax"] = partial(_sparse, head_dim, "minmax", False)
        found[f"sparse D{head_dim} mean, lengths"] = partial(_sparse, head_dim, "mean", True)
    return found


def _control() -> None:
    import torch
    from _warp_groups import BLOCKS, NUMBERS, WARPS, warp_groups_kernel

    numbers, out = torch.ones(NUMBERS, device="cuda"), torch.zeros(3, device="cuda")
    warp_groups_kernel[(BLOCKS,)](numbers, out, num_warps=WARPS)  # pyright: ignore[reportCallIssue]
    if out.tolist() != [NUMBERS, NUMBERS, 1.0]:
        message = f"the control kernel stored {out.tolist()}, not sums of {NUMBERS} ones"
        raise RuntimeError(message)


def run_call(name: str) -> None:
    """Make one call; what the sanitizer watches."""
    import torch

    with torch.no_grad():
        (_control if name == CONTROL else calls()[name])()
    torch.cuda.synchronize()


def sanitize(sanitizer: str, tool: str, name: str) -> tuple[int, str]:
    """Let a tool watch a call; return its status, -1 for a call that does not end, and the text."""
    command = [sanitizer, f"--tool={tool}", f"--error-exitcode={ERROR_STATUS}"]
    command += ["--target-processes=all", sys.executable, __file__, "--run", name]
    environment = os.environ | {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    try:
        result = subprocess.run(
            command, env=environment, capture_output=True, text=True, timeout=TIMEOUT, check=False
        )
    except subprocess.TimeoutExpired:
        return -1, f"no end within {TIMEOUT} s"
    return result.returncode, (result.stdout + result.stderr).strip()


class Races:
    """Tells reports of Triton's hand-over to groups of warps from races."""

    def __init__(self, sanitizer: str) -> None:
        self._sanitizer = sanitizer
        self._expected: bool | None = None

    def only_hand_over(self, status: int, text: str) -> bool:
        """Return whether what racecheck found is only what it finds in the control kernel."""
        if status != ERROR_STATUS or not is_hand_over(text, (KERNELS, HERE)):
            return False
        if self._expected is None:
            status, control = sanitize(self._sanitizer, "racecheck", CONTROL)
            self._expected = status == ERROR_STATUS and is_hand_over(control, (HERE,))
        return self._expected


def watch(sanitizer: str, tool: str, name: str, races: Races) -> bool:
    """Let a tool watch a call, say what it found and return whether that is nothing."""
    status, text = sanitize(sanitizer, tool, name)
    lines = text.splitlines()
    clean = status == 0
    said = "\n".join(lines[-1:] if clean else lines[-20:])
    if tool == "racecheck" and not clean and races.only_hand_over(status, text):
        clean = True
        said = (
            f"only Triton's hand-over to groups of warps, as in a kernel without work: {lines[-1]}"
        )
    sys.stdout.write(f"{'clean ' if clean else 'FAILED'} {tool} {name}: {said}\n")
    sys.stdout.flush()
    return clean


def main(arguments: Sequence[str] | None = None) -> int:
    """Parse the command line, run the tools and return the exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--tools", nargs="+", choices=TOOLS, default=list(TOOLS))
    parser.add_argument("--calls", nargs="+", help="only calls whose names contain a text")
    parser.add_argument("--sanitizer", help="path of compute-sanitizer")
    parser.add_argument("--run", help="make one call without a sanitizer")
    options = parser.parse_args(arguments)
    if options.run is not None:
        run_call(options.run)
        return 0
    sanitizer = options.sanitizer or find_sanitizer()
    if sanitizer is None:
        sys.stderr.write("compute-sanitizer was not found; pass --sanitizer or set CUDA_HOME\n")
        return 2
    chosen = [name for name in calls() if any(text in name for text in options.calls or [""])]
    if not chosen:
        sys.stderr.write(f"no call contains {options.calls}; calls: {', '.join(calls())}\n")
        return 2
    races = Races(sanitizer)
    clean = [watch(sanitizer, tool, name, races) for name in chosen for tool in options.tools]
    return int(not all(clean))


if __name__ == "__main__":
    sys.exit(main())
