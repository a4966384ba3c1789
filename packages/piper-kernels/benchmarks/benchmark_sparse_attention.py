"""Measure sparse Piper attention beside dense attention of the same operands.

    python benchmark_sparse_attention.py [--quick] [--providers NAME ...] [--cases TEXT ...]
        [--budget SECONDS] [--json FILE] [--commit HASH]

Preparation and routing are part of a total. Before it is timed, sparse attention is compared with
exact attention along the same routes, on a short sequence of the same heads, and dense attention
with FP64 on the operands that are timed; a wrong one is not timed. A GPU run of all
cases stores ``results/<device>/sparse_attention.json``. Without a GPU it is a dry run.
"""

import sys
import time
from collections.abc import Callable, Iterator, Sequence
from functools import cache, partial

import torch
from _attention_cases import FULL_SPARSE, QUICK_SPARSE, SPARSE, SparseCase
from _attention_operands import Operands, checked_rows, exact_rows, random_operands
from _attention_providers import PROVIDERS, Attention, check
from _attention_run import (
    SETS,
    chosen,
    compile_in_threads,
    finish,
    parse,
    parser_of,
    run_cases,
    time_rows,
)
from _attention_tables import attention_table
from _harness import WrongResultError, relative_error

from piper_kernels import SparsePiperAttention
from piper_kernels.attention.sparse_piper_attention import reference
from piper_kernels.attention.sparse_piper_attention._routing import RoutingRequest

CHECKED_ROWS = 1000
MOST_ERROR = 0.025
BUDGET = 24
OURS = ("sparse_minmax", "sparse_mean", "piper")


@cache
def _module(heads: int, keep: float, routing: str) -> SparsePiperAttention:
    return SparsePiperAttention([keep] * heads, routing=routing)


def sparse_call(name: str, case: SparseCase, operands: Operands) -> Attention:
    """Return the sparse attention of operands that are stored with rows before heads."""
    module = _module(case.heads, case.keep, name.removeprefix("sparse_"))
    query, key, value = (
        x.transpose(1, 2).contiguous() for x in (operands.query, operands.key, operands.value)
    )
    blocks = query.shape[1] // 64
    return lambda: module(query, key, value, sparse_key_blocks=blocks)


def check_sparse(name: str, case: SparseCase) -> float:
    """Return the relative error against exact attention along the same routes.

    Raises:
        WrongResultError: It is 2.5 % or more.
    """
    rows = min(case.rows, CHECKED_ROWS)
    short = SparseCase(rows, case.head_dim, case.keep, case.heads)
    operands = random_operands(short.dense)
    actual = sparse_call(name, short, operands)()
    module = _module(case.heads, case.keep, name.removeprefix("sparse_"))
    request = RoutingRequest.of(module._units, rows // 64, int(module._mode), None)
    query, key, value = (x.transpose(1, 2) for x in (operands.query, operands.key, operands.value))
    exact = reference.exact_sparse_attention(query, key, value, request, case.head_dim**-0.5)
    error = relative_error(actual, exact)
    if not error < MOST_ERROR:
        raise WrongResultError(f"{name}: relative error {error:.5f} along the routes; not timed")
    return error


def measure(case: SparseCase, names: Sequence[str]) -> list[dict]:
    """Check and time a case; one row for each provider.

    Returns:
        Rows with ``case``, ``provider`` and either ``skipped``, ``error``, or ``ms``, ``phases``,
        ``tops`` (as if dense), ``kept_tops`` and ``times_cudnn``.
    """
    sets = [random_operands(case.dense, seed=seed) for seed in range(SETS)]
    checked = checked_rows(case.rows)
    exact = exact_rows(sets[0], checked, is_causal=False)
    found, runs = [], {}
    for name in names:
        row: dict = {"case": case.name, "provider": name, "rows": case.rows, "causal": False}
        row |= {"head_dim": case.head_dim, "keep": case.keep}
        found.append(row)
        try:
            if name in PROVIDERS:
                provider = PROVIDERS[name]
                reason = provider.refusal(sets[0])
                if reason:
                    row["skipped"] = reason
                    continue
                row |= check(provider, sets[0], checked, exact, False)
                runs[name] = [provider.build(operands, False) for operands in sets]
            else:
                row["relative_l2"] = check_sparse(name, case)
                runs[name] = [sparse_call(name, case, operands) for operands in sets]
        except Exception as error:  # a provider that fails must not stop the others
            row["error"] = f"{type(error).__name__}: {error}"[:400]
    time_rows(found, runs, case.dense.operations)
    for row in found:
        if "tops" in row and row["provider"] not in PROVIDERS:
            row["kept_tops"] = case.kept_operations / row["ms"] / 1e9
    return found


def calls_to_compile() -> Iterator[Callable[[], object]]:
    """Yield calls of our operators whose kernels are those of all cases."""

    def call(name: str, case: SparseCase) -> None:
        sparse_call(name, case, random_operands(case.dense))()

    for case in FULL_SPARSE:
        for name in OURS[:2]:
            yield partial(call, name, case)
            yield partial(check_sparse, name, case)


def main(arguments: Sequence[str] | None = None) -> int:
    """Parse the command line, measure, print and store; return the exit status."""
    start = time.perf_counter()
    options = parse(parser_of(__doc__ or "", SPARSE, BUDGET), arguments)
    if not options.quick and not options.cases:
        compile_in_threads(list(calls_to_compile()))
    with torch.no_grad():
        rows, late = run_cases(
            chosen(options, FULL_SPARSE, QUICK_SPARSE),
            lambda case: measure(case, options.providers),
            attention_table,
            start=start,
            budget=options.budget,
        )
    return finish(options, "sparse_attention", {"rows": rows, "not_started": late}, OURS)


if __name__ == "__main__":
    sys.exit(main())
