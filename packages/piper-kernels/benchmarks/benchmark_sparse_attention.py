"""Measure sparse Piper attention beside dense attention of the same operands.

    python benchmark_sparse_attention.py [--quick] [--providers NAME ...] [--cases TEXT ...]
        [--budget SECONDS] [--json FILE] [--commit HASH]

Preparation and routing are part of a total. Before it is timed, sparse attention is compared with
exact attention along the same routes, on a short sequence of the same heads, and dense attention
with FP64 on the operands that are timed; a wrong one is not timed. The quality along the routes
is also stated on biased values, on outlier keys and on captured operands. A GPU run of all
cases stores ``results/<device>/sparse_attention.json``. Without a GPU it is a dry run.
"""

import sys
import time
from collections.abc import Callable, Iterator, Sequence
from functools import cache, partial

import torch
from _attention_cases import FULL_SPARSE, QUICK_SPARSE, SPARSE, AttentionCase, SparseCase
from _attention_operands import (
    KINDS,
    Operands,
    attention_quality,
    captured_operands,
    checked_rows,
    exact_rows,
    random_operands,
)
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
from _attention_tables import attention_table, quality_table
from _harness import WrongResultError, relative_error
from _report import say
from torch import Tensor

from piper_kernels import SparsePiperAttention
from piper_kernels.attention.sparse_piper_attention import reference
from piper_kernels.attention.sparse_piper_attention._routing import RoutingRequest

CHECKED_ROWS = 1000
QUALITY_ROWS, QUICK_QUALITY_ROWS = 4096, 260
QUALITY_HEADS, QUICK_QUALITY_HEADS = 8, 2
QUALITY_KEEP = 0.2
MOST_ERROR = 0.025
BUDGET = 90
OURS = ("sparse_minmax", "sparse_mean", "piper")


@cache
def _module(heads: int, keep: float, routing: str) -> SparsePiperAttention:
    return SparsePiperAttention([keep] * heads, routing=routing)


def sparse_call(name: str, keep: float, operands: Operands) -> Attention:
    """Return the sparse attention of operands that are stored with rows before heads."""
    module = _module(operands.query.shape[1], keep, name.removeprefix("sparse_"))
    query, key, value = (
        x.transpose(1, 2).contiguous() for x in (operands.query, operands.key, operands.value)
    )
    blocks = query.shape[1] // 64
    return lambda: module(query, key, value, sparse_key_blocks=blocks)


def exact_along_routes(name: str, keep: float, operands: Operands) -> Tensor:
    """Return exact attention along the routes of sparse attention, FP32 ``[B, S, Hq, D]``."""
    module = _module(operands.query.shape[1], keep, name.removeprefix("sparse_"))
    query, key, value = (x.transpose(1, 2) for x in (operands.query, operands.key, operands.value))
    request = RoutingRequest.of(module._units, query.shape[1] // 64, int(module._mode), None)
    scale = query.shape[3] ** -0.5
    return reference.exact_sparse_attention(query, key, value, request, scale)


def check_sparse(name: str, case: SparseCase) -> float:
    """Return the relative error against exact attention along the same routes.

    Raises:
        WrongResultError: It is 2.5 % or more.
    """
    rows = min(case.rows, CHECKED_ROWS)
    operands = random_operands(SparseCase(rows, case.head_dim, case.keep, case.heads).dense)
    actual = sparse_call(name, case.keep, operands)()
    error = relative_error(actual, exact_along_routes(name, case.keep, operands))
    if not error < MOST_ERROR:
        raise WrongResultError(f"{name}: relative error {error:.5f} along the routes; not timed")
    return error


def measure_quality(names: Sequence[str], *, quick: bool) -> list[dict]:
    """Return the quality of sparse attention along its routes on every kind of operands."""
    rows = QUICK_QUALITY_ROWS if quick else QUALITY_ROWS
    heads = QUICK_QUALITY_HEADS if quick else QUALITY_HEADS
    shapes = {dim: AttentionCase(rows, dim, False, heads, heads) for dim in (64, 128)}
    operands = [
        (kind, f"S{rows} D{dim} keep {QUALITY_KEEP:g}", random_operands(shape, kind))
        for kind in KINDS[:-1]
        for dim, shape in shapes.items()
    ]
    captured = captured_operands()
    batch, _, length, head_dim = captured.query.shape
    shape = f"B{batch} S{length} D{head_dim} keep {QUALITY_KEEP:g}"
    operands.append((KINDS[-1], shape, captured))
    found = []
    for kind, case, given in operands:
        for name in (name for name in names if name not in PROVIDERS):
            row: dict = {"operands": kind, "case": case, "provider": name}
            found.append(row)
            try:
                actual = sparse_call(name, QUALITY_KEEP, given)()
                exact = exact_along_routes(name, QUALITY_KEEP, given)
                row |= attention_quality(actual.transpose(1, 2), exact.transpose(1, 2).double())
            except Exception as error:  # a kind that fails must not stop the others
                row["error"] = f"{type(error).__name__}: {error}"[:400]
    return found


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
                runs[name] = [sparse_call(name, case.keep, operands) for operands in sets]
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
        sparse_call(name, case.keep, random_operands(case.dense))()

    for case in FULL_SPARSE:
        for name in OURS[:2]:
            yield partial(call, name, case)
            yield partial(check_sparse, name, case)
    for name in OURS[:2]:
        yield lambda name=name: sparse_call(name, QUALITY_KEEP, captured_operands())()


def main(arguments: Sequence[str] | None = None) -> int:
    """Parse the command line, measure, print and store; return the exit status."""
    start = time.perf_counter()
    options = parse(parser_of(__doc__ or "", SPARSE, BUDGET), arguments)
    if not options.quick and not options.cases:
        compile_in_threads(list(calls_to_compile()))
    quality: list[dict] = []
    with torch.no_grad():
        rows, late = run_cases(
            chosen(options, FULL_SPARSE, QUICK_SPARSE),
            lambda case: measure(case, options.providers),
            attention_table,
            start=start,
            budget=options.budget,
        )
        if not options.cases:  # behind the cases, which have the budget
            quality = measure_quality(options.providers, quick=options.quick)
            say(f"\n{quality_table(quality)}")
    result = {"rows": rows, "quality": quality, "not_started": late}
    return finish(options, "sparse_attention", result, OURS)


if __name__ == "__main__":
    sys.exit(main())
