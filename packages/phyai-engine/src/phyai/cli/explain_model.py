"""The explanation of a whole model, on a device of this machine or for one that is not here."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from phyai.cli import engines, queries
from phyai.cli.errors import CliError
from phyai.cli.layer_formats import LayerFormat, built_format, target_format
from phyai.cli.output import status_line, stdout_to_stderr
from phyai.cli.recording import Call, Recording, record_engine, record_shapes
from phyai.cli.report import Report, policy_summary
from phyai.cli.traces import group_traces

if TYPE_CHECKING:
    import torch

    from phyai.dispatch import Selector
    from phyai_quant import QuantPlan


@dataclass(frozen=True)
class ModelRequest:
    """What to explain.

    Attributes:
        checkpoint: Folder of the model.
        family: Model family that rules see.
        device: Device of this machine, or ``vendor:arch`` of one that is not here.
        dtype: Precision of weights and activations.
        policy: Kernel policy file.
        mode: ``eager`` or ``capture``.
        op: Only the call sites of this operation; None for all.
    """

    checkpoint: Path
    family: str | None
    device: str | None
    dtype: engines.Precision | None
    policy: Path | None
    mode: str = "eager"
    op: str | None = None


def device_name(selector: "Selector") -> str:
    """Return the architecture of a selector's device, or its vendor."""
    return selector.device.arch or selector.device.vendor


def explain_model(request: ModelRequest) -> Report:
    """Return the report of a model.

    Raises:
        CliError: Folder, device or mode do not exist, or no call site is of the operation.
        CheckpointError, ProcessingError, PolicyError, QuantConfigError, NoKernelError: As the
            engine finds them.
    """
    here = request.device is None or request.device.startswith(("cpu", "cuda"))
    report = _explain_here(request) if here else _explain_absent(request)
    if not report.groups:
        raise CliError(f"no call site of operation {request.op!r} was used", "leave out --op")
    return report


def _explain_here(request: ModelRequest) -> Report:
    from phyai.dispatch import kernel_selector_scope

    engine = engines.build_engine(
        engines.EngineRequest(
            request.checkpoint,
            request.device,
            request.dtype,
            request.policy,
            allow_identity_norm=True,
        )
    )
    with stdout_to_stderr(), status_line("Computing one chunk"):
        engine.infer(engines.synthetic_observation(engine), seed=0, num_steps=1)
    recording = record_engine(engine)
    answers = [(call.where, call.trace) for call in recording.calls]
    with kernel_selector_scope(engine.selector):
        if request.mode != "eager":
            answers = [(call.where, _ask(call, request.mode)) for call in recording.calls]
        plan = _plan(request.checkpoint, engine.selector)
        formats = [built_format(layer, plan) for layer in recording.layers]
        return _report(request, engine.selector, answers, formats)


def _explain_absent(request: ModelRequest) -> Report:
    if not request.checkpoint.is_dir():
        what = "is not a folder" if request.checkpoint.exists() else "does not exist"
        raise CliError(
            f"checkpoint {request.checkpoint} {what}",
            "give the folder that holds config.json and the .safetensors files",
        )
    dtype = _dtype(request)
    with queries.policy_in_force(request.policy, request.device, request.family) as selector:
        plan = _plan(request.checkpoint, selector)
        with stdout_to_stderr(), status_line("Following the shapes of one chunk"):
            recording = record_shapes(request.checkpoint, dtype, selector)
        answers, formats = _answers(recording, plan, selector, request.mode)
        return _report(request, selector, answers, formats)


def _dtype(request: ModelRequest) -> "torch.dtype":
    """Return the precision of the flag, of the environment, or bf16."""
    from phyai.engine_config import EngineConfig, parse_dtype

    if request.dtype is not None:
        return parse_dtype(request.dtype)
    try:
        return EngineConfig.from_env().device.params_dtype
    except ValueError as error:
        raise CliError(f"environment: {error}") from None


def _answers(
    recording: Recording, plan: "QuantPlan | None", selector: "Selector", mode: str
) -> tuple[list[tuple[str, dict[str, Any]]], list[LayerFormat]]:
    """Ask every recorded call again, with the weights as the target stores them."""
    decided = {id(layer): target_format(layer, plan, _sm(selector)) for layer in recording.layers}
    answers = []
    for call in recording.calls:
        entry, spec = decided.get(id(call.layer), (None, None))
        if call.layer is None or spec is None:
            problem = "" if entry is None else entry.problem
            answers.append(
                (call.where, _unanswered(call, problem) if problem else _ask(call, mode))
            )
            continue
        dtype = spec.weight_dtype or call.layer.params_dtype
        answers.append((call.where, _ask(call, mode, spec.physical_signature, dtype)))
    return answers, [entry for entry, _ in decided.values()]


def _ask(call: Call, mode: str, quant: Any = None, weight_dtype: Any = None) -> dict[str, Any]:
    query = queries.query_of(call.trace)
    if quant is not None:
        query["quant"] = quant
        query["dtype"] = {**query["dtype"], "weight": weight_dtype}
    return queries.ask(call.trace["op"], mode=mode, **query)


def _unanswered(call: Call, problem: str) -> dict[str, Any]:
    """Return the trace of a call whose weight the target cannot hold."""
    return {
        **call.trace,
        "matched_rules": (),
        "rules": (),
        "candidates": (),
        "selected": None,
        "problem": f"the weight cannot be stored: {problem}",
    }


def _plan(checkpoint: Path, selector: "Selector") -> "QuantPlan | None":
    """Return the plan that an engine with this selector's policy would load under."""
    from phyai.engine_config import EngineConfig
    from phyai.models.families import weights_folder
    from phyai.quantization import quant_sources, resolve_quant_plan

    merge = EngineConfig.from_env().quantization.merge_checkpoint
    with quant_sources(selector.policy.quant_plan, merge_checkpoint=merge):
        return resolve_quant_plan(weights_folder(checkpoint))


def _sm(selector: "Selector") -> int | None:
    device = selector.device
    if device.vendor != "nvidia" or device.arch is None:
        return None
    return int(device.arch.removeprefix("sm"))


def _report(
    request: ModelRequest,
    selector: "Selector",
    answers: list[tuple[str, dict[str, Any]]],
    formats: list[LayerFormat],
) -> Report:
    return Report(
        device=device_name(selector),
        family=request.family,
        policy=policy_summary(selector),
        catalog=selector.catalog.version,
        groups=group_traces(
            (name, trace) for name, trace in answers if request.op in (None, trace["op"])
        ),
        formats=formats,
        checkpoint=request.checkpoint,
    )
