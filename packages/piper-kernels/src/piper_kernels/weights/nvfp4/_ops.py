"""Custom operators that quantize to NVFP4 and update its storage in place.

They keep kernels opaque to tracers. The backend is selected when an operator executes; fakes
compute shapes only. A ``group_size`` of 0 stands for no rotation; seeds are signed.
"""

import torch
from torch import Tensor

from piper_kernels.weights.nvfp4 import _backend
from piper_kernels.weights.nvfp4._layout import stacked_scale_shape

_STORAGE = ("qdata", "scale", "per_tensor_scale")


@torch.library.custom_op("piper_kernels::nvfp4_add_", mutates_args=_STORAGE)
def add_(
    qdata: Tensor,
    scale: Tensor,
    per_tensor_scale: Tensor | None,
    update: Tensor,
    group_size: int,
    alpha: float,
    swizzled: bool,
    high_first: bool,
    rounding_seed: int | None = None,
) -> None:
    """Store ``W + alpha * update``."""
    _backend.select_executor(qdata.device).add_(
        qdata,
        scale,
        per_tensor_scale,
        update,
        group_size,
        alpha,
        swizzled,
        high_first,
        rounding_seed,
    )


@add_.register_fake
def _(*_operands: object) -> None:
    return None


@torch.library.custom_op("piper_kernels::nvfp4_addmm_", mutates_args=_STORAGE)
def addmm_(
    qdata: Tensor,
    scale: Tensor,
    per_tensor_scale: Tensor | None,
    mat1: Tensor,
    mat2: Tensor,
    group_size: int,
    beta: float,
    alpha: float,
    swizzled: bool,
    high_first: bool,
    rounding_seed: int | None = None,
) -> None:
    """Store ``beta * W + alpha * mat1 @ mat2``."""
    _backend.select_executor(qdata.device).addmm_(
        qdata,
        scale,
        per_tensor_scale,
        mat1,
        mat2,
        group_size,
        beta,
        alpha,
        swizzled,
        high_first,
        rounding_seed,
    )


@addmm_.register_fake
def _(*_operands: object) -> None:
    return None


@torch.library.custom_op("piper_kernels::nvfp4_quantize", mutates_args=())
def quantize(
    source: Tensor, per_tensor_scale: Tensor | None, group_size: int, swizzled: bool
) -> tuple[Tensor, Tensor]:
    """Return packed codes and block scales of a dense weight; see ``_quantize_reference``."""
    backend = _backend.select_quantizer(source)
    return backend.quantize(source, per_tensor_scale, group_size, swizzled)


@quantize.register_fake
def _(
    source: Tensor, _per_tensor_scale: Tensor | None, _group_size: int, swizzled: bool
) -> tuple[Tensor, Tensor]:
    return _fake_storage(source, swizzled)


@torch.library.custom_op(
    "piper_kernels::nvfp4_quantize_two_level",
    mutates_args=(),
    tags=(torch.Tag.cudagraph_unsafe,),  # it reads the global scale back
)
def quantize_two_level(
    source: Tensor, group_size: int, swizzled: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Return codes, block scales and the computed global scale, which must be finite."""
    return _backend.select_quantizer(source).quantize_two_level(source, group_size, swizzled)


@quantize_two_level.register_fake
def _(source: Tensor, _group_size: int, swizzled: bool) -> tuple[Tensor, Tensor, Tensor]:
    return *_fake_storage(source, swizzled), source.new_empty((), dtype=torch.float32)


def _fake_storage(source: Tensor, swizzled: bool) -> tuple[Tensor, Tensor]:
    shape = tuple(source.shape)
    return (
        source.new_empty((*shape[:-1], shape[-1] // 2), dtype=torch.uint8),
        source.new_empty(stacked_scale_shape(shape, swizzled=swizzled), dtype=torch.float8_e4m3fn),
    )
