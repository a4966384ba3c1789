"""The quantization that a checkpoint directory declares, and that its tensors show."""

import json
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from phyai_quant.importers.base import ConfigSources, Section
from phyai_quant.importers.registry import build_plan
from phyai_quant.plan import QuantPlan
from phyai_quant.scheme import QuantConfigError

_INLINE_KEYS = ("quantization_config", "compression_config")
_NESTED_CONFIGS = ("text_config",)
_STANDALONE_FILE = "hf_quant_config.json"
_QUANTIZED_DTYPES = ("f8", "float8", "f4", "float4", "i8", "int8", "u8", "uint8")
_PACKED_TENSOR = "weight_packed"
_SCALE_TENSORS = (
    "weight_scale",
    "weight_scale_inv",
    "weight_scale_2",
    "weight_global_scale",
    "input_scale",
    "input_global_scale",
)


def load_quant_plan(directory: str | Path) -> QuantPlan | None:
    """Returns the plan that a checkpoint directory declares.

    Reads ``quantization_config`` (or ``compression_config``) of ``config.json``, also inside its
    ``text_config``, and ``hf_quant_config.json``.

    Args:
        directory: The checkpoint directory.

    Returns:
        The plan; None when the directory or both files are missing, or declare nothing.

    Raises:
        QuantConfigError: A file is not valid JSON, configs contradict each other, no importer knows
            the method, or the method's importer cannot honour a value.
    """
    root = Path(directory)
    plan = build_plan(
        ConfigSources(
            inline=_inline_section(root / "config.json"),
            standalone=_read_json(root / _STANDALONE_FILE),
        )
    )
    if plan is not None and plan.kv_cache is not None:
        warnings.warn(
            f"{plan.source}: the checkpoint declares a quantized KV cache "
            f"({plan.kv_cache.describe()}); caches stay unquantized",
            stacklevel=2,
        )
    return plan


def check_unquantized_dtypes(names_to_dtypes: Mapping[str, Any], plan: QuantPlan | None) -> None:
    """Refuses quantized tensors of layers that are about to be loaded as unquantized.

    Looks at names and dtypes only. Layers are taken as linear layers, so ``module_cls: Linear``
    rules apply.

    Args:
        names_to_dtypes: Every checkpoint tensor name with its dtype: a torch dtype, its name, or
            the name that safetensors headers use.
        plan: The plan that will be in force; None is unquantized.

    Raises:
        QuantConfigError: A float8, int8 or uint8 weight, or a quantization scale, belongs to a
            layer that no rule quantizes on disk. The text lists the tensors and why.
    """
    problems = []
    for name, dtype in names_to_dtypes.items():
        layer, _, tensor = name.rpartition(".")
        kind = str(dtype).removeprefix("torch.").lower()
        quantized = tensor == "weight" and kind.startswith(_QUANTIZED_DTYPES)
        if not layer or not (quantized or tensor == _PACKED_TENSOR or tensor in _SCALE_TENSORS):
            continue
        reason = _unquantized_reason(layer, plan)
        if reason:
            problems.append(f"{name} ({dtype}): {reason}")
    if problems:
        shown = "\n  ".join(problems[:20])
        more = f"\n  and {len(problems) - 20} more" if len(problems) > 20 else ""
        raise QuantConfigError(
            "the checkpoint holds quantized tensors of layers that would be loaded as unquantized; "
            "correct its quantization config or the policy, or use the unquantized checkpoint:\n  "
            f"{shown}{more}"
        )


def _unquantized_reason(layer: str, plan: QuantPlan | None) -> str:
    if plan is None:
        return "the checkpoint declares no quantization"
    resolution = plan.explain(layer, "Linear")
    leg = resolution.legs[0]
    if resolution.scheme is None:
        where = plan.source or "the plan"
        return f"kept unquantized by {leg.rule.describe()}" if leg.rule else f"no rule of {where}"
    if resolution.scheme.online:
        by = leg.rule.describe() if leg.rule else "the default"
        return f"already quantized, but {by} expects an unquantized source"
    return ""


def _inline_section(file: Path) -> Section | None:
    config = _read_json(file)
    if config is None:
        return None
    found = []
    for section in (config, *(config.section(key) for key in _NESTED_CONFIGS)):
        found += [section.section(key) for key in _INLINE_KEYS if section.data.get(key)]
    for other in found[1:]:
        if other.data != found[0].data:
            raise QuantConfigError(
                f"{found[0].where()} and {other.where()} contradict each other; keep the one that "
                "describes the tensors on disk"
            )
    return found[0] if found else None


def _read_json(file: Path) -> Section | None:
    if not file.is_file():
        return None
    try:
        data = json.loads(file.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise QuantConfigError(f"{file}: not a valid JSON file: {error}") from error
    if not isinstance(data, dict):
        raise QuantConfigError(f"{file}: expected a JSON object, got {type(data).__name__}")
    return Section(data, str(file))
