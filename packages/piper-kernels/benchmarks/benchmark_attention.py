"""Measure dense attention beside cuDNN, Flash SDPA, FlashInfer FA3 and SageAttention.

    python benchmark_attention.py [--quick] [--providers NAME ...] [--cases TEXT ...]
        [--budget SECONDS] [--json FILE] [--commit HASH] [--build-flashinfer]

Every case starts from bf16 queries, keys and values: preparation is part of a total. Results of
N(0, 1) operands are compared with FP64 before they are timed; a wrong one is not timed. A GPU run
of all cases stores ``results/<device>/attention.json``, from which ``attention_page.py`` writes
``docs/attention-performance.md``. Without a GPU it is a dry run.
"""

import sys
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial

import torch
from _attention_cases import DENSE, FULL, QUICK, AttentionCase
from _attention_operands import (
    KINDS,
    attention_quality,
    captured_operands,
    checked_rows,
    exact_rows,
    random_operands,
)
from _attention_providers import PROVIDERS, Provider, check, flashinfer_module
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
from _harness import device
from _report import say

QUALITY_ROWS, QUICK_QUALITY_ROWS = 4096, 130
BUDGET = 120
# Cases whose kernels are those of all.
COMPILED = tuple(case for case in FULL if case.rows == FULL[0].rows or case.heads != case.kv_heads)
QUALITY_HEADS, QUICK_QUALITY_HEADS = 8, 2


def measure(case: AttentionCase, names: Sequence[str]) -> list[dict]:
    """Check and time a case; one row for each provider.

    Returns:
        Rows with ``case``, ``provider`` and either ``skipped``, ``error``, or ``ms``, ``phases``,
        ``tops``, ``times_cudnn`` and the quality.
    """
    sets = [random_operands(case, seed=seed) for seed in range(SETS)]
    rows = checked_rows(case.rows)
    exact = exact_rows(sets[0], rows, is_causal=case.causal)
    found, runs = [], {}
    for name in names:
        provider = PROVIDERS[name]
        row = {"case": case.name, "provider": name, "rows": case.rows, "causal": case.causal}
        row["head_dim"] = case.head_dim
        found.append(row)
        reason = provider.refusal(sets[0])
        if reason:
            row["skipped"] = reason
            continue
        try:
            row |= check(provider, sets[0], rows, exact, case.causal)
            runs[name] = [provider.build(operands, case.causal) for operands in sets]
        except Exception as error:  # a provider that fails must not stop the others
            row["error"] = f"{type(error).__name__}: {error}"[:400]
    time_rows(found, runs, case.operations)
    return found


def quality_cases(quick: bool) -> list[tuple[str, AttentionCase]]:
    """Return kinds of operands with their shapes."""
    rows = QUICK_QUALITY_ROWS if quick else QUALITY_ROWS
    heads = QUICK_QUALITY_HEADS if quick else QUALITY_HEADS
    found = []
    for kind in KINDS[:-1]:
        for head_dim in (64, 128):
            causal = (False,) if kind != "normal" else (False, True)
            found += [(kind, AttentionCase(rows, head_dim, mask, heads, heads)) for mask in causal]
    return [*found, (KINDS[-1], AttentionCase(90, 64, False, 8, 1, batch=4))]


def measure_quality(names: Sequence[str], *, quick: bool) -> list[dict]:
    """Return the quality of every provider on every kind of operands."""
    found = []
    for kind, case in quality_cases(quick):
        operands = captured_operands() if kind == KINDS[-1] else random_operands(case, kind)
        every = torch.arange(operands.query.shape[2], device=device())
        exact = exact_rows(operands, every, is_causal=case.causal)
        for name in names:
            provider = PROVIDERS[name]
            row: dict = {"operands": kind, "case": case.name, "provider": name}
            found.append(row)
            reason = provider.refusal(operands)
            if reason:
                row["skipped"] = reason
                continue
            try:
                row |= attention_quality(provider.build(operands, case.causal)(), exact)
            except Exception as error:  # a provider that fails must not stop the others
                row["error"] = f"{type(error).__name__}: {error}"[:400]
    return found


def calls_to_compile() -> Iterator[Callable[[], object]]:
    """Yield calls of our operators whose kernels are those of all cases."""

    def call(provider: Provider, case: AttentionCase | None) -> None:
        operands = captured_operands() if case is None else random_operands(case)
        provider.build(operands, case is not None and case.causal)()

    for case in (*COMPILED, None):
        for provider in PROVIDERS.values():
            if provider.ours:
                yield partial(call, provider, case)


def main(arguments: Sequence[str] | None = None) -> int:
    """Parse the command line, measure, print and store; return the exit status."""
    start = time.perf_counter()
    parser = parser_of(__doc__ or "", DENSE, BUDGET)
    parser.add_argument(
        "--build-flashinfer", action="store_true", help="let FlashInfer build, for some minutes"
    )
    options = parse(parser, arguments)
    if options.build_flashinfer:
        for head_dim in (64, 128):
            flashinfer_module(head_dim).build_and_load()
    if not options.quick and not options.cases:
        compile_in_threads(list(calls_to_compile()))
    quality: list[dict] = []
    if not options.cases:
        with torch.no_grad():
            quality = measure_quality(options.providers, quick=options.quick)
        say(quality_table(quality))
    rows, late = run_cases(
        chosen(options, FULL, QUICK),
        lambda case: measure(case, options.providers),
        attention_table,
        start=start,
        budget=options.budget,
    )
    result = {"rows": rows, "quality": quality, "not_started": late}
    ours = [name for name, provider in PROVIDERS.items() if provider.ours]
    return finish(options, "attention", result, ours)


if __name__ == "__main__":
    sys.exit(main())
