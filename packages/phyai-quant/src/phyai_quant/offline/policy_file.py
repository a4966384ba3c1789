"""Reads the plan of a policy, of a plan file or of a checkpoint."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from phyai_quant.checkpoint import load_quant_plan
from phyai_quant.plan import QuantPlan
from phyai_quant.plan_io import VERSION, plan_from_dict
from phyai_quant.policy_section import parse_quantization_section
from phyai_quant.scheme import QuantConfigError

_SECTION = "quantization"
_CONFIG_FILES = ("config.json", "hf_quant_config.json")


def read_policy(file: str | Path) -> QuantPlan:
    """Returns the plan of a YAML or JSON file with a ``quantization`` section, or of a plan file.

    Other sections of a kernel policy are left to the engine.

    Raises:
        QuantConfigError: The file cannot be read or is no such file; the text gives file and line.
    """
    path = Path(file)
    data = _load(path)
    if not isinstance(data, Mapping):
        raise QuantConfigError(f"{path}: expected a mapping, got {type(data).__name__}")
    if data.get("version") == VERSION:
        return plan_from_dict(_plain(data), source=str(path))
    if data.get(_SECTION) is None:
        raise QuantConfigError(
            f"{path}: has no section {_SECTION!r} and is no plan file (version: {VERSION}); its "
            f"keys: {', '.join(map(str, data)) or 'none'}"
        )
    section = data[_SECTION]

    def line_of(keys: tuple[str | int, ...]) -> int | None:
        return _line(data, (_SECTION, *keys))

    plan = parse_quantization_section(_plain(section), source=str(path), line_of=line_of)
    if plan is None:
        raise QuantConfigError(f"{path}: the section {_SECTION!r} is empty")
    return plan


def read_any_plan(path: str | Path) -> QuantPlan | None:
    """Returns the plan of a checkpoint folder, of its config file, or as `read_policy`.

    Returns:
        The plan; None for a checkpoint that declares no quantization.
    """
    place = Path(path)
    if place.is_dir():
        return load_quant_plan(place)
    if place.name in _CONFIG_FILES and place.is_file():
        return load_quant_plan(place.parent)
    return read_policy(place)


def _load(path: Path) -> Any:
    try:
        from ruamel.yaml import YAML, YAMLError
    except ImportError as error:
        raise QuantConfigError(
            f"{path}: reading a policy needs ruamel.yaml: {error}; install it: "
            'pip install "phyai-quant[cli]"'
        ) from None
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise QuantConfigError(f"{path}: cannot be read: {error}") from error
    try:
        return YAML(typ="rt", pure=True).load(text)
    except (YAMLError, RecursionError, ValueError) as error:
        raise QuantConfigError(f"{path}: is no valid YAML: {error}") from error


def _plain(value: Any) -> Any:
    """Returns containers and scalars of the YAML reader as builtin ones."""
    if isinstance(value, Mapping):
        return {_plain(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_plain(item) for item in value]
    for kind in (bool, int, float, str):
        if isinstance(value, kind):
            return kind(value)
    return value


def _line(root: Any, keys: tuple[str | int, ...]) -> int | None:
    """Returns the line of the last key of a path that exists, counted from 1."""
    line, node = None, root
    for key in keys:
        try:
            places: Any = getattr(node, "lc", None)
            position = places.key(key) if isinstance(node, Mapping) else places.item(key)
            line, node = position[0] + 1, node[key]
        except (KeyError, IndexError, TypeError, AttributeError):
            break
    return line
