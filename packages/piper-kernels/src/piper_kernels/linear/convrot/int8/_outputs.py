"""Caller-owned outputs and paired projections: checks of host metadata."""

import torch
from torch import Tensor

Projection = tuple[Tensor, Tensor, Tensor | None]
"""Weight codes int8 ``[N, K]``, weight scales FP32 ``[N, 1]`` and a bias ``[N]`` or ``None``."""


def output_columns(weight_qdata: Tensor, second_projection: Projection | None) -> int:
    """Return how many columns one or two projections of equal shape produce.

    Raises:
        ValueError: The weights of the two projections differ in shape.
    """
    if second_projection is None:
        return weight_qdata.shape[0]
    second = second_projection[0]
    if second.shape != weight_qdata.shape:
        raise ValueError(
            "the second projection must have the weight shape of the first, "
            f"{tuple(weight_qdata.shape)}, got {tuple(second.shape)}"
        )
    return 2 * weight_qdata.shape[0]


def allocate_or_check(
    out: Tensor | None, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device
) -> tuple[Tensor, Tensor]:
    """Return the output and its view as rows.

    Args:
        out: Caller-owned ``shape`` with side by side columns whose rows may be any fixed
            distance apart, or ``None`` to allocate.
        shape: ``(..., columns)``.
        dtype: Dtype of the output.
        device: Device of the output.

    Returns:
        The output of ``shape``, and ``[rows, columns]`` over the same storage.

    Raises:
        ValueError: ``out`` has another shape, dtype or device, or strides that rows cannot have.
    """
    rows = 1
    for size in shape[:-1]:
        rows *= size
    if out is None:
        out = torch.empty(shape, dtype=dtype, device=device)
        return out, out if len(shape) == 2 else out.view(rows, shape[-1])
    if tuple(out.shape) != shape or out.dtype != dtype or out.device != device:
        raise ValueError(
            f"out must be {dtype} with shape {shape} on {device}, "
            f"got {out.dtype} with shape {tuple(out.shape)} on {out.device}"
        )
    if out.stride(-1) != 1 and shape[-1] > 1:
        raise ValueError(f"out must have columns side by side, got strides {out.stride()}")
    try:
        return out, out.view(rows, shape[-1])
    except RuntimeError as error:
        raise ValueError(
            f"the rows of out must be a fixed distance apart, got strides {out.stride()}"
        ) from error


def check_prepared(
    out: tuple[Tensor, Tensor], shape: tuple[int, ...], device: torch.device
) -> None:
    """Check caller-owned codes int8 ``shape`` and row scales FP32 ``shape[:-1]``.

    Raises:
        ValueError: One has another shape, dtype or device, or is not contiguous.
    """
    wanted = (("codes", torch.int8, shape), ("scales", torch.float32, shape[:-1]))
    for part, (name, dtype, size) in zip(out, wanted, strict=True):
        if (
            part.dtype != dtype
            or tuple(part.shape) != size
            or part.device != device
            or not part.is_contiguous()
        ):
            raise ValueError(
                f"the {name} of out must be contiguous {dtype} with shape {size} on {device}, got "
                f"{part.dtype} with shape {tuple(part.shape)} and strides {part.stride()} "
                f"on {part.device}"
            )
