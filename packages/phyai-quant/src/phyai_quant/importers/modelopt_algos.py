"""Algorithm names of ModelOpt and the schemes they stand for."""

from phyai_quant.importers.base import Section
from phyai_quant.scheme import Granularity, QDType, QuantScheme, TensorQuant

_FP8_TENSOR = TensorQuant(QDType.FP8_E4M3, Granularity.PER_TENSOR)
_FP8_BLOCK = TensorQuant(QDType.FP8_E4M3, Granularity.BLOCK, block_shape=(128, 128))
_FP8_MX = TensorQuant(QDType.FP8_E4M3, Granularity.BLOCK, micro_scaled=True, block_shape=(1, 32))
_NVFP4 = TensorQuant(QDType.NVFP4, Granularity.BLOCK, micro_scaled=True, block_shape=(1, 16))
# Under FP8 inputs ModelOpt takes blocks of 32.
_NVFP4_WIDE = TensorQuant(QDType.NVFP4, Granularity.BLOCK, micro_scaled=True, block_shape=(1, 32))
_MXFP4 = TensorQuant(QDType.MXFP4, Granularity.BLOCK, micro_scaled=True, block_shape=(1, 32))


def _on_the_fly(quant: TensorQuant) -> TensorQuant:
    return TensorQuant(
        quant.dtype,
        quant.granularity,
        dynamic=True,
        micro_scaled=quant.micro_scaled,
        block_shape=quant.block_shape,
    )


_SCHEMES: dict[str, QuantScheme] = {
    "fp8": QuantScheme(_FP8_TENSOR, _FP8_TENSOR),
    "fp8_per_channel_per_token": QuantScheme(
        TensorQuant(QDType.FP8_E4M3, Granularity.PER_CHANNEL),
        TensorQuant(QDType.FP8_E4M3, Granularity.PER_CHANNEL, dynamic=True),
    ),
    "fp8_pb_wo": QuantScheme(_FP8_BLOCK),
    "fp8_pb_real": QuantScheme(_FP8_BLOCK),
    "nvfp4": QuantScheme(_NVFP4, _on_the_fly(_NVFP4)),
    "w4a16_nvfp4": QuantScheme(_NVFP4),
    "w4a8_nvfp4_fp8": QuantScheme(_NVFP4_WIDE, _FP8_TENSOR),
    "w4a8_mxfp4_fp8": QuantScheme(_MXFP4, _on_the_fly(_FP8_TENSOR)),
    "mxfp4": QuantScheme(_MXFP4, _on_the_fly(_MXFP4)),
    "mxfp8": QuantScheme(_FP8_MX, _on_the_fly(_FP8_MX)),
    "w8a16": QuantScheme(TensorQuant(QDType.INT8, Granularity.PER_CHANNEL)),
}
_SMOOTHED = (
    "nvfp4_awq",
    "nvfp4_svdquant",
    "w4a16_awq",
    "w4a8_awq",
    "int4_awq",
    "w8a8_sq_per_channel",
    "int8_sq",
)


def algo_scheme(config: Section) -> QuantScheme:
    """Returns the scheme of the section's ``quant_algo``, matched by its exact name in any case.

    Raises:
        QuantConfigError: The algorithm is unknown or not supported, or ``group_size`` contradicts
            it.
    """
    algo = config.string("quant_algo") or ""
    name = algo.lower()
    if name in _SMOOTHED:
        config.fail(
            f"{algo!r} is not supported: it scales inputs or adds low-rank terms that no kernel "
            f"here applies; supported: {_supported()}",
            "quant_algo",
        )
    if name not in _SCHEMES:
        config.fail(f"{algo!r} is not supported; supported: {_supported()}", "quant_algo")
    scheme = _SCHEMES[name]
    group_size = config.integer("group_size")
    if group_size:
        block = scheme.weight.block_shape
        expected = None if block is None else block[1]
        if group_size != expected:
            config.fail(
                f"quant_algo {algo!r} and group_size {group_size} contradict; "
                f"allowed: {'none' if expected is None else expected}"
            )
    return scheme


def _supported() -> str:
    return ", ".join(name.upper() for name in _SCHEMES) + ", MIXED_PRECISION"
