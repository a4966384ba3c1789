"""Reads every value of a checkpoint and reports what contradicts its config or makes no sense."""

import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

import torch

from phyai_quant.checkpoint import check_unquantized_dtypes, load_quant_plan
from phyai_quant.disk_checks import check_quantized_layers
from phyai_quant.offline.files import DTYPES, Checkpoint, TensorEntry, read_checkpoint
from phyai_quant.offline.layers import QUANT_TENSORS, Layer, decide, find_layers, orphans
from phyai_quant.offline.quantize import RECORD_FILE
from phyai_quant.offline.spec_loading import load_layer
from phyai_quant.plan import QuantPlan
from phyai_quant.scheme import QuantConfigError, QuantScheme
from piper_kernels.weights.validate import validate_file

_CHUNK_BYTES = 32 * 2**20
_E8M0_NAN = 255
_WHOLE_TENSOR_SCALES = (
    "weight_global_scale",
    "input_global_scale",
    "weight_scale_2",
    "input_scale",
)
_SCALES = ("weight_scale", "weight_scale_inv", *_WHOLE_TENSOR_SCALES)


class Severity(StrEnum):
    """Whether a checkpoint with this finding gives right results."""

    ERROR = "error"
    WARNING = "warning"


@dataclass(frozen=True, slots=True)
class Finding:
    """One problem of a checkpoint.

    Attributes:
        severity: Errors give wrong results or fail to load; warnings deserve a look.
        check: ``files``, ``config``, ``layer`` or ``values``.
        place: The file, layer or tensor.
        message: What was seen.
    """

    severity: Severity
    check: str
    place: str
    message: str

    def as_dict(self) -> dict[str, str]:
        """Returns a JSON-able mapping."""
        return {
            "severity": self.severity.value,
            "check": self.check,
            "place": self.place,
            "message": self.message,
        }


@dataclass(frozen=True, slots=True)
class CheckReport:
    """What was looked at and found.

    Attributes:
        findings: In the order of the checkpoint: files, config, layers and their values.
        layers: Number of layers with a weight matrix.
        quantized: Those that the config quantizes.
        tensors: Number of tensors whose values were read.
    """

    findings: tuple[Finding, ...]
    layers: int
    quantized: int
    tensors: int

    @property
    def failed(self) -> bool:
        """True when there is an error among the findings."""
        return any(finding.severity is Severity.ERROR for finding in self.findings)


def check_checkpoint(
    directory: str | Path, *, on_progress: Callable[[str, int], None] | None = None
) -> CheckReport:
    """Checks files, config, layers and values of a checkpoint folder.

    Files: damaged, missing or truncated shards and their index. Config: importers' refusals,
    rules that match no layer. Layers: every quantized layer is loaded through its weight spec, so
    missing tensors, wrong shapes and dtypes that contradict the config are found; quantized
    tensors of layers that would load as unquantized. Values: NaN and infinity in codes, scales and
    plain tensors; scales that are zero or negative.

    Args:
        directory: The checkpoint folder.
        on_progress: Called with the name of a tensor and its bytes when its values were read.

    Raises:
        QuantConfigError: The folder does not exist or holds no safetensors file.
    """
    checkpoint = read_checkpoint(directory)
    findings = list(_file_findings(checkpoint))
    layers = find_layers(checkpoint.tensors)
    plan, problems = _read_plan(checkpoint)
    findings += problems
    # Rules of layers in a shard that cannot be read would match nothing as well.
    if plan is not None and not any(problem.fatal for problem in checkpoint.problems):
        classes = {layer.name: layer.module_cls for layer in layers}
        findings += [
            Finding(Severity.WARNING, "config", plan.source, f"matches no layer: {rule.describe()}")
            for rule in plan.unmatched(classes)
        ]
    config_read = plan is not None or not problems
    quantized = 0
    for layer in layers:
        decision = decide(plan, layer)
        quantized += decision.scheme is not None
        if decision.error:
            findings.append(Finding(Severity.ERROR, "layer", layer.name, decision.error))
        elif config_read:
            findings += _layer_findings(layer, decision.scheme, plan)
    findings += [
        Finding(Severity.ERROR, "layer", name, "belongs to no layer with a weight matrix")
        for name in orphans(checkpoint.tensors, layers)
    ]
    findings += _value_findings(checkpoint, layers, on_progress)
    return CheckReport(tuple(findings), len(layers), quantized, len(checkpoint.tensors))


def _file_findings(checkpoint: Checkpoint) -> Iterator[Finding]:
    for problem in checkpoint.problems:
        severity = Severity.ERROR if problem.fatal else Severity.WARNING
        yield Finding(severity, "files", problem.place, problem.message)
    if (checkpoint.directory / RECORD_FILE).exists():
        message = "the checkpoint is being written or its writing was interrupted"
        yield Finding(Severity.ERROR, "files", RECORD_FILE, message)


def _read_plan(checkpoint: Checkpoint) -> tuple[QuantPlan | None, list[Finding]]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", UserWarning)
        try:
            plan = load_quant_plan(checkpoint.directory)
        except QuantConfigError as error:
            return None, [Finding(Severity.ERROR, "config", "", str(error))]
    found = [
        Finding(Severity.WARNING, "config", "", str(item.message))
        for item in caught
        if issubclass(item.category, UserWarning)
    ]
    return plan, found


def _layer_findings(
    layer: Layer, scheme: QuantScheme | None, plan: QuantPlan | None
) -> list[Finding]:
    dtypes = {layer.full_name(name): entry.dtype for name, entry in layer.tensors.items()}
    try:
        if scheme is None or plan is None:
            check_unquantized_dtypes(dtypes, plan)
        else:
            check_quantized_layers(dtypes, plan, {layer.name: layer.module_cls})
            load_layer(layer, scheme)
    except QuantConfigError as error:
        text = str(error).removeprefix(f"{layer.name}: ")
        return [Finding(Severity.ERROR, "layer", layer.name, text)]
    return []


def _value_findings(
    checkpoint: Checkpoint, layers: list[Layer], on_progress: Callable[[str, int], None] | None
) -> Iterator[Finding]:
    marked = {
        layer.full_name(tensor): layer.full_name("weight")
        for layer in layers
        if "comfy_quant" in layer.tensors
        for tensor in layer.tensors
    }
    weights = set(marked.values())
    for shard in checkpoint.shards:
        if any(checkpoint.tensors[name].file == shard for name in weights):
            for item in validate_file(shard):
                if item.tensor in weights:
                    text = f"{item.check}: {item.message}"
                    yield Finding(Severity.ERROR, "values", f"{item.tensor} {item.field}", text)
    for name, entry in checkpoint.tensors.items():
        if name not in marked:
            yield from _tensor_findings(name, entry)
        if on_progress is not None:
            on_progress(name, entry.nbytes)


def _tensor_findings(name: str, entry: TensorEntry) -> Iterator[Finding]:
    last = name.rpartition(".")[2]
    exponents = last == "weight_scale" and entry.dtype == "U8"
    dtype = DTYPES.get(entry.dtype)
    if dtype is None or not (dtype.is_floating_point or exponents):
        return
    counts = dict.fromkeys(("nan", "infinite", "zero", "negative"), 0)
    for values in _chunks(entry):
        if exponents:
            counts["nan"] += int((values == _E8M0_NAN).sum())
            continue
        numbers = values.float()
        counts["nan"] += int(numbers.isnan().sum())
        counts["infinite"] += int(numbers.isinf().sum())
        if last in QUANT_TENSORS:
            counts["zero"] += int((numbers == 0).sum())
            counts["negative"] += int((numbers < 0).sum())
    kind = "scales" if last in QUANT_TENSORS else "values"
    total = torch.Size(entry.shape).numel()
    for what in ("nan", "infinite"):
        if counts[what]:
            message = f"{counts[what]:,} of {total:,} {kind} are {_word(what)}"
            yield Finding(Severity.ERROR, "values", name, message + _cause(last, what))
    for what in ("zero", "negative"):
        if counts[what]:
            fatal = last in _WHOLE_TENSOR_SCALES
            message = f"{counts[what]:,} of {total:,} {kind} are {what}"
            severity = Severity.ERROR if fatal else Severity.WARNING
            yield Finding(severity, "values", name, message)


def _word(what: str) -> str:
    return "NaN" if what == "nan" else what


def _cause(last: str, what: str) -> str:
    if what == "infinite" and last in ("input_global_scale", "weight_global_scale"):
        return "; calibration saw only zeros here: calibrate with more samples"
    if what == "nan" and last in _SCALES:
        return "; every output of the rows they scale is NaN"
    return ""


def _chunks(entry: TensorEntry) -> Iterator[torch.Tensor]:
    if not entry.shape or entry.nbytes <= _CHUNK_BYTES:
        yield entry.read()
        return
    step = max(1, _CHUNK_BYTES * entry.shape[0] // entry.nbytes)
    for start in range(0, entry.shape[0], step):
        yield entry.read_rows(start, min(start + step, entry.shape[0]))
