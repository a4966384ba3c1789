"""Whether a plan fits the tensors of a checkpoint; looks at names and dtypes only."""

from collections.abc import Mapping
from typing import Any

from phyai_quant.plan import QuantPlan, Resolution
from phyai_quant.scheme import QuantConfigError

_QUANTIZED_DTYPES = ("f8", "float8", "f4", "float4", "i8", "int8", "u8", "uint8")
_FLOAT_CODES = ("f8", "float8", "f4", "float4")
_WIDE_DTYPES = ("bf16", "bfloat16", "f16", "float16", "f32", "float32", "f64", "float64")
_QUANTIZED_TENSORS = (
    "weight_packed",
    "weight_scale",
    "weight_scale_inv",
    "weight_scale_2",
    "weight_global_scale",
    "weight_zero_point",
    "weight_g_idx",
    "input_scale",
    "input_global_scale",
    "input_zero_point",
    "comfy_quant",
)
"""Tensors that only quantized layers have."""

_FOREIGN_TENSORS = ("qweight", "qzeros", "g_idx", "qdata", "pre_quant_scale", "SCB", "quant_state")
"""Tensors of formats that no weight spec reads."""

_SHOWN = 20


def check_unquantized_dtypes(names_to_dtypes: Mapping[str, Any], plan: QuantPlan | None) -> None:
    """Refuses quantized tensors of layers that are about to be loaded as unquantized.

    Layers are taken as linear layers, so ``module_cls: Linear`` rules apply.

    Args:
        names_to_dtypes: Every checkpoint tensor name with its dtype: a torch dtype, its name, or
            the name that safetensors headers use.
        plan: The plan that will be in force; None is unquantized.

    Raises:
        QuantConfigError: A float8, int8 or uint8 weight, any other 4-bit or 8-bit float, or a
            quantization scale belongs to a layer that no rule quantizes on disk; or a tensor
            belongs to a format that is not read here. The text lists the tensors and why.
    """
    problems = []
    for name, dtype in names_to_dtypes.items():
        layer, _, tensor = name.rpartition(".")
        if tensor in _FOREIGN_TENSORS:
            if _has_reader(layer, plan):
                continue
            problems.append(f"{name} ({dtype}): no weight format here reads {tensor!r}")
            continue
        kind = _kind(dtype)
        if tensor in _QUANTIZED_TENSORS or (
            tensor == "weight" and kind.startswith(_QUANTIZED_DTYPES)
        ):
            owners = [layer]
        elif kind.startswith(_FLOAT_CODES):
            owners = [name, layer]
        else:
            continue
        reasons = [_unquantized_reason(owner, plan) for owner in owners]
        if all(reasons):
            problems.append(f"{name} ({dtype}): {reasons[0]}")
    _raise(
        "the checkpoint holds quantized tensors of layers that would be loaded as unquantized; "
        "correct its quantization config or the policy, or use the unquantized checkpoint",
        problems,
    )


def check_quantized_layers(
    names_to_dtypes: Mapping[str, Any],
    plan: QuantPlan,
    layers: Mapping[str, type | str | None],
) -> None:
    """Refuses unquantized weights of layers that the plan takes as quantized on disk.

    Args:
        names_to_dtypes: As in `check_unquantized_dtypes`.
        plan: The plan in force.
        layers: Names of the model's linear layers, as in the checkpoint, and their classes.

    Raises:
        QuantConfigError: A weight is stored in 16 or more bits although a rule says that it is
            quantized. The text lists the tensors and the rules with their files.
    """
    check_resolved_layers(
        names_to_dtypes,
        plan,
        {layer: plan.explain(layer, module_cls) for layer, module_cls in layers.items()},
    )


def check_resolved_layers(
    names_to_dtypes: Mapping[str, Any], plan: QuantPlan, resolutions: Mapping[str, Resolution]
) -> None:
    """Does what `check_quantized_layers` does with decisions that the caller already has.

    A model may name its layers otherwise than the checkpoint and fuse them; its decisions for a
    weight on disk are then other than the plan's for that name alone. Formats of other packages
    (``stored_by``) say themselves what they read.

    Args:
        names_to_dtypes: As in `check_unquantized_dtypes`.
        plan: The plan in force.
        resolutions: What decides each layer, by its name in the checkpoint.

    Raises:
        QuantConfigError: As `check_quantized_layers`; or legs of a fused layer disagree.
    """
    problems = []
    for layer, resolution in resolutions.items():
        name = f"{layer}.weight"
        if not _kind(names_to_dtypes.get(name)).startswith(_WIDE_DTYPES):
            continue
        scheme = resolution.scheme
        if scheme is None or scheme.online or scheme.stored_by is not None:
            continue
        decider = resolution.decided_by(plan.source)
        if resolution.legs[0].rule is None:
            decider += f" says {scheme.describe()}"
        problems.append(f"{name} ({names_to_dtypes[name]}): not quantized, but {decider}")
    _raise(
        "the checkpoint holds unquantized weights of layers that its quantization config covers; "
        "take out entries that name them alone, or add them to its ignore list",
        problems,
    )


def _unquantized_reason(layer: str, plan: QuantPlan | None) -> str:
    if plan is None:
        return "the checkpoint declares no quantization"
    if not layer:
        return "no rule can name it: it belongs to no layer"
    resolution = plan.explain(layer, "Linear")
    if resolution.scheme is None:
        rule = resolution.legs[0].rule
        where = plan.source or "the plan"
        return f"kept unquantized by {rule.describe()}" if rule else f"no rule of {where}"
    if resolution.scheme.online:
        decider = resolution.decided_by(plan.source)
        return f"already quantized, but {decider} expects an unquantized source"
    return ""


def _has_reader(layer: str, plan: QuantPlan | None) -> bool:
    """Tells whether an installed format stores the layer; it knows its own tensors."""
    scheme = plan.resolve(layer, "Linear") if plan is not None and layer else None
    return scheme is not None and scheme.stored_by is not None


def _kind(dtype: object) -> str:
    return str(dtype).removeprefix("torch.").lower()


def _raise(reason: str, problems: list[str]) -> None:
    if problems:
        shown = "\n  ".join(problems[:_SHOWN])
        more = f"\n  and {len(problems) - _SHOWN} more" if len(problems) > _SHOWN else ""
        raise QuantConfigError(f"{reason}:\n  {shown}{more}")
