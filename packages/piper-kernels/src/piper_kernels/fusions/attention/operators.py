"""Definition of custom operators with many arguments from a table of them."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch


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
    empty: Callable[[dict[str, Any]], Any],
    run: Callable[[dict[str, Any]], Any],
    results: int = 1,
    *,
    mutates: str | None = None,
) -> Callable[..., Any]:
    """Define ``piper_kernels::<name>``.

    Args:
        name: Name of the operator.
        arguments: Arguments by position.
        keywords: Arguments by keyword alone.
        empty: Checks the metadata of arguments by name and returns uninitialized results.
        run: Checks them too and returns the results.
        results: How many tensors are returned.
        mutates: An argument that is overwritten.
    """
    listed = [
        argument.declaration.replace("Tensor", "Tensor(a!)", int(argument.name == mutates))
        for argument in arguments
    ]
    listed += ["*", *(argument.declaration for argument in keywords)] if keywords else []

    def bind(given: Sequence[Any], named: dict[str, Any]) -> dict[str, Any]:
        bound = {argument.name: argument.value for argument in (*arguments, *keywords)}
        bound.update(zip((argument.name for argument in arguments), given, strict=False))
        return bound | named

    returned = "Tensor" if results == 1 else f"({', '.join(['Tensor'] * results)})"
    operator = torch.library.custom_op(
        f"piper_kernels::{name}",
        lambda *given, **named: run(bind(given, named)),
        mutates_args=() if mutates is None else (mutates,),
        schema=f"({', '.join(listed)}) -> {returned}",
    )
    operator.register_fake(lambda *given, **named: empty(bind(given, named)))
    return operator
