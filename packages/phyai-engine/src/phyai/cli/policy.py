"""``phyai policy``: check, show and compare kernel policy files, and export their schema."""

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from phyai.cli import options
from phyai.cli.output import one_line, print_json, print_line, print_pairs

if TYPE_CHECKING:
    from phyai.dispatch import Policy

app: typer.Typer = typer.Typer(
    help="Check, show and compare kernel policy files.", no_args_is_help=True
)

PolicyFile = Annotated[Path, typer.Argument(help="Kernel policy (YAML).", metavar="FILE")]


def _load(file: Path) -> "Policy":
    from phyai.dispatch import load_policy

    return load_policy(file)


def _summary(policy: "Policy") -> dict[str, Any]:
    plan = policy.quant_plan
    return {
        "profile": str(policy.profile),
        "fallback": str(policy.fallback),
        "rules": [rule.id for rule in policy.rules],
        "overrides": [rule.id for rule in policy.overrides],
        "quantization_rules": 0 if plan is None else len(plan.rules),
        "version": policy.version,
    }


@app.command()
def check(file: PolicyFile, json_output: options.Json = False) -> None:
    """Check that FILE is a valid kernel policy and print a summary.

    A fault is reported with its file and line, and the exit code is 1.
    """
    summary = _summary(_load(file))
    if json_output:
        print_json({"file": file, "ok": True, **summary})
        return
    print_line(f"OK  {file}")
    print_pairs(
        [
            ("profile", summary["profile"]),
            ("fallback", summary["fallback"]),
            ("rules", _counted(summary["rules"])),
            ("overrides", _counted(summary["overrides"])),
            ("quantization rules", summary["quantization_rules"]),
            ("version", summary["version"]),
        ]
    )


def _counted(ids: list[str]) -> str:
    return f"{len(ids)}  ({', '.join(ids)})" if ids else "0"


@app.command()
def show(file: PolicyFile, json_output: options.Json = False) -> None:
    """Print FILE in canonical form: defaults written out, one spelling for every match.

    The output is a valid policy with the same version. Two files with the same output decide the
    same.
    """
    from phyai.dispatch.policy_canonical import canonical_policy, to_yaml

    document = canonical_policy(file, _load(file))
    if json_output:
        print_json(document)
    else:
        sys.stdout.write(to_yaml(document))


@app.command()
def diff(
    old: Annotated[Path, typer.Argument(help="First policy (YAML).", metavar="OLD")],
    new: Annotated[Path, typer.Argument(help="Second policy (YAML).", metavar="NEW")],
    json_output: options.Json = False,
) -> None:
    """Print what NEW decides otherwise than OLD, whatever their spelling.

    The exit code is 0 when both decide the same and 1 when they differ.
    """
    from phyai.dispatch import build_catalog, load_policy
    from phyai.dispatch.policy_diff import diff_policies

    catalog = build_catalog()
    before = load_policy(old, catalog=catalog)
    changes = diff_policies(before, load_policy(new, catalog=catalog), catalog)
    if json_output:
        differences = [change.as_dict() for change in changes]
        print_json({"old": old, "new": new, "same": not changes, "changes": differences})
    elif not changes:
        print_line("Both decide the same.")
    for change in () if json_output else changes:
        print_line(change.where)
        for sign, value in (("-", change.old), ("+", change.new)):
            if value is not None:
                print_line(f"  {sign} {one_line(value)}")
    if changes:
        raise typer.Exit(1)


@app.command()
def schema(
    output: Annotated[
        Path | None,
        typer.Option(help="Write it to this file.", metavar="FILE", show_default=False),
    ] = None,
) -> None:
    """Print the JSON Schema (draft 2020-12) of kernel policies, for editors.

    Operations, implementation ids and facts are those of the installed catalog.
    """
    from phyai.dispatch.policy_schema import policy_schema

    options.require_folder(output)
    text = json.dumps(policy_schema(), indent=2) + "\n"
    if output is None:
        sys.stdout.write(text)
    else:
        output.expanduser().write_text(text, encoding="utf-8")
        print_line(f"Wrote {output}")
