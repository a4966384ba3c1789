"""ConvRot INT8 linears around the windows of an attention."""

from dataclasses import dataclass, field

import torch
from torch import Tensor

from piper_kernels.fusions._ffn.convrot_int8 import Projection
from piper_kernels.fusions.convrot_int8_sage_qk.operands import PreparedInput
from piper_kernels.linear.convrot.int8._backend import select_linear_backend


@dataclass(frozen=True)
class WindowedInput:
    """An input of linears, prepared as a whole or window by window.

    Attributes:
        values: int8 ``[B, S, F]`` with FP32 row scales ``[B, S]``; or floating ``[B, S, F]``
            with a static FP32 scalar scale or none.
        scale: The scales.
        group_size: Rotation group of a floating input.
    """

    values: Tensor
    scale: Tensor | None
    group_size: int | None

    @property
    def tensors(self) -> list[Tensor]:
        """What it consists of."""
        return [self.values] if self.scale is None else [self.values, self.scale]

    def validate(self, label: str, device: torch.device) -> tuple[int, int, int]:
        """Check host metadata and return the shape.

        Raises:
            ValueError: A shape, dtype, device or layout does not fit.
        """
        values, scale = self.values, self.scale
        if values.ndim != 3 or values.device != device or not values.is_contiguous():
            raise ValueError(
                f"{label}: an input must be contiguous [batch, sequence, features] on {device}, "
                f"got {tuple(values.shape)} with strides {values.stride()} on {values.device}"
            )
        batch, rows, features = values.shape
        if values.dtype == torch.int8:
            if scale is None or scale.shape != (batch, rows) or not scale.is_contiguous():
                raise ValueError(
                    f"{label}: a prepared input needs contiguous float32 scales [{batch}, {rows}]"
                )
        elif not values.is_floating_point() or self.group_size is None:
            raise ValueError(
                f"{label}: an input must be int8, or floating with input_group_size, "
                f"got {values.dtype} with {self.group_size}"
            )
        elif scale is not None and scale.ndim:
            raise ValueError(
                f"{label}: the static scale of a floating input must be a scalar, "
                f"got {tuple(scale.shape)}"
            )
        return batch, rows, features

    def window(self, rows: slice) -> PreparedInput:
        """Return prepared rows."""
        values = self.values[:, rows]
        if self.values.dtype == torch.int8:
            assert self.scale is not None, "prepared inputs have scales"
            return PreparedInput(values.contiguous(), self.scale[:, rows].contiguous())
        assert self.group_size is not None, "floating inputs have a group size"
        backend = select_linear_backend(values.device)
        return PreparedInput(*backend.prepare_input(values, self.group_size, None, self.scale))


@dataclass
class Int8OutputLinear:
    """The linear behind an attention; prepared windows of it share one workspace."""

    linear: Projection
    _workspace: tuple[Tensor, Tensor] | None = field(default=None, init=False)

    @property
    def tensors(self) -> list[Tensor]:
        """What it reads besides its input."""
        named = (self.linear.qdata, self.linear.scale, self.linear.bias, self.linear.input_scale)
        return [tensor for tensor in named if tensor is not None]

    def project(self, attention: Tensor, out: Tensor) -> None:
        """Write the linear ``[B, rows, N]`` of merged heads ``[B, rows, H * D]``."""
        backend = select_linear_backend(attention.device)
        rows, features = attention.shape[1:]
        if self._workspace is None or self._workspace[1].shape[0] < rows:
            # Made where it is used: by the stream that projects, for the longest window first.
            self._workspace = (
                attention.new_empty((rows, features), dtype=torch.int8),
                attention.new_empty((rows,), dtype=torch.float32),
            )
        space = (self._workspace[0][:rows], self._workspace[1][:rows])
        linear = self.linear
        for heads, target in zip(attention.unbind(0), out.unbind(0), strict=True):
            prepared = backend.prepare_input(
                heads, linear.group_size, None, linear.input_scale, out=space
            )
            weight = (linear.qdata, linear.scale, linear.bias)
            backend.linear_prepared(*prepared, *weight, attention.dtype, out=target)


@dataclass(frozen=True)
class GivenGates:
    """Gates of the whole sequence, floating ``[B, S, H, D]``."""

    values: Tensor
    projected: bool = field(default=False, init=False)

    @property
    def tensors(self) -> list[Tensor]:
        """The gates."""
        return [self.values]

    def window(self, rows: slice, out: Tensor | None) -> Tensor:  # noqa: ARG002
        """Return a view of the gates of a window."""
        return self.values[:, rows]


@dataclass(frozen=True)
class Int8Gates:
    """Gates that a linear makes window by window.

    Attributes:
        inputs: What is projected.
        qdata: int8 ``[H * D, F]``.
        scale: FP32 ``[H * D, 1]``.
        bias: ``[H * D]``, or ``None``.
    """

    inputs: WindowedInput
    qdata: Tensor
    scale: Tensor
    bias: Tensor | None
    projected: bool = field(default=True, init=False)

    @property
    def tensors(self) -> list[Tensor]:
        """What they are made of."""
        given = [] if self.bias is None else [self.bias]
        return [*self.inputs.tensors, self.qdata, self.scale, *given]

    def window(self, rows: slice, out: Tensor | None) -> Tensor:
        """Write the gates of a window ``[B, rows, H, D]`` and return them."""
        assert out is not None, "projected gates need room"
        prepared = self.inputs.window(rows)
        backend = select_linear_backend(out.device)
        merged = out.flatten(2)
        backend.linear_prepared(
            prepared.qdata, prepared.scale, self.qdata, self.scale, self.bias, out.dtype, out=merged
        )
        return out
