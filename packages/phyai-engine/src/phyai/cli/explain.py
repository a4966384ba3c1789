"""``phyai explain``: which kernel every call uses, and why not the others."""

import enum
import json
import os
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from phyai.cli import options, queries
from phyai.cli.errors import checked
from phyai.cli.explain_model import ModelRequest, device_name, explain_model
from phyai.cli.output import plain
from phyai.cli.report import Report, markdown_report, policy_summary, text_report
from phyai.cli.traces import group_traces

# What a layer states about a weight that nothing quantized.
DENSE_WEIGHT = {"format": "bf16"}
Op = Annotated[
    str | None,
    typer.Option(
        help="Operation to ask about; with a model, show only its call sites. "
        "gemm without quant.* facts means a dense weight.",
        metavar="OP",
        show_default=False,
    ),
]
FactList = Annotated[
    list[str] | None,
    typer.Option(
        "--fact",
        help="A fact of the single query, e.g. shape.M=50, dtype.input=bf16, quant.format=int8, "
        "attrs.layout=paged. Repeat.",
        metavar="PATH=VALUE",
        show_default=False,
    ),
]
Role = Annotated[str, typer.Option(help="Role of the single query's call site, e.g. expert.")]
Mode = Annotated[
    str,
    typer.Option(help="eager, or capture: what a CUDA graph may hold, of a query or of a model."),
]
Model = Annotated[
    str | None,
    typer.Option(
        help="Folder of a model, as --checkpoint; or the model family that policy rules see. "
        "A single query without it is about no model: rules that name a family do not match.",
        metavar="DIR|FAMILY",
        show_default=False,
    ),
]
Policy = Annotated[
    Path | None,
    typer.Option(
        "--kernel-config",
        "--policy",
        help="Kernel policy (YAML): kernel rules and quantization. "
        "Wins over the variable PHYAI_KERNEL_CONFIG.",
        metavar="FILE",
        show_default=False,
    ),
]
Output = Annotated[
    Path | None,
    typer.Option(help="Write the report to FILE.", metavar="FILE", show_default=False),
]
Target = Annotated[
    str | None,
    typer.Option(
        help="cpu, cuda:N, or a GPU that is not here, e.g. nvidia:sm90. "
        "Default: the device of this machine.",
        metavar="DEVICE",
        show_default=False,
    ),
]


class Format(enum.StrEnum):
    """Forms of a report."""

    TEXT = "text"
    JSON = "json"
    MARKDOWN = "markdown"


Form = Annotated[
    Format | None,
    typer.Option("--format", help="Form of the report. Default: text.", show_default=False),
]


def explain_command(
    checkpoint: options.OptionalCheckpoint = None,
    op: Op = None,
    fact: FactList = None,
    role: Role = "",
    mode: Mode = "eager",
    model: Model = None,
    device: Target = None,
    dtype: options.Dtype = None,
    kernel_config: Policy = None,
    form: Form = None,
    output: Output = None,
    json_output: options.Json = False,
) -> None:
    """Show the kernel of every call, the policy rules that matched, and each rejection's reason.

    With --model DIR or --checkpoint DIR: loads the model, computes one chunk from a synthetic
    observation and reports every call site, identical ones merged, and how each linear layer is
    stored. For a --device that is not here only the shapes of the model are computed, without its
    weights, in bf16 unless --dtype says otherwise. The exit code is 1 when a layer cannot be stored
    on the device or a call has no kernel there.

    Without: answers one query, e.g. phyai explain --op gemm --fact shape.M=50
    --fact dtype.input=bf16 --device nvidia:sm90
    """
    if json_output and form not in (None, Format.JSON):
        raise typer.BadParameter(f"--json and --format {form} contradict each other; give one")
    folder, family = _model(checkpoint, model)
    if folder is None and op is None:
        raise typer.BadParameter(f"give --checkpoint DIR, or one query: {queries.EXAMPLE}")
    if folder is not None and fact:
        raise typer.BadParameter("--fact belongs to a single query, without --checkpoint")
    options.require_folder(output)
    facts = checked("--fact", queries.parse_facts, fact or [])
    if folder is None:
        assert op is not None
        if op == "gemm":
            facts.setdefault("quant", dict(DENSE_WEIGHT))
        report = _explain_query(op, kernel_config, device, family, role=role, mode=mode, **facts)
    else:
        request = ModelRequest(folder, family, device, dtype, kernel_config, mode, op)
        report = explain_model(request)
    _write(report, Format.JSON if json_output else form or Format.TEXT, output)
    if folder is not None and report.problems:
        typer.echo(f"error: on {report.device}, {' and '.join(report.problems)}", err=True)
        raise typer.Exit(1)


def _model(checkpoint: Path | None, model: str | None) -> tuple[Path | None, str | None]:
    """Return folder and family of the model, as far as they were named; a folder tells both."""
    from phyai.models.families import kernel_family

    if model is None:
        return checkpoint, None if checkpoint is None else kernel_family(checkpoint)
    folder = Path(model)
    configs = (folder / "config.json", folder / "transformer" / "config.json")
    if not (os.sep in model or any(config.is_file() for config in configs)):
        return checkpoint, model
    if checkpoint is not None:
        raise typer.BadParameter("--model DIR and --checkpoint DIR name the same thing; give one")
    return folder, kernel_family(folder)


def _explain_query(
    op: str, kernel_config: Path | None, device: str | None, family: str | None, **query: Any
) -> Report:
    with queries.policy_in_force(kernel_config, device, family) as selector:
        trace = queries.ask(op, **query)
        return Report(
            device=device_name(selector),
            family=family,
            policy=policy_summary(selector),
            catalog=selector.catalog.version,
            groups=group_traces([("", trace)]),
        )


def _write(report: Report, form: Format, output: Path | None) -> None:
    render = {Format.TEXT: text_report, Format.MARKDOWN: markdown_report, Format.JSON: _json_text}
    text = render[form](report)
    if output is None:
        sys.stdout.write(text)
        return
    output.expanduser().write_text(text, encoding="utf-8")
    typer.echo(f"wrote {output}", err=True)


def _json_text(report: Report) -> str:
    return json.dumps(plain(report.as_dict()), indent=2, ensure_ascii=False) + "\n"
