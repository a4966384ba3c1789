"""Definition of the custom operators of NVFP4 networks from the projections they take."""

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from piper_kernels.fusions._ffn.gated_updates import GatedUpdates
from piper_kernels.fusions._ffn.nvfp4 import Projection, run_chunked_ffn, validate_ffn
from piper_kernels.fusions._ffn.operators import GATED_UPDATES, define_pair

# Arguments of a projection in the order of the operators, without their prefix.
_PROJECTION = (
    ("Tensor", "weight_qdata"),
    ("Tensor", "weight_scale"),
    ("Tensor?", "weight_per_tensor_scale"),
    ("Tensor?", "activation_per_tensor_scale"),
    ("Tensor?", "bias"),
    ("bool", "dynamic_activation_scale"),
)


def define_ffn_operators(
    name: str, projections: Sequence[str], activation_fn: str, *, rotated: bool
) -> tuple[Callable[..., Tensor], Callable[..., None]]:
    """Define ``piper_kernels::<name>`` and ``piper_kernels::<name>_gated_updates_``.

    Both take ``input``, the projections and ``chunk_rows``; the second one takes a gated update
    before ``chunk_rows`` and overwrites ``reusable_update``.

    Args:
        name: Name of the operator that returns the result of the network.
        projections: Prefixes of the arguments: the sources in the order of the arguments, which
            is gate before value, then ``down``.
        activation_fn: ``"swiglu"`` or ``"gelu_tanh"``.
        rotated: Whether every projection has a group size, 0 for one that is not rotated.
    """
    kinds = (*_PROJECTION, *([("SymInt", "group_size")] if rotated else []), ("bool", "high_first"))
    shared = [f"{kind} {prefix}_{part}" for prefix in projections for kind, part in kinds]

    def split(arguments: Sequence[Any]) -> tuple[tuple[Projection, ...], Projection]:
        width = len(kinds)
        parts = [arguments[i * width : (i + 1) * width] for i in range(len(projections))]
        *sources, down = (_projection(part, rotated=rotated) for part in parts)
        return tuple(reversed(sources)), down

    def schema(*extra: str) -> str:
        return f"({', '.join(['Tensor input', *shared, *extra, 'SymInt chunk_rows'])})"

    def run(input: Tensor, *arguments: Any) -> Tensor:  # noqa: A002  # the name of F.linear
        return run_chunked_ffn(input, *split(arguments), activation_fn, arguments[-1])

    def fake(input: Tensor, *arguments: Any) -> Tensor:  # noqa: A002
        outputs = validate_ffn(input, *split(arguments), activation_fn, arguments[-1])
        return input.new_empty((*input.shape[:-1], outputs))

    def update(input: Tensor, *arguments: Any) -> None:  # noqa: A002
        updates = GatedUpdates(*arguments[-1 - len(GATED_UPDATES) : -1])
        run_chunked_ffn(
            input, *split(arguments), activation_fn, arguments[-1], gated_updates=updates
        )

    return define_pair(name, schema, run, fake, update)


def _projection(arguments: Sequence[Any], *, rotated: bool) -> Projection:
    if not rotated:
        return Projection(*arguments)
    *front, group_size, high_first = arguments
    return Projection(*front, high_first=high_first, group_size=group_size)
