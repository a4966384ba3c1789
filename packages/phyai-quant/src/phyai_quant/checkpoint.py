"""The quantization that a checkpoint declares in its configs and weight files."""

import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from phyai_quant.disk_checks import check_unquantized_dtypes
from phyai_quant.importers.base import ConfigSources, Section
from phyai_quant.importers.markers import read_markers
from phyai_quant.importers.registry import build_plan
from phyai_quant.plan import QuantPlan
from phyai_quant.scheme import QuantConfigError
from phyai_quant.strict_json import parse_json

__all__ = ["check_unquantized_dtypes", "load_quant_plan"]

_INLINE_KEYS = ("quantization_config", "compression_config")
_LANGUAGE_CONFIGS = (
    "text_config",
    "llm_config",
    "language_config",
    "language_model_config",
    "thinker_config",
)
"""Parts of a multimodal config whose quantization is that of the checkpoint."""

_STANDALONE_FILE = "hf_quant_config.json"


def load_quant_plan(path: str | Path) -> QuantPlan | None:
    """Returns the plan that a checkpoint declares.

    Reads ``quantization_config`` (or ``compression_config``) of ``config.json``, also inside the
    config of its language model, ``hf_quant_config.json``, and ComfyUI's markers in the
    ``*.safetensors`` files. The files may agree; when they do not, nothing is guessed.

    Args:
        path: The checkpoint directory, or one safetensors file for its markers alone.

    Returns:
        The plan; None when the directory or all of these are missing, or declare nothing.

    Raises:
        QuantConfigError: A file is not valid JSON, configs contradict each other, no importer knows
            the method, or the method's importer cannot honour a value.
    """
    root = Path(path)
    if root.is_file():
        if root.suffix != ".safetensors":
            raise QuantConfigError(
                f"{root}: expected a checkpoint directory or a .safetensors file"
            )
        sources = ConfigSources(markers=read_markers([root]))
    else:
        sources = ConfigSources(
            inline=_inline_section(root / "config.json"),
            standalone=_read_json(root / _STANDALONE_FILE),
            markers=read_markers(sorted(root.glob("*.safetensors"))),
        )
    plan = build_plan(sources)
    if plan is not None and plan.kv_cache is not None:
        warnings.warn(
            f"{plan.source}: the checkpoint declares a quantized KV cache "
            f"({plan.kv_cache.describe()}); caches stay unquantized",
            stacklevel=2,
        )
    return plan


def _inline_section(file: Path) -> Section | None:
    config = _read_json(file)
    if config is None:
        return None
    found: list[Section] = []
    for parent in _parts(config):
        for key in _INLINE_KEYS:
            section = parent.section(key)
            if section.data:
                _check_place(section, found)
                found.append(section)
    return found[0] if found else None


def _check_place(section: Section, found: list[Section]) -> None:
    """Refuses a config that differs from an earlier one or holds for a part of the model only."""
    if found:
        if section.data != found[0].data:
            raise QuantConfigError(
                f"{found[0].where()} and {section.where()} contradict each other; keep the one "
                "that describes the tensors on disk"
            )
        return
    other = [part for part in section.path.split(".")[:-1] if part not in _LANGUAGE_CONFIGS]
    if other:
        raise QuantConfigError(
            f"{section.where()}: a config for {'.'.join(other)} alone is not supported; put it at "
            f"the top, or into one of {', '.join(_LANGUAGE_CONFIGS)}, with an ignore list"
        )


def _parts(config: Section) -> Iterator[Section]:
    """Yields the config and the configs nested in it, outer before inner."""
    pending = [config]
    while pending:
        section = pending.pop(0)
        yield section
        for key, value in section.data.items():
            if key in _LANGUAGE_CONFIGS or (isinstance(value, Mapping) and key.endswith("_config")):
                pending += [] if key in _INLINE_KEYS else [section.section(key)]


def _read_json(file: Path) -> Section | None:
    if not file.exists():
        return None
    try:
        text = file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise QuantConfigError(f"{file}: not a valid JSON file: {error}") from error
    data: Any = parse_json(text, str(file))
    if not isinstance(data, dict):
        raise QuantConfigError(f"{file}: expected a JSON object, got {type(data).__name__}")
    return Section(data, str(file))
