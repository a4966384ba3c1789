"""The canonical form of a kernel policy: every default written out, one spelling per thing."""

import io
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from phyai.dispatch import Policy
    from phyai_quant import QuantScheme

COMBINATORS = ("all_of", "any_of", "none_of")
NAMESPACES = ("device", "quant", "model", "shape", "dtype", "attrs", "lib")
RULE_FIELDS = ("prefer", "restrict_to", "use", "params", "fallback")


def canonical_policy(file: Path, policy: "Policy") -> dict[str, Any]:
    """Return the content of `file` with defaults, sorted matches and dotted fact paths.

    The result is itself a valid policy with the same decisions and the same version.

    Args:
        file: Policy file that `policy` was loaded from.
        policy: The loaded policy.
    """
    from phyai.dispatch.policy_yaml import read_document

    data = read_document(file).data or {}
    return {
        "schema": "phyai.kernel/v1",
        "profile": str(policy.profile),
        "defaults": {"fallback": str(policy.fallback)},
        "rules": _rules(policy.rules, data.get("rules")),
        "overrides": _rules(policy.overrides, data.get("overrides")),
        "quantization": _quantization(policy),
    }


def _rules(rules: Any, entries: list[Mapping[str, Any]] | None) -> list[dict[str, Any]]:
    return [_rule(rule, entry) for rule, entry in zip(rules, entries or [], strict=True)]


def _rule(rule: Any, entry: Mapping[str, Any]) -> dict[str, Any]:
    canonical = {"id": rule.id, "priority": rule.priority, "match": flat_match(entry.get("match"))}
    for name in RULE_FIELDS:
        value = getattr(rule, name)
        if value:
            canonical[name] = list(value) if isinstance(value, tuple) else _plain(value)
    return canonical


def _plain(value: Any) -> Any:
    return dict(value) if isinstance(value, Mapping) else str(value)


def flat_match(match: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return a matcher with dotted paths instead of nested namespaces, sorted by path.

    Args:
        match: Value of a rule's ``match``; None matches always.
    """
    flat: dict[str, Any] = {}
    for key, value in (match or {}).items():
        if key in COMBINATORS:
            flat[key] = [flat_match(item) for item in value]
        elif key == "when":
            flat[key] = {word: flat_match(value[word]) for word in ("if", "then")}
        elif isinstance(value, Mapping) and key.split(".")[0] in NAMESPACES:
            flat |= {f"{key}.{path}": item for path, item in flat_match(value).items()}
        else:
            flat[key] = value
    return dict(sorted(flat.items()))


def _quantization(policy: "Policy") -> dict[str, Any] | None:
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
    return {
        role: {
            name: value
            for name, value in tensor.as_dict().items()
            if value is not None and name != "act_order"
        }
        for role, tensor in tensors.items()
        if tensor is not None
    }


def to_yaml(document: Mapping[str, Any]) -> str:
    """Return `document` as YAML text in the order of its keys."""
    from ruamel.yaml import YAML

    yaml = YAML()
    yaml.default_flow_style = False
    yaml.width = 100
    yaml.representer.add_representer(
        type(None), lambda dumper, _: dumper.represent_scalar("tag:yaml.org,2002:null", "null")
    )
    stream = io.StringIO()
    yaml.dump(dict(document), stream)
    return stream.getvalue()
