"""From the config of a checkpoint to a plan."""

from phyai_quant import Granularity, QDType, QuantPlan, QuantScheme, TensorQuant
from phyai_quant.importers.base import ConfigSources, excluded_rules

FORMAT = "llm-int8"
"""Name of the entry point that stores these layers."""

_KNOWN_KEYS = (
    "quant_method",
    "_load_in_8bit",
    "load_in_8bit",
    "_load_in_4bit",
    "load_in_4bit",
    "llm_int8_enable_fp32_cpu_offload",
    "llm_int8_has_fp16_weight",
    "llm_int8_skip_modules",
    "llm_int8_threshold",
)
_IGNORED_PREFIX = "bnb_4bit_"


class LlmInt8Importer:
    """Reads ``quant_method: bitsandbytes`` with ``load_in_8bit: true``."""

    name = FORMAT

    def detect(self, sources: ConfigSources) -> bool:
        """Tells whether the config is bitsandbytes'; looks at the method only."""
        return sources.method == "bitsandbytes"

    def build_plan(self, sources: ConfigSources) -> QuantPlan:
        """Returns int8 rows for every layer but the listed ones, by default ``lm_head``.

        Raises:
            QuantConfigError: The checkpoint is not in 8 bits, or a value has the wrong type.
        """
        config = sources.inline
        assert config is not None  # `detect` found the method there
        four_bit = (key for key in config.data if key.startswith(_IGNORED_PREFIX))
        config.warn_unknown((*_KNOWN_KEYS, *four_bit))
        if not config.boolean("load_in_8bit", default=False):
            config.fail("only 8-bit checkpoints are read here; allowed: true", "load_in_8bit")
        config.reject("llm_int8_has_fp16_weight", "the weights must be stored in int8")
        rules = excluded_rules(config, ["llm_int8_skip_modules"])
        if not config.has("llm_int8_skip_modules"):
            head = type(config)({"default": ["lm_head"]}, config.file, config.path)
            rules = excluded_rules(head, ["default"])
        weight = TensorQuant(QDType.INT8, Granularity.PER_CHANNEL)
        return QuantPlan(tuple(rules), QuantScheme(weight, stored_by=FORMAT), source=config.where())
