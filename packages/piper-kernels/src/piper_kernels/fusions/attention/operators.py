"""Definition of custom operators with many arguments from a table of them."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class Argument:
    """An argument of an operator.

    Attributes:
        kind: Its type in the schema, for example ``"Tensor?"``.
        name: Its name.
        default: Its default in the schema, or ``None`` where it must be given.
        value: The default in Python.
    """

    kind: str
    name: str
    default: str | None = None
    value: Any = None

    @property
    def declaration(self) -> str:
        """How it appears in a schema."""
        end = "" if self.default is None else f"={self.default}"
        return f"{self.kind} {self.name}{end}"


def optional(kind: str, name: str) -> Argument:
    """Return an argument that is ``None`` unless it is given."""
    return Argument(f"{kind}?", name, "None")


def output_dtype() -> Argument:
    """Return the dtype of a result, bfloat16 unless it is given."""
    return Argument("ScalarType", "output_dtype", "bfloat16", torch.bfloat16)


def define_operator(
    name: str,
    arguments: Sequence[Argument],
    keywords: Sequence[Argument],
    check: Callable[[dict[str, Any]], Tensor],
    run: Callable[[dict[str, Any], Tensor], None],
) -> Callable[..., Tensor]:
    """Define ``piper_kernels::<name>``, which returns one tensor.

    Args:
        name: Name of the operator.
        arguments: Arguments by position.
        keywords: Arguments by keyword alone.
        check: Checks the metadata of arguments by name and returns an empty result.
        run: Fills the result.
    """
    listed = [argument.declaration for argument in arguments]
    listed += ["*", *(argument.declaration for argument in keywords)] if keywords else []

    def bind(given: Sequence[Any], named: dict[str, Any]) -> dict[str, Any]:
        bound = {argument.name: argument.value for argument in (*arguments, *keywords)}
        bound.update(zip((argument.name for argument in arguments), given, strict=False))
        return bound | named

    def execute(*given: Any, **named: Any) -> Tensor:
        bound = bind(given, named)
        output = check(bound)
        run(bound, output)
        return output

    operator = torch.library.custom_op(
        f"piper_kernels::{name}",
        execute,
        mutates_args=(),
        schema=f"({', '.join(listed)}) -> Tensor",
    )
    operator.register_fake(lambda *given, **named: check(bind(given, named)))
    return operator
