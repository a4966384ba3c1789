"""``phyai-quant validate``: is this checkpoint sound?"""

from typing import Annotated

import typer

from phyai_quant.cli import output
from phyai_quant.cli.options import CheckpointDir, Json


def validate_command(
    directory: CheckpointDir,
    strict: Annotated[bool, typer.Option("--strict", help="Warnings fail too.")] = False,
    as_json: Json = False,
) -> int:
    """Read every value and report what is wrong; exit 1 when there is an error.

    Looks for damaged and missing shards, tensors that contradict the config in shape or dtype,
    missing scales, NaN and infinity, scales of zero, rules that match nothing.
    """
    from phyai_quant.offline.checks import Severity, check_checkpoint

    with output.make_progress(of_bytes=True) as progress:
        task = progress.add_task("reading values", total=None)
        report = check_checkpoint(
            directory, on_progress=lambda _, count: progress.update(task, advance=count)
        )
    errors = sum(finding.severity is Severity.ERROR for finding in report.findings)
    failed = report.failed or (strict and bool(report.findings))
    if as_json:
        output.print_json(
            {
                "valid": not failed,
                "layers": report.layers,
                "quantized": report.quantized,
                "tensors": report.tensors,
                "findings": [finding.as_dict() for finding in report.findings],
            }
        )
        return int(failed)
    for finding in report.findings:
        place = f"{finding.place}: " if finding.place else ""
        output.print_line(f"{finding.severity.value} [{finding.check}] {place}{finding.message}")
    output.print_line(
        f"{'invalid' if failed else 'valid'}: {errors} errors, {len(report.findings) - errors} "
        f"warnings; {report.tensors} tensors, {report.layers} layers with a weight matrix, "
        f"{report.quantized} of them quantized"
    )
    return int(failed)
