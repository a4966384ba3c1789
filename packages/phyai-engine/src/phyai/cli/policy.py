"""``phyai policy``: check a kernel policy file, or show what it says in canonical form."""

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from phyai.cli import options
from phyai.cli.output import print_json, print_line, print_pairs

if TYPE_CHECKING:
    from phyai.dispatch import Policy

app = typer.Typer(help="Check or show a kernel policy file.", no_args_is_help=True)

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
