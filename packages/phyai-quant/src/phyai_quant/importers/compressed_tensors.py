"""Configs of compressed-tensors and llm-compressor: ``quant_method: compressed-tensors``."""

from phyai_quant.importers.base import ConfigSources, Section, make_rule
from phyai_quant.importers.presets import preset_args, preset_names
from phyai_quant.importers.tensor_args import read_kv_cache, read_tensor_args
from phyai_quant.plan import MatcherKind, QuantPlan, Rule
from phyai_quant.scheme import QuantConfigError, QuantScheme

_KNOWN_KEYS = (
    "quant_method",
    "format",
    "quantization_status",
    "global_compression_ratio",
    "config_groups",
    "ignore",
    "kv_cache_scheme",
    "sparsity_config",
    "transform_config",
    "version",
)
_GROUP_KEYS = ("targets", "weights", "input_activations", "output_activations", "format")
_FORMATS = (
    "dense",
    "int-quantized",
    "float-quantized",
    "naive-quantized",
    "pack-quantized",
    "nvfp4-pack-quantized",
    "mxfp4-pack-quantized",
    "mxfp6-pack-quantized",
    "mxfp8-quantized",
    "mixed-precision",
)
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
        _check_format(config)
        for key in ("sparsity_config", "transform_config"):
            _check_extra(config, key)
        return QuantPlan(
            rules=(*ignore_rules(config), *read_groups(config)),
            kv_cache=read_kv_cache(config),
            source=config.where(),
        )


def ignore_rules(config: Section, key: str = "ignore") -> list[Rule]:
    """Returns a rule that leaves the layer unquantized for each entry of an ignore list."""
    return [_entry_rule(config, key, entry, None) for entry in config.strings(key)]


def read_groups(config: Section) -> list[Rule]:
    """Returns the rules of ``config_groups``, ordered by how exact their targets are."""
    groups = config.section("config_groups")
    dense = config.string("format") == "dense"
    rules: list[Rule] = []
    for name, value in groups.data.items():
        if isinstance(value, list):
            args = preset_args(name)
            if args is None:
                groups.fail(f"unknown preset; known: {', '.join(preset_names())}", name)
            group = Section({**args, "targets": value}, groups.file, f"{groups.path}.{name}")
        else:
            group = groups.section(name)
        rules += _group_rules(group, dense=dense)
    return sorted(rules, key=lambda rule: _PRECEDENCE.index(rule.matcher.kind))


def _group_rules(group: Section, *, dense: bool) -> list[Rule]:
    group.require_known(_GROUP_KEYS)
    _check_format(group)
    targets = group.strings("targets") if "targets" in group.data else ("Linear",)
    if not targets:
        return []
    group.reject("output_activations", "outputs of linear layers are not quantized")
    scheme = None
    if group.has("weights"):
        if group.string("format") == "dense" or (dense and not group.has("format")):
            group.fail("format 'dense' and quantized weights contradict", "weights")
        activation = None
        if group.has("input_activations"):
            activation = read_tensor_args(group.section("input_activations"), is_input=True)
        scheme = QuantScheme(read_tensor_args(group.section("weights")), activation)
    else:
        group.reject("input_activations", "activations without a quantized weight")
    return [_entry_rule(group, "targets", target, scheme) for target in targets]


def _entry_rule(section: Section, key: str, entry: str, scheme: QuantScheme | None) -> Rule:
    if entry.startswith("re:"):
        return make_rule(section, key, MatcherKind.REGEX, entry.removeprefix("re:"), scheme)
    is_class = entry[0].isupper() and "." not in entry
    kind = MatcherKind.MODULE_CLS if is_class else MatcherKind.NAME
    return make_rule(section, key, kind, entry, scheme)


def _check_format(section: Section) -> None:
    name = section.string("format")
    if name is not None and name not in _FORMATS:
        section.fail(f"{name!r} is not supported; supported: {', '.join(_FORMATS)}", "format")


def _check_extra(config: Section, key: str) -> None:
    extra = config.section(key)
    if extra.data and extra.data.get("format") != "dense" and any(extra.data.values()):
        config.fail("is not supported: it changes how the weights are stored or computed", key)
