"""How each linear layer of a model is stored: the rule that decided, the scheme, the format."""

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from phyai.cli.names import compact_names

if TYPE_CHECKING:
    from phyai.layers import Linear
    from phyai_quant import QuantPlan, QuantScheme
    from phyai_quant.specs.base import AllocationRequest, WeightSpec

NO_PLAN = "no plan"
NO_NAME = "the layer has no name, so no plan is asked"
IN_CODE = "given in code"


@dataclass(frozen=True)
class LayerFormat:
    """The decision for one layer.

    Attributes:
        name: Full name, which quantization rules match.
        shape: ``[N, K]``.
        rule: The quantization rule that decided, or why none did.
        scheme: What weight and input are quantized to.
        spec: Id of the physical weight format; empty when there is none.
        problem: Why the target cannot hold the layer; empty if it can.
    """

    name: str
    shape: tuple[int, int]
    rule: str
    scheme: str
    spec: str
    problem: str = ""

    def as_dict(self) -> dict[str, Any]:
        """Return a JSON-able mapping."""
        return asdict(self)


def built_format(layer: "Linear", plan: "QuantPlan | None") -> LayerFormat:
    """Return the decision that a loaded layer was built under.

    Args:
        layer: A layer of a loaded model.
        plan: The plan it was loaded under.
    """
    rule = _rule(layer, plan)[0]
    return _format(layer, rule, layer.scheme, layer.spec)


def target_format(
    layer: "Linear", plan: "QuantPlan | None", sm: int | None
) -> "tuple[LayerFormat, WeightSpec | None]":
    """Return how a target stores a layer, and that format.

    Args:
        layer: A layer of a model built without a plan.
        plan: The plan the target would load it under.
        sm: NVIDIA SM version of the target, such as 90; None for other devices.

    Returns:
        The decision, and the spec; None when the target cannot hold the layer.
    """
    from phyai_quant import QuantConfigError, materialize
    from phyai_quant.specs.base import AllocationRequest

    rule, scheme, problem = _rule(layer, plan)
    if layer.scheme is not None:
        rule, scheme, problem = IN_CODE, layer.scheme, ""
    if problem:
        return _format(layer, rule, None, None, problem), None
    request = AllocationRequest(
        weight_shape=(layer.out_features, layer.in_features),
        logical_widths=tuple(leg.width for leg in layer.legs),
        shard_ids=tuple(leg.shard_id for leg in layer.legs),
        params_dtype=layer.params_dtype,
        device="meta",
        slices=layer.slices,
    )
    try:
        spec = layer.spec if rule == IN_CODE else materialize(scheme, sm)
        spec = _fitting(spec, layer.prefix, request)
    except QuantConfigError as error:
        return _format(layer, rule, scheme, None, str(error)), None
    return _format(layer, rule, scheme, spec), spec


def _fitting(spec: "WeightSpec", name: str, request: "AllocationRequest") -> "WeightSpec":
    """Return the format that a layer of this size ends in.

    Raises:
        QuantConfigError: The format cannot hold the layer.
    """
    import torch

    from phyai_quant.specs.humming_checkpoint import HummingCheckpointSpec
    from phyai_quant.specs.humming_format import find_misfit

    holder = torch.nn.Module()
    holder.prefix = name  # pyright: ignore[reportArgumentType]
    packed = isinstance(spec, HummingCheckpointSpec)
    # Formats that stage weights in host memory would reserve it too.
    with torch.device("meta"):
        (spec.portable if packed else spec).allocate(holder, request)
    if packed and find_misfit(spec.stored, request, packed=True):
        return spec.portable
    return spec


def _rule(layer: "Linear", plan: "QuantPlan | None") -> "tuple[str, QuantScheme | None, str]":
    """Return the rule that decides a layer, its scheme, and what is wrong with them."""
    from phyai_quant import QuantConfigError

    if plan is None:
        return (NO_PLAN if layer.scheme is None else IN_CODE), layer.scheme, ""
    if not layer.prefix:
        return NO_NAME, None, ""
    legs = [leg.name for leg in layer.legs] if len(layer.legs) > 1 else None
    resolution = plan.explain(
        layer.prefix, type(layer), legs=legs, stored=layer.stored if layer.renamed else ()
    )
    rules = dict.fromkeys(_rule_text(leg.rule) for leg in resolution.legs)
    text = "; ".join(rules)
    try:
        return text, resolution.scheme, ""
    except QuantConfigError as error:
        return text, None, str(error)


def _rule_text(rule: Any) -> str:
    if rule is None:
        return "no rule matches, the plan's default"
    kind, pattern = rule.matcher.kind.value, rule.matcher.pattern
    if kind == "name":
        # One entry of a list that names layers one by one: the list says it for all of them.
        pattern, source = "of the layer", rule.source.replace(pattern, "").rstrip(": ")
    else:
        source = rule.source
    return f"{kind} {pattern}" + (f" ({source})" if source else "")


def _format(
    layer: "Linear",
    rule: str,
    scheme: "QuantScheme | None",
    spec: "WeightSpec | None",
    problem: str = "",
) -> LayerFormat:
    return LayerFormat(
        name=layer.prefix,
        shape=(layer.out_features, layer.in_features),
        rule=rule,
        scheme="unquantized" if scheme is None else scheme.describe(),
        spec="" if spec is None else spec.spec_id,
        problem=problem.removeprefix(f"{layer.prefix}: "),
    )


@dataclass(frozen=True)
class FormatGroup:
    """Layers that are stored alike for the same reason."""

    first: LayerFormat
    count: int
    names: tuple[str, ...]

    @property
    def outcome(self) -> str:
        """The stored format, or that there is none."""
        return self.first.spec or "CANNOT BE STORED"


def group_formats(formats: Iterable[LayerFormat]) -> list[FormatGroup]:
    """Merge layers with one rule, scheme, format and problem, in the order of their first."""
    groups: dict[tuple[str, ...], list[LayerFormat]] = {}
    for entry in formats:
        key = (entry.rule, entry.scheme, entry.spec, entry.problem)
        groups.setdefault(key, []).append(entry)
    return [
        FormatGroup(found[0], len(found), tuple(compact_names(entry.name for entry in found)))
        for found in groups.values()
    ]


def format_lines(groups: Iterable[FormatGroup]) -> list[str]:
    """Return the text lines of grouped decisions."""
    lines: list[str] = []
    for group in groups:
        counted = f"{group.count} layers" if group.count > 1 else "1 layer"
        lines.append(f"  {group.outcome}  ({counted})")
        lines.append(f"    scheme  {group.first.scheme}")
        lines.append(f"    rule    {group.first.rule}")
        if group.first.problem:
            lines.append(f"    reason  {group.first.problem}")
        lines.extend(f"    layer   {name or 'without a name'}" for name in group.names)
    return lines
