"""The ``quantization`` section of a kernel policy: which layers to quantize while loading.

An example of all keys:

    quantization:
      method: rtn                # the only method: round to nearest
      stage: load                # the only stage: while weights are loaded
      default: null              # scheme of layers that no rule matches
      rules:                     # first match wins
        - match: {glob: "*.mlp.*"}          # one of name, glob, regex, module_cls
          weight: {dtype: int4, block_shape: [1, 128]}
        - match: {glob: "*.attn.*"}
          weight: {dtype: fp8_e4m3}
          input: {dtype: fp8_e4m3}
          stored_by: fp8_rows             # a format by name; without it the first that fits
        - match: {name: lm_head}
          scheme: null                      # keep unquantized
"""

import difflib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NoReturn

from phyai_quant.online_rules import (
    INPUT_DTYPES,
    MICRO_BLOCKS,
    WEIGHT_DTYPES,
    find_violation,
)
from phyai_quant.plan import QuantPlan
from phyai_quant.rules import Matcher, MatcherKind, Rule
from phyai_quant.scheme import Granularity, QDType, QuantConfigError, QuantScheme, TensorQuant

Path = tuple[str | int, ...]
LineOf = Callable[[Path], int | None]

_ROOT = "quantization"
_SECTION_KEYS = ("method", "stage", "default", "rules")
_RULE_KEYS = ("id", "match", "scheme", "weight", "input", "stored_by")
_SCHEME_KEYS = ("scheme", "weight", "input", "stored_by")
_TENSOR_KEYS = (
    "dtype",
    "granularity",
    "block_shape",
    "symmetric",
    "dynamic",
    "micro_scaled",
    "rotation_group",
)


def parse_quantization_section(
    section: Mapping[str, Any] | None, *, source: str = "", line_of: LineOf | None = None
) -> QuantPlan | None:
    """Reads the ``quantization`` section of a policy.

    Args:
        section: The section as plain data; None leaves the checkpoint's own quantization in force.
        source: Name of the file, for messages.
        line_of: Gives the line of a key path inside the section, such as ``("rules", 0, "weight",
            "dtype")``, or None when it is not known.

    Returns:
        The plan, with schemes that are quantized at load; None for an absent section.

    Raises:
        QuantConfigError: Any key or value outside the schema, or a combination of weight and input
            that no kernel runs. The text gives file, line and key path.
    """
    if section is None:
        return None
    root = _Node(section, (), source, line_of or (lambda _: None))
    root.check_mapping(_SECTION_KEYS)
    root.choice("method", ("rtn",), "rtn")
    root.choice("stage", ("load",), "load")
    default = root.child("default")
    return QuantPlan(
        rules=tuple(_parse_rule(node) for node in root.items("rules")),
        default=None if default.value is None else _parse_scheme(default, _SCHEME_KEYS),
        source=source or _ROOT,
    )


@dataclass(frozen=True, slots=True)
class _Node:
    """A value of the section and where it stands."""

    value: Any
    path: Path
    source: str
    line_of: LineOf
    rule_id: str | None = None

    def fail(self, message: str, key: str | None = None) -> NoReturn:
        path = self.path if key is None else (*self.path, key)
        line = self.line_of(path)
        place = [self.source] if self.source else []
        if line is not None:
            place.append(str(line) if self.source else f"line {line}")
        where = ":".join(place)
        name = f" (rule {self.rule_id!r})" if self.rule_id is not None else ""
        raise QuantConfigError(f"{where}{': ' if where else ''}{_dotted(path)}{name}: {message}")

    def child(self, key: str | int) -> "_Node":
        value = self.value[key] if isinstance(key, int) else self.value.get(key)
        return replace(self, value=value, path=(*self.path, key))

    def check_mapping(self, allowed: Sequence[str]) -> None:
        if not isinstance(self.value, Mapping):
            self.fail(f"expected a mapping, got {self.value!r}")
        for key in self.value:
            if key not in allowed:
                close = difflib.get_close_matches(str(key), allowed, n=1)
                hint = f"; did you mean {close[0]!r}?" if close else ""
                self.fail(f"unknown key; allowed: {', '.join(allowed)}{hint}", str(key))

    def items(self, key: str) -> list["_Node"]:
        node = self.child(key)
        if node.value is None and key not in self.value:
            return []
        if not isinstance(node.value, list | tuple):
            node.fail(f"expected a list, got {node.value!r}")
        return [node.child(index) for index in range(len(node.value))]

    def choice(self, key: str, allowed: Iterable[str], default: str | None = None) -> str:
        value = self.value.get(key, default)
        allowed = tuple(allowed)
        if not isinstance(value, str) or value not in allowed:
            quote = "; write it in quotes" if isinstance(value, bool) else ""
            missing = key not in self.value
            seen = "required key is missing" if missing else f"{value!r} is not allowed"
            self.fail(f"{seen}; allowed: {', '.join(allowed)}{quote}", key)
        return value

    def boolean(self, key: str, default: bool) -> bool:
        value = self.value.get(key, default)
        if not isinstance(value, bool):
            self.fail(f"{value!r} is not a boolean; allowed: true, false", key)
        return value


def _parse_rule(node: _Node) -> Rule:
    node.check_mapping(_RULE_KEYS)
    rule_id = node.value.get("id")
    if rule_id is not None:
        if not isinstance(rule_id, str) or not rule_id:
            node.fail(f"{rule_id!r} is not a non-empty string", "id")
        node = replace(node, rule_id=rule_id)
    matcher = _parse_match(node)
    where = _dotted(node.path) + (f" {rule_id!r}" if rule_id else "")
    return Rule(matcher, _parse_scheme(node, _RULE_KEYS), source=where)


def _parse_match(rule: _Node) -> Matcher:
    kinds = tuple(kind.value for kind in MatcherKind)
    if "match" not in rule.value:
        rule.fail(f"required key is missing; give exactly one of {', '.join(kinds)}", "match")
    node = rule.child("match")
    node.check_mapping(kinds)
    if len(node.value) != 1:
        node.fail(f"has {len(node.value)} keys; give exactly one of {', '.join(kinds)}")
    (kind, pattern), *_ = node.value.items()
    if not isinstance(pattern, str) or not pattern:
        node.fail(f"{pattern!r} is not a non-empty string", kind)
    try:
        return Matcher(MatcherKind(kind), str(pattern))
    except QuantConfigError as error:
        node.fail(str(error), kind)


def _parse_scheme(node: _Node, keys: Sequence[str]) -> QuantScheme | None:
    node.check_mapping(keys)
    if "scheme" in node.value:
        if node.value["scheme"] is not None:
            node.fail(f"{node.value['scheme']!r} is not allowed; allowed: null", "scheme")
        for key in ("weight", "input", "stored_by"):
            if key in node.value:
                node.fail(f"cannot be combined with 'scheme: null'; remove {key!r}", key)
        return None
    if node.value.get("weight") is None:
        node.fail("required key is missing; give a mapping, or 'scheme: null'", "weight")
    weight = _parse_tensor(node.child("weight"), WEIGHT_DTYPES, is_input=False)
    given = node.value.get("input") is not None
    act = _parse_tensor(node.child("input"), INPUT_DTYPES, is_input=True) if given else None
    scheme = QuantScheme(weight, act, online=True, stored_by=_parse_stored_by(node))
    violation = find_violation(scheme)
    if violation is not None:
        field, _, rest = violation.field.partition(".")
        place = node.child(field) if field in node.value else node
        key = rest.partition("[")[0] if field in node.value else field
        place.fail(str(violation), key)
    return scheme


def _parse_stored_by(node: _Node) -> str | None:
    name = node.value.get("stored_by")
    if name is not None and (not isinstance(name, str) or not name):
        node.fail(f"{name!r} is not the name of a weight format", "stored_by")
    return name


def _parse_tensor(node: _Node, dtypes: Sequence[QDType], *, is_input: bool) -> TensorQuant:
    node.check_mapping(_TENSOR_KEYS)
    if node.value.get("dtype") == QDType.BF16.value and not is_input:
        node.fail("'bf16' is not a quantized dtype; use 'scheme: null' for the rule", "dtype")
    dtype = QDType(node.choice("dtype", [item.value for item in dtypes]))
    block_shape = _parse_block_shape(node) or MICRO_BLOCKS.get(dtype)
    granularity = node.choice(
        "granularity",
        [item.value for item in Granularity],
        Granularity.PER_CHANNEL.value if block_shape is None else Granularity.BLOCK.value,
    )
    if (granularity == Granularity.BLOCK) != (block_shape is not None):
        node.fail(
            f"granularity {granularity!r} and block_shape {block_shape} contradict; give "
            "block_shape exactly with granularity 'block'",
            "granularity" if "granularity" in node.value else "block_shape",
        )
    rotation = node.value.get("rotation_group")
    if rotation is not None and (not isinstance(rotation, int) or isinstance(rotation, bool)):
        node.fail(f"{rotation!r} is not an integer", "rotation_group")
    symmetric = node.boolean("symmetric", default=True)
    dynamic = node.boolean("dynamic", default=is_input)
    micro_scaled = node.boolean("micro_scaled", default=dtype in MICRO_BLOCKS)
    try:
        return TensorQuant(
            dtype=dtype,
            granularity=Granularity(granularity),
            symmetric=symmetric,
            dynamic=dynamic,
            micro_scaled=micro_scaled,
            block_shape=block_shape,
            rotation_group=rotation,
        )
    except QuantConfigError as error:
        node.fail(str(error), "rotation_group")


def _parse_block_shape(node: _Node) -> tuple[int, int] | None:
    value = node.value.get("block_shape")
    if value is None:
        return None
    is_pair = isinstance(value, list | tuple) and len(value) == 2
    if not is_pair or any(isinstance(v, bool) or not isinstance(v, int) or v < 1 for v in value):
        node.fail(
            f"{value!r} is not a list of two positive integers [N block, K block]", "block_shape"
        )
    return (int(value[0]), int(value[1]))


def _dotted(path: Path) -> str:
    parts = (f"[{part}]" if isinstance(part, int) else f".{part}" for part in path)
    return _ROOT + "".join(parts)
