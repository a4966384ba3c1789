"""``phyai explain``: which kernel every call uses, and why not the others."""

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from phyai.cli import engines, options
from phyai.cli.errors import CliError, checked
from phyai.cli.output import print_json, print_line, status_line, stdout_to_stderr
from phyai.cli.traces import SiteGroup, group_lines, group_traces

if TYPE_CHECKING:
    from phyai.engine import Engine

NAMESPACES = ("shape", "dtype", "attrs", "quant")
# What a layer states about a weight that nothing quantized.
DENSE_WEIGHT = {"format": "bf16"}
EXAMPLE = "e.g. --op gemm --fact shape.M=50 --fact dtype.input=bf16"

Op = Annotated[
    str | None,
    typer.Option(
        help="Operation to ask about; with --checkpoint, show only its call sites. "
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
Mode = Annotated[str, typer.Option(help="Mode of the single query: eager or capture.")]
Model = Annotated[str, typer.Option(help="Model family that policy rules see.")]
Target = Annotated[
    str | None,
    typer.Option(
        help="cpu, cuda:N, or a GPU that is not here, e.g. nvidia:sm90. "
        "Default: the device of this machine.",
        metavar="DEVICE",
        show_default=False,
    ),
]


def explain_command(
    checkpoint: options.OptionalCheckpoint = None,
    op: Op = None,
    fact: FactList = None,
    role: Role = "",
    mode: Mode = "eager",
    model: Model = "pi05",
    device: Target = None,
    dtype: options.Dtype = None,
    kernel_config: options.KernelConfigFile = None,
    json_output: options.Json = False,
) -> None:
    """Show the kernel of every call, the policy rules that matched, and each rejection's reason.

    With --checkpoint: loads the model, computes one chunk from a synthetic observation and reports
    every call site, identical ones merged. A --device that is not here answers for that GPU with
    the calls recorded on this machine, in bf16 unless --dtype says otherwise.

    Without: answers one query, e.g. phyai explain --op gemm --fact shape.M=50
    --fact dtype.input=bf16 --device nvidia:sm90
    """
    if checkpoint is None and op is None:
        raise typer.BadParameter(f"give --checkpoint DIR, or one query: {EXAMPLE}")
    if checkpoint is not None and fact:
        raise typer.BadParameter("--fact belongs to a single query, without --checkpoint")
    facts = checked("--fact", parse_facts, fact or [])
    if checkpoint is None:
        assert op is not None
        if op == "gemm":
            facts.setdefault("quant", dict(DENSE_WEIGHT))
        with policy_in_force(kernel_config, device, model):
            traces = [ask(op, role=role, mode=mode, **facts)]
    else:
        traces = _engine_traces(checkpoint, device, dtype, kernel_config, model)
        traces = [trace for trace in traces if op in (None, trace["op"])]
        if not traces:
            raise CliError(f"no call site of operation {op!r} was used", "leave out --op")
    groups = group_traces(traces)
    if json_output:
        print_json({"sites": len(traces), "groups": [group.as_dict() for group in groups]})
        return
    _print_groups(groups, len(traces))


def parse_facts(entries: list[str]) -> dict[str, dict[str, Any]]:
    """Sort the values of ``--fact PATH=VALUE`` into the arguments of a query.

    Args:
        entries: Values in the order given, e.g. ``["shape.M=50", "quant.fields.activation=int8"]``.

    Returns:
        Values by namespace and name. Numbers, true, false and null are read as such.

    Raises:
        ValueError: A value that is no PATH=VALUE, or an unknown namespace.
    """
    facts: dict[str, dict[str, Any]] = {}
    for entry in entries:
        path, separator, text = entry.partition("=")
        namespace, _, name = path.strip().partition(".")
        if not separator or not name:
            raise ValueError(f"{entry!r} is not PATH=VALUE; {EXAMPLE}")
        if namespace not in NAMESPACES:
            allowed = ", ".join(f"{known}.NAME" for known in NAMESPACES)
            raise ValueError(f"unknown fact {path.strip()!r}; allowed: {allowed}")
        target = facts.setdefault(namespace, {})
        if namespace == "quant":
            target, name = _quant_target(target, name)
        target[name] = _scalar(text.strip())
    if "block_k" in facts.get("quant", {}):
        facts["quant"]["block_shape"] = (1, facts["quant"].pop("block_k"))
    return facts


def _quant_target(quant: dict[str, Any], name: str) -> tuple[dict[str, Any], str]:
    head, _, rest = name.partition(".")
    return (quant.setdefault("fields", {}), rest) if head == "fields" and rest else (quant, name)


def _scalar(text: str) -> Any:
    words = {"true": True, "false": False, "null": None, "none": None}
    if text.lower() in words:
        return words[text.lower()]
    try:
        return int(text)
    except ValueError:
        return text


def ask(op: str, **query: Any) -> dict[str, Any]:
    """Return the trace of one query as a mapping; arguments are those of `dispatch.explain`.

    Raises:
        CliError: A value of the query that the dispatcher cannot read.
    """
    from phyai.dispatch import PolicyError, explain

    try:
        return explain(op, **query).as_dict()
    except PolicyError:
        raise
    except ValueError as error:
        raise CliError(str(error)) from None


@contextmanager
def policy_in_force(kernel_config: Path | None, device: str | None, model: str) -> Iterator[None]:
    """Answer queries inside the body for `device` under the policy of `kernel_config`.

    Raises:
        CliError: The device is unknown or not here.
        PolicyError: The policy file is wrong.
    """
    from phyai.dispatch import ModelContext, PolicyError
    from phyai.dispatch.bootstrap import initialize_kernel_system, reset_kernel_selector
    from phyai.dispatch.config import KernelConfig
    from phyai.dispatch.device import probe_device

    try:
        profile = probe_device(device)
    except ValueError as error:
        raise CliError(str(error)) from None
    with engines.flags_win({engines.POLICY_VARIABLE: kernel_config}):
        try:
            initialize_kernel_system(
                KernelConfig(config_path=kernel_config),
                device=profile,
                model=ModelContext(family=model),
            )
        except PolicyError:
            raise
        except ValueError as error:
            raise CliError(str(error)) from None
    try:
        yield
    finally:
        reset_kernel_selector()


def _engine_traces(
    checkpoint: Path,
    device: str | None,
    dtype: engines.Precision | None,
    kernel_config: Path | None,
    model: str,
) -> list[dict[str, Any]]:
    if device is None or device.startswith(("cpu", "cuda")):
        return _record(engines.EngineRequest(checkpoint, device, dtype, kernel_config))
    # The rules of the policy are for the absent GPU; its quantization belongs to the weights.
    from phyai.dispatch import load_policy
    from phyai_quant import use_quant_plan

    file = kernel_config or os.environ.get(engines.POLICY_VARIABLE)
    plan = load_policy(file).quant_plan if file else None
    request = engines.EngineRequest(checkpoint, None, dtype or engines.Precision.BF16)
    with engines.flags_win({engines.POLICY_VARIABLE: file}), use_quant_plan(plan):
        engine = _run_once(request)
    traces = [trace.as_dict() for trace in engine.explain()]
    with policy_in_force(kernel_config, device, model):
        weights = weights_on(engine, device)
        return [
            ask(trace["op"], **{**query_of(trace), **weights.get(_question(trace), {})})
            for trace in traces
        ]


def _record(request: engines.EngineRequest) -> list[dict[str, Any]]:
    """Return the traces of one chunk computed from a synthetic observation."""
    return [trace.as_dict() for trace in _run_once(request).explain()]


def _run_once(request: engines.EngineRequest) -> "Engine":
    engine = engines.build_engine(replace(request, allow_identity_norm=True))
    with stdout_to_stderr(), status_line("Computing one chunk"):
        engine.infer(engines.synthetic_observation(engine), seed=0, num_steps=1)
    return engine


def weights_on(engine: "Engine", device: str) -> dict[str, dict[str, Any]]:
    """Return what the queries of linear layers say about their weights on `device`.

    Weights are stored in the format that suits the GPU, which may be another one than here.

    Returns:
        Arguments of `ask`, by the question that a layer asked here.

    Raises:
        QuantConfigError: A weight cannot be stored there.
    """
    from phyai.dispatch.device import probe_device

    profile = probe_device(device)
    sm = (
        int(profile.arch.removeprefix("sm"))
        if profile.vendor == "nvidia" and profile.arch
        else None
    )
    found: dict[str, dict[str, Any]] = {}
    for layer in engine.plugin.linear_layers():
        trace = layer.trace()
        if trace is None:
            continue
        spec, asked = layer.spec_on(sm), query_of(trace.as_dict())
        dtype = {**asked["dtype"], "weight": spec.weight_dtype or layer.params_dtype}
        found[_question(trace.as_dict())] = {"quant": spec.physical_signature, "dtype": dtype}
    return found


def _question(trace: Mapping[str, Any]) -> str:
    return repr((trace["op"], query_of(trace)))


def query_of(trace: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments that ask the dispatcher the question of `trace` again.

    Facts about device, model and libraries are left out: the selector supplies them.
    """
    entries: dict[str, dict[str, Any]] = {}
    for path, value in trace["facts"].items():
        namespace, _, name = path.partition(".")
        if namespace not in NAMESPACES or not name:
            continue
        target = entries.setdefault(namespace, {})
        if namespace == "quant":
            target, name = _quant_target(target, name)
        target[name] = value
    block_k = entries.get("quant", {}).pop("block_k", None)
    if block_k is not None:
        entries["quant"]["block_shape"] = (1, block_k)
    return {"role": trace["role"], **entries}


def _print_groups(groups: list[SiteGroup], sites: int) -> None:
    facts = groups[0].trace["facts"]
    where = facts.get("device.arch") or facts.get("device.vendor")
    counted = f"{sites} call sites" if sites > 1 else "1 call site"
    print_line(f"device {where}, model {facts.get('model.family')}, {counted}")
    for group in groups:
        print_line()
        for line in group_lines(group):
            print_line(line)
