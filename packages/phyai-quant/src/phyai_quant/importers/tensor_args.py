"""Per-tensor quantization arguments of compressed-tensors configs."""

from phyai_quant.importers.base import Section, shown
from phyai_quant.scheme import Granularity, QDType, TensorQuant

_KNOWN_KEYS = (
    "num_bits",
    "type",
    "symmetric",
    "strategy",
    "group_size",
    "block_structure",
    "dynamic",
    "actorder",
    "observer",
    "observer_kwargs",
    "scale_dtype",
    "zp_dtype",
)
_STRATEGIES = ("tensor", "channel", "group", "block", "token", "tensor_group", "attn_head")
_GROUP_STRATEGIES = ("group", "tensor_group")
_ACT_ORDERS = ("group", "weight", "static", "dynamic")
_DTYPES = {
    ("float", 8): QDType.FP8_E4M3,
    ("int", 8): QDType.INT8,
    ("int", 4): QDType.INT4,
}
_FLOAT4_GROUPS = {16: QDType.NVFP4, 32: QDType.MXFP4}
_MX_GROUP = 32
_SCALE_DTYPES = ("uint8", "float8_e8m0fnu", "float8_e4m3fn", "float16", "bfloat16", "float32")
_MX_SCALE_DTYPES = ("uint8", "float8_e8m0fnu")
_INT_DTYPES = (QDType.INT8, QDType.INT4)


def read_tensor_args(args: Section, *, is_input: bool = False) -> TensorQuant:
    """Returns the quantization that one ``weights`` or ``input_activations`` object describes.

    An absent strategy follows from the group size: positive is ``group``, -1 is ``channel``, none
    is ``tensor``. A group of g along K becomes ``block_shape=(1, g)``.

    Raises:
        QuantConfigError: Unknown or contradictory arguments, or numbers no kernel here computes.
    """
    args.require_known(_KNOWN_KEYS)
    if not args.data:
        args.fail("is empty; give num_bits, type and strategy, or null for unquantized")
    strategy, group_size = _strategy(args)
    _check_side(args, strategy, is_input=is_input)
    dtype, micro_scaled = _dtype(args, group_size)
    if is_input and dtype is QDType.INT4:
        args.fail("4-bit integer activations are not supported; supported: int 8", "num_bits")
    args.string("zp_dtype")
    granularity, block_shape = _granularity(args, strategy, group_size)
    return TensorQuant(
        dtype,
        granularity,
        symmetric=_symmetric(args, dtype),
        dynamic=_dynamic(args, dtype, is_input=is_input),
        micro_scaled=micro_scaled,
        block_shape=block_shape,
        act_order=_act_order(args, strategy, is_input=is_input),
    )


def read_kv_cache(config: Section, names: tuple[str, ...] = ("fp8",)) -> TensorQuant | None:
    """Returns the quantization of cached keys and values, or None.

    Args:
        config: The config; its ``kv_cache_scheme`` is an object of tensor arguments or a name.
        names: Lower-case names that mean fp8 with one scale per tensor.
    """
    value = config.data.get("kv_cache_scheme")
    if value is None:
        return None
    if isinstance(value, str):
        if value.lower() not in names:
            allowed = ", ".join(name.upper() for name in names)
            config.fail(
                f"{value!r} is not allowed; allowed: {allowed} or an object", "kv_cache_scheme"
            )
        return TensorQuant(QDType.FP8_E4M3, Granularity.PER_TENSOR)
    return read_tensor_args(config.section("kv_cache_scheme"), is_input=True)


def _strategy(args: Section) -> tuple[str, int | None]:
    group_size = args.integer("group_size")
    if group_size is not None and group_size < -1:
        args.fail(f"{group_size} is not allowed; allowed: -1, 0 or a positive size", "group_size")
    group_size = group_size or None
    strategy = args.string("strategy", _STRATEGIES)
    if strategy is None:
        if group_size is not None:
            strategy = "group" if group_size > 0 else "channel"
        else:
            strategy = "block" if args.has("block_structure") else "tensor"
    if strategy in _GROUP_STRATEGIES:
        if group_size == -1 and strategy == "group":
            return "channel", None
        if group_size is None or group_size < 1:
            args.fail(f"strategy {strategy!r} needs a positive group_size, got {group_size}")
    elif group_size is not None and (group_size > 0 or strategy != "channel"):
        args.fail(f"strategy {strategy!r} and group_size {group_size} contradict")
    if (strategy == "block") != args.has("block_structure"):
        args.fail(
            f"strategy {strategy!r} and block_structure {args.data.get('block_structure')!r} "
            "contradict: block_structure is given exactly with strategy 'block'"
        )
    return strategy, group_size if strategy in _GROUP_STRATEGIES else None


def _check_side(args: Section, strategy: str, *, is_input: bool) -> None:
    if strategy == "attn_head" or (strategy == "token") > is_input:
        side = "a linear layer" if strategy == "attn_head" else "a weight"
        args.fail(f"{strategy!r} is not allowed for {side}", "strategy")
    if is_input and strategy == "block":
        args.fail("'block' is not allowed for an activation", "strategy")


def _dtype(args: Section, group_size: int | None) -> tuple[QDType, bool]:
    kind = args.string("type", ("int", "float")) or "int"
    bits = args.integer("num_bits")
    bits = 8 if bits is None else bits
    scale_dtype = _scale_dtype(args)
    if (kind, bits) == ("float", 4) and group_size in _FLOAT4_GROUPS:
        return _FLOAT4_GROUPS[group_size], True
    if (kind, bits) not in _DTYPES:
        groups = f" with group_size {group_size}" if (kind, bits) == ("float", 4) else ""
        args.fail(
            f"type {kind!r} with num_bits {bits}{groups} is not supported; supported: float 8, "
            "int 8, int 4, float 4 with group_size 16 or 32"
        )
    is_mx = (kind, bits) == ("float", 8) and group_size == _MX_GROUP
    return _DTYPES[kind, bits], is_mx and scale_dtype in _MX_SCALE_DTYPES


def _scale_dtype(args: Section) -> str | None:
    value = args.string("scale_dtype")
    if value is None:
        return None
    name = value.removeprefix("torch.")
    if name not in _SCALE_DTYPES:
        args.fail(f"{value!r} is not allowed; allowed: {', '.join(_SCALE_DTYPES)}", "scale_dtype")
    return name


def _symmetric(args: Section, dtype: QDType) -> bool:
    symmetric = args.boolean("symmetric", default=True)
    if not symmetric and dtype not in _INT_DTYPES:
        args.fail(f"false is not allowed for {dtype.value}; it has no zero points", "symmetric")
    return symmetric


def _granularity(
    args: Section, strategy: str, group_size: int | None
) -> tuple[Granularity, tuple[int, int] | None]:
    if group_size is not None:
        return Granularity.BLOCK, (1, group_size)
    if strategy == "block":
        return Granularity.BLOCK, args.block_shape("block_structure")
    if strategy == "tensor":
        return Granularity.PER_TENSOR, None
    return Granularity.PER_CHANNEL, None


def _dynamic(args: Section, dtype: QDType, *, is_input: bool) -> bool:
    value = args.data.get("dynamic")
    if value == "local":
        if dtype is not QDType.NVFP4 or not is_input:
            args.fail("'local' is allowed for nvfp4 activations only", "dynamic")
        return True
    dynamic = args.boolean("dynamic", default=False)
    if dynamic and not is_input:
        args.fail("true is not allowed for a weight; its scales are stored", "dynamic")
    return dynamic


def _act_order(args: Section, strategy: str, *, is_input: bool) -> bool:
    value = args.data.get("actorder")
    if value is None or value is False:
        return False
    value = "group" if value is True else value
    if not isinstance(value, str) or value.lower() not in _ACT_ORDERS:
        args.fail(
            f"{shown(value)} is not allowed; allowed: null, true, {', '.join(_ACT_ORDERS)}",
            "actorder",
        )
    if is_input:
        args.fail("is not allowed for an activation; the order belongs to the weight", "actorder")
    if strategy != "group":
        args.fail(f"actorder {value!r} and strategy {strategy!r} contradict; it needs groups")
    return value.lower() in ("group", "dynamic")
