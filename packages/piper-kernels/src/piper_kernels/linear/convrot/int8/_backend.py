"""Selection of the code that executes ConvRot INT8 operators on a device."""

from typing import Protocol

import torch
from torch import Tensor

from piper_kernels.linear.convrot.int8 import reference


class LinearBackend(Protocol):
    """What an execution backend provides; shapes and maths are those of the reference."""

    def linear(
        self,
        input: Tensor,  # noqa: A002  # the name of F.linear
        weight_qdata: Tensor,
        weight_scale: Tensor,
        bias: Tensor | None,
        group_size: int,
        activation_fn: str | None = None,
        input_scale: Tensor | None = None,
    ) -> Tensor:
        """Return the linear of a floating input."""
        ...

    def prepare_input(
        self,
        input: Tensor,  # noqa: A002
        group_size: int,
        activation_fn: str | None = None,
        input_scale: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Return the codes and row scales of a floating input."""
        ...

    def linear_prepared(
        self,
        input_qdata: Tensor,
        input_scale: Tensor,
        weight_qdata: Tensor,
        weight_scale: Tensor,
        bias: Tensor | None,
        logical_dtype: torch.dtype,
    ) -> Tensor:
        """Return the linear of a prepared input."""
        ...


class PortableBackend:
    """Executes the reference, on any device."""

    def linear(
        self,
        input: Tensor,  # noqa: A002
        weight_qdata: Tensor,
        weight_scale: Tensor,
        bias: Tensor | None,
        group_size: int,
        activation_fn: str | None = None,
        input_scale: Tensor | None = None,
    ) -> Tensor:
        """Return the linear of a floating input."""
        return reference.linear(
            input,
            weight_qdata,
            weight_scale,
            group_size,
            bias,
            activation_fn=activation_fn,
            input_scale=input_scale,
        )

    def prepare_input(
        self,
        input: Tensor,  # noqa: A002
        group_size: int,
        activation_fn: str | None = None,
        input_scale: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Return the codes and row scales of a floating input."""
        return reference.prepare_input(input, group_size, activation_fn, input_scale)

    def linear_prepared(
        self,
        input_qdata: Tensor,
        input_scale: Tensor,
        weight_qdata: Tensor,
        weight_scale: Tensor,
        bias: Tensor | None,
        logical_dtype: torch.dtype,
    ) -> Tensor:
        """Return the linear of a prepared input."""
        return reference.linear_prepared(
            input_qdata, input_scale, weight_qdata, weight_scale, logical_dtype, bias
        )


_PORTABLE = PortableBackend()


def select_linear_backend(device: torch.device) -> LinearBackend:  # noqa: ARG001
    """Return the backend that executes linear operators on a device.

    Operators ask at execution time, so a compiled graph follows a change of backend.
    """
    return _PORTABLE
