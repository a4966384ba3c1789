"""NVIDIA ModelOpt configs: ``hf_quant_config.json`` and its inline form in ``config.json``."""

from dataclasses import replace

from phyai_quant.importers.base import ConfigSources, Section, make_rule, subtree_rules
from phyai_quant.importers.compressed_tensors import read_groups
from phyai_quant.importers.modelopt_algos import algo_scheme
from phyai_quant.importers.tensor_args import read_kv_cache
from phyai_quant.plan import MatcherKind, QuantPlan, Rule
from phyai_quant.scheme import Granularity, QDType, QuantConfigError, QuantScheme, TensorQuant

_METHODS = ("modelopt", "modelopt_fp8", "modelopt_fp4")
_KNOWN_KEYS = (
    "quant_algo",
    "kv_cache_quant_algo",
    "group_size",
    "exclude_modules",
    "has_zero_point",
    "pre_quant_scale",
    "quantized_layers",
    "quant_method",
    "quant_library",
    "config_groups",
    "ignore",
    "kv_cache_scheme",
    "producer",
)
_EXCLUDE_KEYS = ("exclude_modules", "ignore")
_LAYER_KEYS = ("quant_algo", "group_size", "has_zero_point", "pre_quant_scale")
_WILDCARDS = frozenset("*?[")
_MIXED = "mixed_precision"


class ModelOptImporter:
    """Reads one algorithm for all layers, excluded patterns and per-layer algorithms."""

    name = "modelopt"

    def detect(self, sources: ConfigSources) -> bool:
        """Tells whether there is a standalone config or an inline one of this producer."""
        standalone = sources.standalone is not None and sources.standalone.has("quantization")
        return standalone or sources.method in _METHODS

    def build_plan(self, sources: ConfigSources) -> QuantPlan:
        """Returns the plan of the standalone config, or of the inline one; both must agree.

        Raises:
            QuantConfigError: The two configs contradict each other, or a value is outside the
                format.
        """
        plans = []
        if sources.standalone is not None and sources.standalone.has("quantization"):
            plans.append(_read(sources.standalone))
        if sources.inline is not None:
            if sources.method not in (*_METHODS, None):
                raise QuantConfigError(
                    f"{sources.inline.where('quant_method')} is {sources.method!r} but "
                    f"{plans[0].source} is a ModelOpt config; keep the one that describes the "
                    "tensors on disk"
                )
            plans.append(_read(sources.inline))
        if len(plans) == 2:
            _check_agreement(plans[0], plans[1])
        return plans[0]


def _read(config: Section) -> QuantPlan:
    if config.has("quantization"):
        config = config.section("quantization")
    config.warn_unknown(_KNOWN_KEYS)
    _reject_smoothing(config)
    rules = _exclude_rules(config) + _layer_rules(config)
    algo = config.string("quant_algo")
    default = None
    if algo is None:
        rules += read_groups(config)
        if not config.has("config_groups") and not config.has("quantized_layers"):
            config.fail("names no algorithm; allowed: quant_algo or config_groups", "quant_algo")
    elif algo.lower() != _MIXED:
        default = algo_scheme(config)
    elif not config.section("quantized_layers").data:
        config.fail("is empty although quant_algo is MIXED_PRECISION", "quantized_layers")
    return QuantPlan(tuple(rules), default, _kv_cache(config), source=config.where())


def _reject_smoothing(section: Section) -> None:
    for key in ("pre_quant_scale", "has_zero_point"):
        section.reject(key, "inputs are not smoothed and weights have no zero points here")


def _exclude_rules(config: Section) -> list[Rule]:
    rules = []
    seen: set[str] = set()
    for key in _EXCLUDE_KEYS:
        for entry in config.strings(key):
            if entry not in seen:
                seen.add(entry)
                rules += _excluded(config, key, entry)
    return rules


def _excluded(config: Section, key: str, entry: str) -> list[Rule]:
    if entry.startswith("re:") or _WILDCARDS & set(entry):
        return [_entry_rule(config, key, entry, None)]
    return subtree_rules(config, key, entry)


def _layer_rules(config: Section) -> list[Rule]:
    layers = config.section("quantized_layers")
    rules = []
    for name in layers.data:
        layer = replace(layers.section(name), path=f"{layers.path}[{name}]")
        layer.warn_unknown(_LAYER_KEYS)
        _reject_smoothing(layer)
        if not layer.has("quant_algo"):
            layer.fail("required key is missing", "quant_algo")
        rules.append(_entry_rule(config, "quantized_layers", name, algo_scheme(layer)))
    return rules


def _entry_rule(config: Section, key: str, entry: str, scheme: QuantScheme | None) -> Rule:
    if entry.startswith("re:"):
        return make_rule(config, key, MatcherKind.REGEX, entry.removeprefix("re:"), scheme)
    kind = MatcherKind.GLOB if _WILDCARDS & set(entry) else MatcherKind.NAME
    return make_rule(config, key, kind, entry, scheme)


def _kv_cache(config: Section) -> TensorQuant | None:
    algo = config.string("kv_cache_quant_algo")
    if algo is None:
        return read_kv_cache(config)
    if algo.upper() == "FP8":
        return TensorQuant(QDType.FP8_E4M3, Granularity.PER_TENSOR)
    if algo.upper() == "INT8":
        return TensorQuant(QDType.INT8, Granularity.PER_TENSOR)
    if algo.upper() == "NVFP4":
        return TensorQuant(
            QDType.NVFP4, Granularity.BLOCK, dynamic=True, micro_scaled=True, block_shape=(1, 16)
        )
    return config.fail(f"{algo!r} is not allowed; allowed: FP8, INT8, NVFP4", "kv_cache_quant_algo")


def _check_agreement(first: QuantPlan, second: QuantPlan) -> None:
    if first.default != second.default:
        schemes = [
            f"{plan.source}: {plan.default.describe() if plan.default else 'per layer'}"
            for plan in (first, second)
        ]
        raise QuantConfigError(
            "the two quantization configs contradict each other; " + "; ".join(schemes)
        )
    ours, theirs = set(_entries(first)), set(_entries(second))
    if ours != theirs:
        lines = ", ".join(sorted(f"{kind} {pattern}" for kind, pattern, _ in ours ^ theirs))
        raise QuantConfigError(
            f"{first.source} and {second.source} contradict each other about: {lines}"
        )


def _entries(plan: QuantPlan) -> list[tuple[str, str, QuantScheme | None]]:
    return [(r.matcher.kind.value, r.matcher.pattern, r.scheme) for r in plan.rules]
