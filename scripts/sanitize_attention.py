"""Run compute-sanitizer's memcheck and racecheck on a small set of attention calls.

    python scripts/sanitize_attention.py [--tools memcheck racecheck] [--calls TEXT ...]
        [--sanitizer FILE]

Needs a CUDA device and compute-sanitizer, which CUDA toolkits contain. Every call runs in a process
of its own, with allocations that the caching allocator does not merge, and sizes that end within a
tile. The exit status is 1 when a tool finds an error or a call fails, 2 without the tool or a call.
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

if TYPE_CHECKING:
    from torch import Tensor

TOOLS = ("memcheck", "racecheck")
ERROR_STATUS = 86
TIMEOUT = 600
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


def run_call(name: str) -> None:
    """Make one call; what the sanitizer watches."""
    import torch

    with torch.no_grad():
        calls()[name]()
    torch.cuda.synchronize()


def sanitize(sanitizer: str, tool: str, name: str) -> tuple[bool, str]:
    """Return whether a tool finds nothing, and the end of what it says."""
    command = [sanitizer, f"--tool={tool}", f"--error-exitcode={ERROR_STATUS}"]
    command += ["--target-processes=all", sys.executable, __file__, "--run", name]
    environment = os.environ | {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    try:
        result = subprocess.run(
            command, env=environment, capture_output=True, text=True, timeout=TIMEOUT, check=False
        )
    except subprocess.TimeoutExpired:
        return False, f"no end within {TIMEOUT} s"
    text = (result.stdout + result.stderr).strip().splitlines()
    return result.returncode == 0, "\n".join(text[-1:] if result.returncode == 0 else text[-20:])


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
    failed = False
    for name in chosen:
        for tool in options.tools:
            clean, text = sanitize(sanitizer, tool, name)
            failed = failed or not clean
            sys.stdout.write(f"{'clean ' if clean else 'FAILED'} {tool} {name}: {text}\n")
            sys.stdout.flush()
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
