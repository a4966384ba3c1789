"""The quantization config of a checkpoint that was quantized offline."""

from collections.abc import Mapping, Sequence
from typing import Any

from phyai_quant.offline.encoding import is_packed
from phyai_quant.scheme import Granularity, QDType, QuantConfigError, QuantScheme, TensorQuant

_MX_SCALES = {QDType.NVFP4: "torch.float8_e4m3fn", QDType.MXFP4: "torch.uint8"}
_BITS = {QDType.INT4: 4, QDType.NVFP4: 4, QDType.MXFP4: 4}
_MIXED = "mixed-precision"


def compressed_tensors_config(
    layers: Mapping[str, QuantScheme], unquantized: Sequence[str]
) -> dict[str, Any]:
    """Returns the ``quantization_config`` of compressed-tensors.

    Layers are named one by one: a class name as target would also catch linear layers that share
    their weight with an embedding and are not in the checkpoint.

    Args:
        layers: Name and scheme of every quantized layer.
        unquantized: Names of the linear layers that stay as they are.
    """
    targets: dict[QuantScheme, list[str]] = {}
    for name, scheme in layers.items():
        targets.setdefault(scheme, []).append(name)
    groups = {
        f"group_{index}": {
            "targets": names,
            "weights": _arguments(scheme.weight),
            "input_activations": None if scheme.input is None else _arguments(scheme.input),
            "output_activations": None,
            "format": format_of(scheme),
        }
        for index, (scheme, names) in enumerate(targets.items())
    }
    formats = {group["format"] for group in groups.values()}
    return {
        "quant_method": "compressed-tensors",
        "format": formats.pop() if len(formats) == 1 else _MIXED,
        "quantization_status": "compressed",
        "config_groups": groups,
        "ignore": list(unquantized),
        "kv_cache_scheme": None,
    }


def format_of(scheme: QuantScheme) -> str:
    """Returns the compressed-tensors format that stores a scheme."""
    if is_packed(scheme):
        return "pack-quantized"
    return {
        QDType.FP8_E4M3: "float-quantized",
        QDType.INT8: "int-quantized",
        QDType.NVFP4: "nvfp4-pack-quantized",
        QDType.MXFP4: "mxfp4-pack-quantized",
    }[scheme.weight.dtype]


def check_one_family(layers: Mapping[str, QuantScheme]) -> bool:
    """Returns True when the layers are ConvRot, False for compressed-tensors.

    Raises:
        QuantConfigError: Both occur: no config format describes such a checkpoint.
    """
    rotated = [name for name, scheme in layers.items() if scheme.weight.rotation_group is not None]
    if rotated and len(rotated) != len(layers):
        plain = next(name for name in layers if name not in set(rotated))
        raise QuantConfigError(
            f"the policy rotates some layers ({rotated[0]}) and not others ({plain}); a "
            "checkpoint holds either ConvRot or compressed-tensors weights, so use rotation_group "
            "in all rules or in none"
        )
    return bool(rotated)


def _arguments(tensor: TensorQuant) -> dict[str, Any]:
    is_float = tensor.dtype in (QDType.FP8_E4M3, QDType.NVFP4, QDType.MXFP4)
    group = tensor.block_shape[1] if tensor.block_shape and tensor.block_shape[0] == 1 else None
    arguments: dict[str, Any] = {
        "num_bits": _BITS.get(tensor.dtype, 8),
        "type": "float" if is_float else "int",
        "symmetric": tensor.symmetric,
        "strategy": _strategy(tensor, group),
        "dynamic": tensor.dynamic,
        "group_size": group,
    }
    if tensor.block_shape is not None and group is None:
        arguments["block_structure"] = list(tensor.block_shape)
    if tensor.dtype in _MX_SCALES:
        arguments["scale_dtype"] = _MX_SCALES[tensor.dtype]
    return arguments


def _strategy(tensor: TensorQuant, group: int | None) -> str:
    if group is not None:
        return "tensor_group" if tensor.dtype is QDType.NVFP4 else "group"
    if tensor.granularity is Granularity.PER_CHANNEL:
        return "token" if tensor.dynamic else "channel"
    return "block" if tensor.granularity is Granularity.BLOCK else "tensor"
