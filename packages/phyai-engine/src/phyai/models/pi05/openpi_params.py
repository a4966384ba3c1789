"""Parameters of openpi's JAX models under the names and in the layout of its PyTorch models."""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping

from torch import Tensor

from phyai.checkpoints import CheckpointError
from phyai.models.pi05.keys import EXPERT, LANGUAGE, PALIGEMMA, PROJECTOR, VISION

Part = tuple[str, Tensor]

_HEADS = ("action_in_proj", "action_out_proj", "time_mlp_in", "time_mlp_out", "state_proj")
_PI0_HEADS = ("action_time_mlp_in", "action_time_mlp_out")
_QUERY_BIAS = "PaliGemma.img.Transformer.encoderblock.MultiHeadDotProductAttention_0.query.bias"
_ENDINGS = re.compile(r"^params\.|\.value$")
_BODIES = {"": LANGUAGE, "_1": EXPERT}
_NORMS = {"pre_attention_norm": "input_layernorm", "pre_ffw_norm": "post_attention_layernorm"}


def parameter_name(stored: str) -> str:
    """Strips what checkpoints put around a parameter's name: ``params.`` and ``.value``."""
    return _ENDINGS.sub("", stored)


def converted(name: str, array: Tensor) -> Iterator[Part]:
    """Yields the PyTorch tensors that a JAX array holds; those of all layers lie in one array.

    Args:
        name: such as ``PaliGemma.llm.layers.attn.q_einsum.w``, see `parameter_name`.
        array: its values.

    Raises:
        CheckpointError: if openpi's models have no such parameter, or its shape does not fit.
    """
    for pattern, convert in _RULES:
        match = pattern.fullmatch(name)
        if match:
            try:
                yield from convert(array, *match.groups(default=""))
            except (ValueError, IndexError, RuntimeError) as error:
                raise CheckpointError(
                    f"{name}: shape {tuple(array.shape)} does not fit ({error})"
                ) from error
            return
    raise CheckpointError(
        f"{name} is no parameter of π0 or π0.5; pass the params folder of an openpi checkpoint"
    )


def _plain(name: str) -> Callable[[Tensor], Iterable[Part]]:
    return lambda array: [(name, array)]


def _dense(name: str) -> Callable[[Tensor, str], Iterable[Part]]:
    def convert(array: Tensor, kind: str) -> Iterable[Part]:
        return [(f"{name}.{_leaf(kind)}", array.mT if kind == "kernel" else array)]

    return convert


def _leaf(kind: str) -> str:
    return "bias" if kind == "bias" else "weight"


def _per_layer(body: str, name: str, arrays: Tensor) -> Iterator[Part]:
    for index, array in enumerate(arrays.unbind(0)):
        yield f"{body}.layers.{index}.{name}", array


def _patches(array: Tensor, kind: str) -> Iterable[Part]:
    # (rows, columns, channels, width) to (width, channels, rows, columns).
    weight = array.permute(3, 2, 0, 1) if kind == "kernel" else array
    return [(f"{VISION}.embeddings.patch_embedding.{_leaf(kind)}", weight)]


def _vision_norm(array: Tensor, which: str, kind: str) -> Iterable[Part]:
    return _per_layer(f"{VISION}.encoder", f"layer_norm{int(which) + 1}.{_leaf(kind)}", array)


def _vision_mlp(array: Tensor, which: str, kind: str) -> Iterable[Part]:
    value = array.mT if kind == "kernel" else array
    return _per_layer(f"{VISION}.encoder", f"mlp.fc{int(which) + 1}.{_leaf(kind)}", value)


def _vision_attention(array: Tensor, which: str, kind: str) -> Iterable[Part]:
    name = "out_proj" if which == "out" else f"{which[0]}_proj"
    if which == "out":
        value = array.flatten(1, 2).mT if kind == "kernel" else array
    else:
        value = array.flatten(-2)
        value = value.mT if kind == "kernel" else value
    return _per_layer(f"{VISION}.encoder", f"self_attn.{name}.{_leaf(kind)}", value)


def _queries(array: Tensor, body: str) -> Iterable[Part]:
    # (layers, heads, in, head_dim) to (layers, heads * head_dim, in).
    value = array.mT.flatten(1, 2)
    return _per_layer(_BODIES[body], "self_attn.q_proj.weight", value)


def _keys_and_values(array: Tensor, body: str) -> Iterator[Part]:
    # (layers, 2, kv_heads, in, head_dim) to twice (layers, kv_heads * head_dim, in).
    for name, value in zip("kv", array.unbind(1), strict=True):
        weight = value.mT.flatten(1, 2)
        yield from _per_layer(_BODIES[body], f"self_attn.{name}_proj.weight", weight)


def _attention_output(array: Tensor, body: str) -> Iterable[Part]:
    # (layers, heads, head_dim, out) to (layers, out, heads * head_dim).
    return _per_layer(_BODIES[body], "self_attn.o_proj.weight", array.flatten(1, 2).mT)


def _gate_and_up(array: Tensor, body: str) -> Iterator[Part]:
    for name, value in zip(("gate", "up"), array.unbind(1), strict=True):
        yield from _per_layer(_BODIES[body], f"mlp.{name}_proj.weight", value.mT)


def _down(array: Tensor, body: str) -> Iterable[Part]:
    return _per_layer(_BODIES[body], "mlp.down_proj.weight", array.mT)


def _norm(array: Tensor, which: str, body: str) -> Iterable[Part]:
    return _per_layer(_BODIES[body], f"{_NORMS[which]}.weight", array)


def _adaptive_norm(array: Tensor, which: str, body: str, kind: str) -> Iterable[Part]:
    value = array.mT if kind == "kernel" else array
    return _per_layer(_BODIES[body], f"{_NORMS[which]}.dense.{_leaf(kind)}", value)


def _final_norm(array: Tensor, body: str) -> Iterable[Part]:
    return [(f"{_BODIES[body]}.norm.weight", array)]


def _final_adaptive_norm(array: Tensor, body: str, kind: str) -> Iterable[Part]:
    value = array.mT if kind == "kernel" else array
    return [(f"{_BODIES[body]}.norm.dense.{_leaf(kind)}", value)]


def _positions(array: Tensor) -> Iterable[Part]:
    return [(f"{VISION}.embeddings.position_embedding.weight", array.squeeze(0))]


def _encoder_norm(array: Tensor, kind: str) -> Iterable[Part]:
    return [(f"{VISION}.post_layernorm.{_leaf(kind)}", array)]


_IMG, _LLM = r"PaliGemma\.img", r"PaliGemma\.llm"
_BLOCK = rf"{_IMG}\.Transformer\.encoderblock"
_WHICH_NORM = rf"({'|'.join(_NORMS)})"
_RULES: tuple[tuple[re.Pattern[str], Callable[..., Iterable[Part]]], ...] = tuple(
    (re.compile(pattern), convert)
    for pattern, convert in (
        (rf"{_IMG}\.embedding\.(kernel|bias)", _patches),
        (rf"{_IMG}\.pos_embedding", _positions),
        (rf"{_BLOCK}\.LayerNorm_([01])\.(scale|bias)", _vision_norm),
        (rf"{_BLOCK}\.MlpBlock_0\.Dense_([01])\.(kernel|bias)", _vision_mlp),
        (
            rf"{_BLOCK}\.MultiHeadDotProductAttention_0\.(query|key|value|out)\.(kernel|bias)",
            _vision_attention,
        ),
        (rf"{_IMG}\.Transformer\.encoder_norm\.(scale|bias)", _encoder_norm),
        (rf"{_IMG}\.head\.(kernel|bias)", _dense(PROJECTOR)),
        (rf"{_LLM}\.embedder\.input_embedding", _plain(f"{PALIGEMMA}.lm_head.weight")),
        (rf"{_LLM}\.layers\.attn\.q_einsum(_1)?\.w", _queries),
        (rf"{_LLM}\.layers\.attn\.kv_einsum(_1)?\.w", _keys_and_values),
        (rf"{_LLM}\.layers\.attn\.attn_vec_einsum(_1)?\.w", _attention_output),
        (rf"{_LLM}\.layers\.mlp(_1)?\.gating_einsum", _gate_and_up),
        (rf"{_LLM}\.layers\.mlp(_1)?\.linear", _down),
        (rf"{_LLM}\.layers\.{_WHICH_NORM}(_1)?\.scale", _norm),
        (rf"{_LLM}\.layers\.{_WHICH_NORM}(_1)?\.Dense_0\.(kernel|bias)", _adaptive_norm),
        (rf"{_LLM}\.final_norm(_1)?\.scale", _final_norm),
        (rf"{_LLM}\.final_norm(_1)?\.Dense_0\.(kernel|bias)", _final_adaptive_norm),
        *((rf"{head}\.(kernel|bias)", _dense(head)) for head in (*_HEADS, *_PI0_HEADS)),
    )
)


def action_width(shapes: Mapping[str, tuple[int, ...]]) -> int:
    """Returns the padded action width that the action projection takes."""
    return _shape(shapes, "action_in_proj.kernel", 2)[0]


def vision_heads(shapes: Mapping[str, tuple[int, ...]]) -> int:
    """Returns the attention heads of the vision tower."""
    return _shape(shapes, _QUERY_BIAS, 3)[1]


def _shape(shapes: Mapping[str, tuple[int, ...]], name: str, rank: int) -> tuple[int, ...]:
    shape = shapes.get(name)
    if shape is None or len(shape) != rank:
        found = "is missing" if shape is None else f"has shape {shape}"
        raise CheckpointError(f"{name} {found}; this is no checkpoint of π0 or π0.5")
    return shape
