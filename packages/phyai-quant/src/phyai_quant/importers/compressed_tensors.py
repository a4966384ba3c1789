"""Configs of compressed-tensors and llm-compressor: ``quant_method: compressed-tensors``."""

from dataclasses import replace

from phyai_quant.importers.base import ConfigSources, Section, make_rule
from phyai_quant.importers.presets import preset_args, preset_names
from phyai_quant.importers.tensor_args import read_kv_cache, read_tensor_args
from phyai_quant.plan import QuantPlan
from phyai_quant.rules import MatcherKind, Rule
from phyai_quant.scheme import Granularity, QDType, QuantConfigError, QuantScheme, TensorQuant

_KNOWN_KEYS = (
    "quant_method",
    "format",
    "quantization_status",
    "global_compression_ratio",
    "config_groups",
    "ignore",
    "kv_cache_scheme",
    "sparsity_config",
    "moe_sparsity_config",
    "transform_config",
    "version",
)
_GROUP_KEYS = ("targets", "weights", "input_activations", "output_activations", "format")
_FORMATS: dict[str, tuple[QDType, ...]] = {
    "dense": (),
    "int-quantized": (QDType.INT8, QDType.INT4),
    "float-quantized": (QDType.FP8_E4M3,),
    "naive-quantized": (QDType.INT8, QDType.INT4, QDType.FP8_E4M3),
    "pack-quantized": (QDType.INT8, QDType.INT4),
    "nvfp4-pack-quantized": (QDType.NVFP4,),
    "mxfp4-pack-quantized": (QDType.MXFP4,),
    "mxfp8-quantized": (QDType.FP8_E4M3,),
    "mixed-precision": tuple(QDType),
}
"""Each format and the weights it stores."""

_INPUTS: dict[QDType, tuple[QDType, ...]] = {
    QDType.INT8: (QDType.INT8, QDType.FP8_E4M3),
    QDType.INT4: (QDType.INT8, QDType.FP8_E4M3),
    QDType.FP8_E4M3: (QDType.FP8_E4M3,),
    QDType.NVFP4: (QDType.NVFP4, QDType.FP8_E4M3),
    QDType.MXFP4: (QDType.MXFP4, QDType.FP8_E4M3),
}
"""Each weight and the quantized inputs that go with it."""

_MX_PARTNERS = (QDType.FP8_E4M3, QDType.MXFP4)
"""Weights that go with mxfp8 inputs."""

_MX8 = "mxfp8-quantized"
_PRECEDENCE = (MatcherKind.NAME, MatcherKind.REGEX, MatcherKind.MODULE_CLS)


class CompressedTensorsImporter:
    """Reads groups of targets with their schemes; layers outside every group are unquantized."""

    name = "compressed-tensors"

    def detect(self, sources: ConfigSources) -> bool:
        """Tells whether the inline config says ``quant_method: compressed-tensors``."""
        return sources.method == "compressed-tensors"

    def build_plan(self, sources: ConfigSources) -> QuantPlan:
        """Returns ignore rules, then targets: exact names before expressions before classes.

        Raises:
            QuantConfigError: A value outside the format, or one that changes the numbers in a way
                that is not supported.
        """
        config = sources.inline
        if config is None:
            raise QuantConfigError("compressed-tensors needs an inline quantization_config")
        config.warn_unknown(_KNOWN_KEYS)
        _format(config)
        for key in ("sparsity_config", "moe_sparsity_config", "transform_config"):
            _check_extra(config, key)
        plan = QuantPlan(
            rules=(*_ignore_rules(config), *read_groups(config)),
            kv_cache=read_kv_cache(config),
            source=config.where(),
        )
        _check_purpose(config, plan)
        _check_duplicates(plan)
        return plan


def read_groups(config: Section) -> list[Rule]:
    """Returns the rules of ``config_groups``, ordered by how exact their targets are."""
    groups = config.section("config_groups")
    rules: list[Rule] = []
    for name, value in groups.data.items():
        if isinstance(value, list):
            args = preset_args(name)
            if args is None:
                groups.fail(f"unknown preset; known: {', '.join(preset_names())}", name)
            group = Section({**args, "targets": value}, groups.file, f"{groups.path}.{name}")
        elif value is None:
            groups.fail("is null; give the group or remove it", name)
        else:
            group = groups.section(name)
        rules += _group_rules(group, _format(group) or _format(config))
    return sorted(rules, key=lambda rule: _PRECEDENCE.index(rule.matcher.kind))


def _ignore_rules(config: Section) -> list[Rule]:
    return [_entry_rule(config, "ignore", entry, None) for entry in config.strings("ignore")]


def _group_rules(group: Section, storage: str | None) -> list[Rule]:
    group.require_known(_GROUP_KEYS)
    if "weights" not in group.data:
        group.fail("required key is missing; null keeps the targets unquantized", "weights")
    targets = group.strings("targets") if group.has("targets") else ("Linear",)
    group.reject("output_activations", "outputs of linear layers are not quantized")
    scheme = None
    if group.has("weights"):
        weight = _stored_weight(group, storage)
        activation = None
        if group.has("input_activations"):
            activation = _stored_input(group, weight)
        scheme = QuantScheme(weight, activation)
    elif targets:
        group.reject("input_activations", "activations without a quantized weight")
    return [_entry_rule(group, "targets", target, scheme) for target in targets]


def _stored_weight(group: Section, storage: str | None) -> TensorQuant:
    weight = read_tensor_args(group.section("weights"))
    if storage is None:
        return weight
    if storage == _MX8 and weight.block_shape == (1, 32):
        weight = replace(weight, micro_scaled=True)
    if weight.dtype not in _FORMATS[storage] or (storage == _MX8) > weight.micro_scaled:
        fitting = [name for name, dtypes in _FORMATS.items() if weight.dtype in dtypes]
        group.fail(
            f"format {storage!r} and quantized weights {weight.describe()} contradict; formats "
            f"of {weight.dtype.value}: {', '.join(fitting)}",
            "weights",
        )
    return weight


def _stored_input(group: Section, weight: TensorQuant) -> TensorQuant:
    act = read_tensor_args(group.section("input_activations"), is_input=True)
    fp8_micro = act.micro_scaled and act.dtype is QDType.FP8_E4M3
    if act.dtype not in _INPUTS[weight.dtype] or (fp8_micro and weight.dtype not in _MX_PARTNERS):
        group.fail(
            f"{act.describe()} with {weight.dtype.value} weights is not supported; supported: "
            f"{', '.join(_INPUTS[weight.dtype])}",
            "input_activations",
        )
    static = act.granularity is Granularity.PER_TENSOR or act.dtype is QDType.NVFP4
    if not act.dynamic and not static:
        group.fail(
            f"{act.describe()} needs scales that are computed at run time; give dynamic: true, or "
            "strategy 'tensor'",
            "input_activations",
        )
    return act


def _entry_rule(section: Section, key: str, entry: str, scheme: QuantScheme | None) -> Rule:
    if entry.startswith("re:"):
        return make_rule(section, key, MatcherKind.REGEX, entry.removeprefix("re:"), scheme)
    is_class = entry[0].isupper() and "." not in entry
    kind = MatcherKind.MODULE_CLS if is_class else MatcherKind.NAME
    return make_rule(section, key, kind, entry, scheme)


def _format(section: Section) -> str | None:
    name = section.string("format")
    if name is not None and name not in _FORMATS:
        section.fail(f"{name!r} is not supported; supported: {', '.join(_FORMATS)}", "format")
    return name


def _check_extra(config: Section, key: str) -> None:
    extra = config.section(key)
    if extra.data and extra.data.get("format") != "dense" and any(extra.data.values()):
        config.fail("is not supported: it changes how the weights are stored or computed", key)


def _check_purpose(config: Section, plan: QuantPlan) -> None:
    """Refuses a config that quantizes nothing although its format says so."""
    quantizes = plan.kv_cache is not None or any(rule.scheme for rule in plan.rules)
    if not quantizes and _format(config) != "dense":
        config.fail(
            "quantizes no weights and no cache; give a group with targets and weights, or "
            "format 'dense'",
            "config_groups",
        )


def _check_duplicates(plan: QuantPlan) -> None:
    """Refuses one entry that stands for two schemes; broader entries may overlap by precedence."""
    seen: dict[object, Rule] = {}
    for rule in plan.rules:
        first = seen.setdefault(rule.matcher, rule)
        if first.scheme != rule.scheme:
            raise QuantConfigError(
                f"{rule.source} and {first.source} contradict each other: "
                f"{rule.describe()}; {first.describe()}"
            )
