"""``phyai replay``: recorded traffic answered again."""

from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from phyai.cli import options
from phyai.cli.errors import CliError
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
from phyai.cli.serve import require_serving

if TYPE_CHECKING:
    from phyai.serving.runner import Runner

ROWS_SHOWN = 10

Recording = Annotated[Path, typer.Argument(help="Folder of a recording.", metavar="RECORDING")]
PolicyOption = Annotated[
    Path | None,
    typer.Option(
        help="Checkpoint folder or server configuration that answers.",
        metavar="DIR|FILE",
        show_default=False,
    ),
]
Against = Annotated[
    Path | None,
    typer.Option(
        help="Second policy to compare with. Default: the replies of the recording.",
        metavar="DIR|FILE",
        show_default=False,
    ),
]
Count = Annotated[
    int | None, typer.Option(help="Exchanges to replay. Default: all.", min=1, show_default=False)
]
Adapter = Annotated[str, typer.Option(help="Adapter of checkpoint folders.", metavar="NAME|FILE")]
Bound = Annotated[
    float | None,
    typer.Option(
        help="Fail when an action differs by more, in the robot's units.",
        min=0.0,
        show_default=False,
    ),
]


def replay_command(
    recording: Recording,
    policy: PolicyOption = None,
    against: Against = None,
    adapter: Adapter = "auto",
    count: Count = None,
    max_abs: Bound = None,
    device: options.Device = None,
    json_output: options.Json = False,
) -> None:
    """Answer recorded requests again and compare, with the seeds of the recording.

    Example: phyai replay records --policy pi05_libero --against pi05_libero_int8.yaml
    """
    require_serving()
    from itertools import islice

    from phyai.serving.jobs import EngineFailureError
    from phyai.serving.recording import read_recording
    from phyai.serving.replay import compare, replay

    if policy is None:
        raise CliError("no policy is given", "--policy CHECKPOINT or --policy CONFIG.yaml")
    try:
        exchanges = list(islice(read_recording(recording), count))
        with stdout_to_stderr(), status_line("Replaying"):
            actions = replay(exchanges, _runner(policy, adapter, device))
            references = [exchange.actions for exchange in exchanges]
            if against is not None:
                references = replay(exchanges, _runner(against, adapter, device))
        found, summary = compare(actions, references)
    except (ValueError, EngineFailureError) as error:
        raise CliError(str(error)) from None
    if json_output:
        print_json({**summary, "differences": [asdict(item) for item in found]})
    else:
        print_pairs(
            [
                ("policy", display_path(policy)),
                ("against", "the recording" if against is None else display_path(against)),
                *summary.items(),
            ]
        )
        print_line()
        table = make_table("exchange", "max abs", "rmse", "cosine", numbers=True)
        for item in sorted(found, key=lambda item: -item.max_abs)[:ROWS_SHOWN]:
            values = (f"{item.max_abs:.3g}", f"{item.rmse:.3g}", f"{item.cosine:.6f}")
            table.add_row(str(item.index), *values)
        print_table(table)
    if max_abs is not None and summary["max_abs"] > max_abs:
        raise CliError(
            f"exchange {summary['worst_exchange']} differs by {summary['max_abs']:.3g}, "
            f"more than {max_abs:g}"
        )


def _runner(policy: Path, adapter: str, device: str | None) -> "Runner":
    from phyai.serving.config import PolicyConfig, read_config
    from phyai.serving.loading import load_policy
    from phyai.serving.runner import Runner

    config = (
        PolicyConfig(policy, adapter=adapter) if policy.is_dir() else read_config(policy).policy
    )
    return Runner(load_policy(replace(config, device=device or config.device)))
