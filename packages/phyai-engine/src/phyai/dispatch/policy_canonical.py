"""The canonical form of a kernel policy: every default written out, one spelling per thing."""

import io
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from phyai.dispatch.policy import Policy, Rule
from phyai.dispatch.policy_yaml import read_document

if TYPE_CHECKING:
    from phyai_quant import QuantScheme
    from phyai_quant.scheme import TensorQuant

COMBINATORS = ("all_of", "any_of", "none_of")
RULE_FIELDS = ("prefer", "restrict_to", "use", "params", "fallback")
TENSOR_FIELDS = (
    "dtype",
    "granularity",
    "block_shape",
    "symmetric",
    "dynamic",
    "micro_scaled",
    "rotation_group",
)


def canonical_policy(file: Path, policy: Policy) -> dict[str, Any]:
    """Return the content of `file` with defaults and dotted fact paths.

    The result is itself a valid policy with the same decisions and the same version.

    Args:
        file: Policy file that `policy` was loaded from.
        policy: The loaded policy.
    """
    data = read_document(file).data or {}
    return {
        "schema": "phyai.kernel/v1",
        "profile": str(policy.profile),
        "defaults": {"fallback": str(policy.fallback)},
        "rules": _rules(policy.rules, data.get("rules")),
        "overrides": _rules(policy.overrides, data.get("overrides")),
        "quantization": _quantization(policy),
    }


def _rules(
    rules: tuple[Rule, ...], entries: list[Mapping[str, Any]] | None
) -> list[dict[str, Any]]:
    return [_rule(rule, entry) for rule, entry in zip(rules, entries or [], strict=True)]


def _rule(rule: Rule, entry: Mapping[str, Any]) -> dict[str, Any]:
    canonical = {"id": rule.id, "priority": rule.priority, "match": flat_match(entry.get("match"))}
    for name in RULE_FIELDS:
        value = getattr(rule, name)
        if value:
            canonical[name] = list(value) if isinstance(value, tuple) else _plain(value)
    return canonical


def _plain(value: Any) -> Any:
    return dict(value) if isinstance(value, Mapping) else str(value)


def flat_match(match: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return a valid matcher with dotted paths instead of nested namespaces, in the same order.

    Args:
        match: Value of a rule's ``match``; None matches always.
    """
    flat: dict[str, Any] = {}
    repeated: list[dict[str, Any]] = []
    for path, value in _entries(match or {}, ""):
        if path in flat:
            repeated.append({path: value})
        else:
            flat[path] = value
    if repeated:
        flat["all_of"] = [*flat.get("all_of", []), *repeated]
    return flat


def _entries(match: Mapping[str, Any], prefix: str) -> Iterator[tuple[str, Any]]:
    for key, value in match.items():
        if key in COMBINATORS:
            yield key, [flat_match(item) for item in value]
        elif key == "when":
            yield key, {word: flat_match(value[word]) for word in ("if", "then")}
        elif isinstance(value, Mapping):
            yield from _entries(value, f"{prefix}{key}.")
        else:
            yield prefix + key, value


def _quantization(policy: Policy) -> dict[str, Any] | None:
    plan = policy.quant_plan
    if plan is None:
        return None
    return {
        "method": "rtn",
        "stage": "load",
        "default": None if plan.default is None else _scheme(plan.default),
        "rules": [
            {"match": {rule.matcher.kind.value: rule.matcher.pattern}, **_scheme(rule.scheme)}
            for rule in plan.rules
        ],
    }


def _scheme(scheme: "QuantScheme | None") -> dict[str, Any]:
    if scheme is None:
        return {"scheme": None}
    tensors = {"weight": scheme.weight, "input": scheme.input}
    fields: dict[str, Any] = {
        role: tensor_fields(tensor) for role, tensor in tensors.items() if tensor is not None
    }
    return fields if scheme.stored_by is None else {**fields, "stored_by": scheme.stored_by}


def tensor_fields(tensor: "TensorQuant") -> dict[str, Any]:
    """Return the fields of a policy's ``weight`` or ``input`` that describe `tensor`."""
    fields = tensor.as_dict()
    return {name: fields[name] for name in TENSOR_FIELDS if fields[name] is not None}


def to_yaml(document: Mapping[str, Any]) -> str:
    """Return `document` as YAML text in the order of its keys."""
    from ruamel.yaml import YAML

    yaml = YAML()
    yaml.default_flow_style = False
    yaml.width = 10_000  # a folded regex is hard to read
    yaml.representer.add_representer(
        type(None), lambda dumper, _: dumper.represent_scalar("tag:yaml.org,2002:null", "null")
    )
    stream = io.StringIO()
    yaml.dump(dict(document), stream)
    return stream.getvalue()
