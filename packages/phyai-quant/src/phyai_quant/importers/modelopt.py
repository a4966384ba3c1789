"""NVIDIA ModelOpt configs: ``hf_quant_config.json`` and its inline form in ``config.json``."""

from dataclasses import replace

from phyai_quant.importers.base import ConfigSources, Section, entry_rule, excluded_rules, shown
from phyai_quant.importers.compressed_tensors import read_groups
from phyai_quant.importers.modelopt_algos import algo_scheme
from phyai_quant.importers.tensor_args import read_kv_cache
from phyai_quant.plan import QuantPlan
from phyai_quant.rules import MatcherKind, Rule
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
_MIXED = "mixed_precision"
_FP8_CACHE = TensorQuant(QDType.FP8_E4M3, Granularity.PER_TENSOR)
_CACHES = {
    "FP8": _FP8_CACHE,
    "INT8": TensorQuant(QDType.INT8, Granularity.PER_TENSOR),
    "NVFP4": TensorQuant(
        QDType.NVFP4, Granularity.BLOCK, dynamic=True, micro_scaled=True, block_shape=(1, 16)
    ),
}


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
    outer = config
    if config.has("quantization"):
        config = config.section("quantization")
        _require_one_place(outer, config)
    config.warn_unknown(_KNOWN_KEYS)
    _reject_smoothing(config)
    excluded = excluded_rules(config, _EXCLUDE_KEYS)
    layers = _layer_rules(config)
    _check_excluded(excluded, layers)
    cache = _kv_cache(config)
    groups = [_with_run_time_blocks(rule) for rule in read_groups(config)]
    default = _default(config, groups, listed=bool(layers), cache=cache)
    rules = (*excluded, *layers, *(() if default else groups))
    return QuantPlan(rules, default, cache, source=config.where())


def _require_one_place(outer: Section, inner: Section) -> None:
    for key in (*_LAYER_KEYS, *_EXCLUDE_KEYS, "quantized_layers", "kv_cache_quant_algo"):
        if outer.has(key):
            outer.fail(f"stands beside {inner.where()}; keep one of the two", key)


def _default(
    config: Section, groups: list[Rule], *, listed: bool, cache: TensorQuant | None
) -> QuantScheme | None:
    """Returns the scheme of all layers, after checking that algorithm and groups agree."""
    algo = config.string("quant_algo")
    quantizes = listed or any(rule.scheme for rule in groups)
    if algo is None:
        if not quantizes and cache is None:
            config.fail("names no algorithm; allowed: quant_algo or config_groups", "quant_algo")
        return None
    if algo.lower() == _MIXED:
        if not quantizes:
            config.fail("is empty although quant_algo is MIXED_PRECISION", "quantized_layers")
        return None
    scheme = algo_scheme(config)
    for rule in groups:
        if rule.scheme is None or _kinds(rule.scheme) != _kinds(scheme):
            config.fail(
                f"{algo!r} and {rule.source} contradict each other: {scheme.describe()}; "
                f"{rule.describe()}",
                "quant_algo",
            )
    return scheme


def _kinds(scheme: QuantScheme) -> tuple[object, ...]:
    weight, act = scheme.weight, scheme.input
    return weight.dtype, weight.block_shape, None if act is None else act.dtype


def _with_run_time_blocks(rule: Rule) -> Rule:
    """Returns the rule with NVFP4 inputs whose block scales are computed: none can be stored."""
    scheme = rule.scheme
    if scheme is None or scheme.input is None or scheme.input.dtype is not QDType.NVFP4:
        return rule
    return replace(rule, scheme=replace(scheme, input=replace(scheme.input, dynamic=True)))


def _reject_smoothing(section: Section) -> None:
    for key in ("pre_quant_scale", "has_zero_point"):
        section.reject(key, "inputs are not smoothed and weights have no zero points here")


def _layer_rules(config: Section) -> list[Rule]:
    layers = config.section("quantized_layers")
    rules = []
    for name, value in layers.data.items():
        if value is None:
            layers.fail("is null; give its quant_algo or remove it", name)
        layer = replace(layers.section(name), path=f"{layers.path}[{name}]")
        layer.warn_unknown(_LAYER_KEYS)
        _reject_smoothing(layer)
        if not layer.has("quant_algo"):
            layer.fail("required key is missing", "quant_algo")
        rules.append(entry_rule(config, "quantized_layers", name, algo_scheme(layer)))
    return rules


def _check_excluded(excluded: list[Rule], layers: list[Rule]) -> None:
    by_matcher = {rule.matcher: rule for rule in excluded}
    for rule in layers:
        other = by_matcher.get(rule.matcher)
        if other is not None:
            raise QuantConfigError(f"{rule.source} and {other.source} contradict each other")


def _kv_cache(config: Section) -> TensorQuant | None:
    declared = read_kv_cache(config)
    algo = config.string("kv_cache_quant_algo")
    if algo is None:
        return declared
    cache = _CACHES.get(algo.upper())
    if cache is None:
        config.fail(
            f"{shown(algo)} is not allowed; allowed: {', '.join(_CACHES)}", "kv_cache_quant_algo"
        )
    if declared is not None and declared.dtype is not cache.dtype:
        config.fail(f"{algo!r} and kv_cache_scheme contradict each other", "kv_cache_quant_algo")
    return cache


def _check_agreement(first: QuantPlan, second: QuantPlan) -> None:
    ours, theirs = _whole(first), _whole(second)
    if (None if ours is None else _kinds(ours)) != (None if theirs is None else _kinds(theirs)):
        schemes = [
            f"{plan.source}: {scheme.describe() if scheme else 'per layer'}"
            for plan, scheme in ((first, ours), (second, theirs))
        ]
        raise QuantConfigError(
            "the two quantization configs contradict each other; " + "; ".join(schemes)
        )
    differing = _entries(first) ^ _entries(second)
    if differing:
        lines = ", ".join(sorted(f"{kind} {pattern}" for kind, pattern, _ in differing))
        raise QuantConfigError(
            f"{first.source} and {second.source} contradict each other about: {lines}"
        )
    caches = [None if plan.kv_cache is None else plan.kv_cache.dtype for plan in (first, second)]
    if None not in caches and caches[0] is not caches[1]:
        raise QuantConfigError(
            f"{first.source} and {second.source} contradict each other about the KV cache"
        )


def _whole(plan: QuantPlan) -> QuantScheme | None:
    """Returns the scheme of all linear layers: the default, or that of the class Linear."""
    if plan.default is not None:
        return plan.default
    found = [rule.scheme for rule in plan.rules if _covers_all(rule)]
    return found[0] if found else None


def _covers_all(rule: Rule) -> bool:
    return rule.matcher.kind is MatcherKind.MODULE_CLS and rule.matcher.pattern == "Linear"


def _entries(plan: QuantPlan) -> set[tuple[str, str, QuantScheme | None]]:
    return {
        (rule.matcher.kind.value, rule.matcher.pattern, rule.scheme)
        for rule in plan.rules
        if not _covers_all(rule)
    }
