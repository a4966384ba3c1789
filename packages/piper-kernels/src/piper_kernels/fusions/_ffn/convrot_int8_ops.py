"""Definition of the custom operators of ConvRot INT8 networks from the projections they take."""

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from piper_kernels.fusions._ffn.convrot_int8 import Projection, run_chunked_ffn, validate_ffn
from piper_kernels.fusions._ffn.gated_updates import GatedUpdates
from piper_kernels.fusions._ffn.operators import GATED_UPDATES, define_pair

# Arguments of a projection in the order of the operators, without their prefix.
_PROJECTION = (
    ("Tensor", "weight_qdata"),
    ("Tensor", "weight_scale"),
    ("Tensor?", "bias"),
    ("SymInt", "group_size"),
)


def define_ffn_operators(
    name: str, projections: Sequence[str], activation_fn: str
) -> tuple[Callable[..., Tensor], Callable[..., None]]:
    """Define ``piper_kernels::<name>`` and ``piper_kernels::<name>_gated_updates_``.

    Both take ``input``, the projections, ``chunk_rows`` and the static input scales, which are
    ``None`` where they are not given; the second one takes a gated update before ``chunk_rows``
    and overwrites ``reusable_update``.

    Args:
        name: Name of the operator that returns the result of the network.
        projections: Prefixes of the arguments: the sources in the order of the arguments, which
            is gate before value, then ``down``.
        activation_fn: ``"swiglu"`` or ``"gelu_tanh"``.
    """
    weights = [f"{kind} {prefix}_{part}" for prefix in projections for kind, part in _PROJECTION]
    scales = [f"Tensor? {prefix}_input_scale=None" for prefix in projections]

    def schema(*extra: str) -> str:
        return f"({', '.join(['Tensor input', *weights, *extra, 'SymInt chunk_rows', *scales])})"

    def split(arguments: Sequence[Any], extra: int = 0) -> tuple[Any, ...]:
        """Return the sources, ``down``, what lies before the rows, and the rows of a chunk."""
        width, count = len(_PROJECTION), len(projections)
        rows = width * count + extra
        # Operators are called without trailing arguments that have their defaults.
        given = (*arguments[rows + 1 :], *[None] * count)
        parts = [
            Projection(*arguments[i * width : (i + 1) * width], input_scale=given[i])
            for i in range(count)
        ]
        *sources, down = parts
        return tuple(reversed(sources)), down, arguments[width * count : rows], arguments[rows]

    def run(input: Tensor, *arguments: Any) -> Tensor:  # noqa: A002  # the name of F.linear
        sources, down, _, chunk_rows = split(arguments)
        return run_chunked_ffn(input, sources, down, activation_fn, chunk_rows)

    def fake(input: Tensor, *arguments: Any) -> Tensor:  # noqa: A002
        sources, down, _, chunk_rows = split(arguments)
        validate_ffn(input, sources, down, activation_fn, chunk_rows)
        return input.new_empty((*input.shape[:-1], down.qdata.shape[0]))

    def update(input: Tensor, *arguments: Any) -> None:  # noqa: A002
        sources, down, operands, chunk_rows = split(arguments, len(GATED_UPDATES))
        run_chunked_ffn(
            input, sources, down, activation_fn, chunk_rows, gated_updates=GatedUpdates(*operands)
        )

    return define_pair(name, schema, run, fake, update)
