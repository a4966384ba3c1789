"""The flat FP8 config of Hugging Face checkpoints: ``quant_method: fp8``."""

from phyai_quant.importers.base import ConfigSources, Section, excluded_rules
from phyai_quant.importers.tensor_args import read_kv_cache
from phyai_quant.plan import QuantPlan
from phyai_quant.scheme import Granularity, QDType, QuantConfigError, QuantScheme, TensorQuant

_KNOWN_KEYS = (
    "quant_method",
    "activation_scheme",
    "weight_block_size",
    "ignored_layers",
    "modules_to_not_convert",
    "fmt",
    "scale_fmt",
    "kv_cache_scheme",
    "is_checkpoint_fp8_serialized",
    "dequantize",
)
_IGNORE_KEYS = ("ignored_layers", "modules_to_not_convert")


class HfFp8Importer:
    """Reads the flat config: one scheme for all layers and a list of layers to leave alone.

    Without ``weight_block_size`` the files hold one scale per matrix or per row; both load into a
    per_channel weight. An ignored name excludes the layer and everything below it.
    """

    name = "hf-fp8"

    def detect(self, sources: ConfigSources) -> bool:
        """Tells whether the inline config says ``quant_method: fp8``."""
        return sources.method == "fp8"

    def build_plan(self, sources: ConfigSources) -> QuantPlan:
        """Returns ignore rules and the fp8 default.

        Raises:
            QuantConfigError: A value outside the format.
        """
        config = sources.inline
        if config is None:
            raise QuantConfigError("hf-fp8 needs an inline quantization_config")
        config.warn_unknown(_KNOWN_KEYS)
        config.string("fmt", ("e4m3",))
        config.string("scale_fmt", ("float", "ue8m0"))
        config.reject("dequantize", "load the unquantized checkpoint instead")
        if not config.boolean("is_checkpoint_fp8_serialized", default=True):
            config.fail(
                "the checkpoint holds unquantized weights; remove the config and quantize them "
                "with a policy",
                "is_checkpoint_fp8_serialized",
            )
        return QuantPlan(
            tuple(excluded_rules(config, _IGNORE_KEYS)),
            _default_scheme(config),
            kv_cache=read_kv_cache(config, ("fp8", "static")),
            source=config.where(),
        )


def _default_scheme(config: Section) -> QuantScheme:
    block_shape = config.block_shape("weight_block_size")
    dynamic = config.string("activation_scheme", ("dynamic", "static")) != "static"
    if block_shape is not None and not dynamic:
        config.fail(
            f"activation_scheme 'static' and weight_block_size {list(block_shape)} contradict: "
            "block checkpoints hold no input scales; allowed: dynamic",
            "activation_scheme",
        )
    weight = TensorQuant(
        QDType.FP8_E4M3,
        Granularity.PER_CHANNEL if block_shape is None else Granularity.BLOCK,
        block_shape=block_shape,
    )
    activation = TensorQuant(
        QDType.FP8_E4M3,
        Granularity.PER_CHANNEL if dynamic else Granularity.PER_TENSOR,
        dynamic=dynamic,
    )
    return QuantScheme(weight, activation)
