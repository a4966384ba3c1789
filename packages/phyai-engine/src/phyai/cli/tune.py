"""``phyai tune``: measure the kernels of a model and keep the times."""

import os
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from phyai.cli import engines, options
from phyai.cli.output import (
    display_path,
    make_table,
    print_json,
    print_line,
    print_pairs,
    print_table,
    status_line,
    stdout_to_stderr,
)

if TYPE_CHECKING:
    from phyai.dispatch.trace import SelectionTrace

_DEFAULT_FILE = Path("phyai") / "autotune.json"
_SHAPE = "shape."

Policy = Annotated[
    Path | None,
    typer.Option(
        "--policy",
        "--kernel-config",
        help="Kernel policy (YAML): kernel rules and quantization. "
        "Wins over the variable PHYAI_KERNEL_CONFIG.",
        metavar="FILE",
        show_default=False,
    ),
]
Store = Annotated[
    Path | None,
    typer.Option(
        help="Where the times are kept. Default: PHYAI_KERNEL_AUTOTUNE_CACHE, "
        "else phyai/autotune.json in the user's cache folder.",
        metavar="FILE",
        show_default=False,
    ),
]
Batch = Annotated[
    list[int] | None,
    typer.Option(
        help="Observations answered at once. Repeat for each batch size; default 1.",
        metavar="N",
        min=1,
        show_default=False,
    ),
]


@dataclass
class TunedCall:
    """One workload whose rows were compared.

    Attributes:
        op: Operation.
        role: Role of its call sites.
        shape: Its dims as text.
        selected: The row that was chosen: the fastest.
        selected_ms: Its milliseconds per call.
        first: The row of highest priority that was measured.
        first_ms: Its milliseconds per call.
        sites: Number of call sites.
    """

    op: str
    role: str
    shape: str
    selected: str
    selected_ms: float
    first: str
    first_ms: float
    sites: int = 0


def tune_command(
    checkpoint: options.Checkpoint,
    policy: Policy = None,
    store: Store = None,
    batch: Batch = None,
    device: options.Device = None,
    dtype: options.Dtype = None,
    steps: options.Steps = None,
    json_output: options.Json = False,
) -> None:
    """Measure the kernels of every call of a model and keep the times.

    Computes one chunk from a synthetic observation under the autotune profile. Calls with several
    usable kernels have them timed on inputs of their shapes, attention on the model's own cache.
    Later runs take the fastest without measuring when PHYAI_KERNEL_PROFILE is autotune and
    PHYAI_KERNEL_AUTOTUNE_CACHE names the file. Times hold for this device, driver and these
    versions; others are measured anew.
    """
    path = store_path(store)
    request = engines.EngineRequest(
        checkpoint=checkpoint,
        device=device,
        dtype=dtype,
        kernel_config=policy,
        allow_identity_norm=True,
        autotune_cache=path,
    )
    engine = engines.build_engine(request)
    observation = engines.synthetic_observation(engine)
    with stdout_to_stderr(), status_line("Measuring kernels"):
        for size in batch or [1]:
            engine.infer_batch([observation] * size, seed=0, num_steps=steps)
    traces = [trace for site in engine.plugin.call_sites() for trace in site.traces()]
    _report(path, tuned_calls(traces), len(traces), json_output=json_output)


def store_path(given: Path | None) -> Path:
    """Return the file of the times: the one given, the environment's, or the user's."""
    if given is not None:
        return given.expanduser()
    if named := os.environ.get(engines.CACHE_VARIABLE, "").strip():
        return Path(named).expanduser()
    folder = os.environ.get("XDG_CACHE_HOME", "").strip() or "~/.cache"
    return Path(folder).expanduser() / _DEFAULT_FILE


def tuned_calls(traces: Iterable["SelectionTrace"]) -> list[TunedCall]:
    """Return the choices that a measurement decided, equal ones merged, in order."""
    calls: dict[tuple[object, ...], TunedCall] = {}
    for trace in traces:
        times = {
            row.kernel_id: row.benchmark_ms
            for row in trace.candidates
            if row.benchmark_ms is not None
        }
        if not trace.autotuned or trace.selected not in times:
            continue
        shape = " ".join(
            f"{path.removeprefix(_SHAPE)}={value}"
            for path, value in trace.facts.items()
            if path.startswith(_SHAPE)
        )
        first = next(iter(times))
        made = TunedCall(
            op=trace.op,
            role=trace.role,
            shape=shape,
            selected=trace.selected,
            selected_ms=times[trace.selected],
            first=first,
            first_ms=times[first],
        )
        key = (made.op, made.role, shape, *times.items())
        calls.setdefault(key, made).sites += 1
    return list(calls.values())


def _report(path: Path, calls: list[TunedCall], choices: int, *, json_output: bool) -> None:
    if json_output:
        print_json({"store": path, "choices": choices, "calls": [asdict(call) for call in calls]})
        return
    if calls:
        _print_calls(calls)
    measured = sum(call.sites for call in calls)
    print_pairs(
        [
            (
                "choices",
                f"{choices}, {measured} of them by measurement; the others had no rival",
            ),
            ("times", display_path(path)),
            ("use", f"{engines.PROFILE_VARIABLE}=autotune {engines.CACHE_VARIABLE}={path}"),
        ]
    )


def _print_calls(calls: list[TunedCall]) -> None:
    table = make_table("operation", "role", "shape", "sites", "fastest", "ms", "by priority", "ms")
    for column in table.columns:
        column.no_wrap = column.header != "shape"
    for call in calls:
        same = call.first == call.selected
        table.add_row(
            call.op,
            call.role or "-",
            call.shape,
            str(call.sites),
            call.selected,
            f"{call.selected_ms:.4f}",
            "the same" if same else call.first,
            "" if same else f"{call.first_ms:.4f}",
        )
    print_table(table)
    print_line()
