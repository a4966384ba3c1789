"""``phyai-quant plan``: the rules behind a policy or a checkpoint, in one spelling."""

from pathlib import Path
from typing import Annotated

import typer

from phyai_quant.cli import output
from phyai_quant.cli.options import Json


def plan_command(
    path: Annotated[
        Path,
        typer.Argument(
            help="Policy or plan file, checkpoint folder, or its config.json.", metavar="FILE|DIR"
        ),
    ],
    layer: Annotated[
        list[str] | None,
        typer.Option(help="Explain the decision for this layer; repeatable.", metavar="NAME"),
    ] = None,
    as_json: Json = False,
) -> None:
    """Print the plan in canonical form: every default written out, first match wins.

    The output is a plan file that other commands read back.
    """
    from phyai_quant.offline.policy_file import read_any_plan
    from phyai_quant.plan import QuantPlan
    from phyai_quant.plan_io import dump_plan, plan_to_dict

    found = read_any_plan(path)
    plan = QuantPlan(source=str(path)) if found is None else found
    answers = {name: plan.explain(name, "Linear") for name in layer or ()}
    if as_json:
        explained = {
            name: [leg.describe() for leg in answer.legs] for name, answer in answers.items()
        }
        document = plan_to_dict(plan)
        output.print_json({**document, "layers": explained} if answers else document)
        return
    if answers:
        for answer in answers.values():
            output.print_line(str(answer))
        return
    if found is None:
        output.print_line(f"# {path} declares no quantization")
    output.print_line(dump_plan(plan, form="yaml").rstrip())
