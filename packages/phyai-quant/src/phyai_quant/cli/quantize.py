"""``phyai-quant quantize``: write a quantized copy of a checkpoint."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from phyai_quant.cli import output
from phyai_quant.cli.options import Json, Policy

if TYPE_CHECKING:
    from phyai_quant.offline.work import Work


def quantize_command(
    source: Annotated[Path, typer.Argument(help="Folder of the dense checkpoint.", metavar="SRC")],
    target: Annotated[
        Path,
        typer.Argument(help="Folder to write: absent, empty or interrupted.", metavar="DST"),
    ],
    policy: Policy,
    device: Annotated[
        str, typer.Option(help="Where to compute: cpu, cuda or cuda:N.", metavar="DEVICE")
    ] = "cpu",
    as_json: Json = False,
) -> None:
    """Write a quantized copy of a checkpoint, for compressed-tensors or with ConvRot markers.

    Streams shard by shard in bounded memory. Run the same command again to continue an interrupted
    run.
    """
    import torch

    from phyai_quant.offline.files import read_checkpoint
    from phyai_quant.offline.policy_file import read_policy
    from phyai_quant.offline.quantize import quantize_checkpoint

    try:
        where = torch.device(device)
    except RuntimeError:
        raise typer.BadParameter(
            f"{device!r} is no device; allowed: cpu, cuda, cuda:N", param_hint="--device"
        ) from None
    plan = read_policy(policy)
    total = read_checkpoint(source).nbytes
    with output.make_progress(of_bytes=True) as progress:
        task = progress.add_task("quantizing", total=total)
        report = quantize_checkpoint(
            source,
            target,
            plan,
            device=where,
            on_progress=lambda _, count: progress.update(task, advance=count),
        )
    work = report.work
    for rule in work.unmatched:
        output.print_warning(f"matches no layer: {rule.describe()}")
    if as_json:
        output.print_json(
            {
                "target": str(target),
                "layout": "convrot" if work.convrot else "compressed-tensors",
                "bytes": {"before": work.checkpoint.nbytes, "after": work.nbytes},
                "shards": list(report.shards),
                "resumed": list(report.resumed),
                "quantized": {n: scheme.describe() for n, scheme in work.schemes.items()},
                "kept": dict(work.kept),
                "unmatched": [rule.describe() for rule in work.unmatched],
            }
        )
        return
    _print_summary(work, target, len(report.shards), len(report.resumed))


def _print_summary(work: "Work", target: Path, shards: int, resumed: int) -> None:
    counts: dict[str, int] = {}
    for scheme in work.schemes.values():
        counts[scheme.describe()] = counts.get(scheme.describe(), 0) + 1
    for text, count in counts.items():
        output.print_line(f"{count} layers: {text}")
    reasons: dict[str, list[str]] = {}
    for name, reason in work.kept.items():
        reasons.setdefault(reason, []).append(name)
    for reason, names in reasons.items():
        more = f" and {len(names) - 3} more" if len(names) > 3 else ""
        output.print_line(f"kept ({reason}): {', '.join(names[:3])}{more}")
    before, after = work.checkpoint.nbytes, work.nbytes
    again = f", {resumed} of them finished before" if resumed else ""
    output.print_line(
        f"{target}: {shards} shards{again}, {output.size(before)} -> {output.size(after)} "
        f"({after / before:.0%})"
    )
