"""The NVFP4 weight tensor."""

from collections.abc import Sequence
from typing import Any, Self

import torch
from torch import Tensor
from torchao.prototype.mx_formats.nvfp4_tensor import NVFP4Tensor, QuantizeTensorToNVFP4Kwargs
from torchao.utils import TorchAOBaseTensor

from piper_kernels.weights._dispatch import dispatch_weight_op
from piper_kernels.weights._quantized import QuantizedWeight
from piper_kernels.weights._rebuild import rebuild
from piper_kernels.weights.nvfp4 import _quantization, _update
from piper_kernels.weights.nvfp4._handlers import register_handlers
from piper_kernels.weights.nvfp4._storage import (
    is_transposed,
    logical_layout,
    require_logical_dtype,
    validate_metadata,
)

aten: Any = torch.ops.aten


class PiperNVFP4Tensor(QuantizedWeight, NVFP4Tensor):  # pyright: ignore[reportIncompatibleMethodOverride]
    """A weight stored as E2M1 codes in blocks of 16 with E4M3 scales.

    It behaves as a dense ``[out, in]`` tensor of its logical dtype in ``F.linear``,
    ``x @ weight.t()`` and ``addmm``; ``W = code * (per_tensor_scale * block_scale)``.
    Stacks of matrices ``[experts, out, in]`` can be wrapped and dequantized.

    Inference only. Construction and use check host metadata, never tensor contents.

    Attributes:
        qdata: uint8 ``[out, in / 2]``; the even feature is in the low nibble.
        scale: float8_e4m3fn block scales, plain ``[out, in / 16]`` or swizzled
            ``[ceil(out / 128) * 32, ceil(in / 64) * 16]``; flat forms are accepted.
        block_size: Features per scale, 16.
        orig_dtype: Logical dtype: float16, bfloat16 or float32.
        per_tensor_scale: FP32 scalar second scale level, or ``None``.
        act_per_tensor_scale: FP32 scalar second-level scale of inputs, or ``None``.
        is_swizzled_scales: Whether ``scale`` is in the 128x4 layout of block-scaled GEMMs.
        use_triton_kernel: Whether TorchAO quantizes with its own kernel.
        act_quant_kwargs: TorchAO's description of input quantization; ``None`` leaves inputs
            in the logical dtype.
        high_first: Whether the even feature is in the high nibble instead.
    """

    optional_tensor_attribute_names: list[str] = [  # noqa: RUF012  # torchao copies this list
        "is_swizzled_scales",
        "use_triton_kernel",
        "act_quant_kwargs",
        "high_first",
    ]

    qdata: Tensor
    scale: Tensor
    block_size: int
    orig_dtype: torch.dtype
    per_tensor_scale: Tensor | None = None
    act_per_tensor_scale: Tensor | None = None
    is_swizzled_scales: bool = False
    use_triton_kernel: bool = False
    act_quant_kwargs: QuantizeTensorToNVFP4Kwargs | None = None
    high_first: bool = False

    def __new__(  # noqa: D102
        cls,
        qdata: Tensor,
        scale: Tensor,
        block_size: int,  # noqa: ARG004  # set by __init__
        orig_dtype: torch.dtype,
        per_tensor_scale: Tensor | None = None,
        act_per_tensor_scale: Tensor | None = None,
        is_swizzled_scales: bool = False,  # noqa: ARG004
        use_triton_kernel: bool = False,  # noqa: ARG004
        act_quant_kwargs: QuantizeTensorToNVFP4Kwargs | None = None,  # noqa: ARG004
        high_first: bool = False,
    ) -> Self:
        validate_metadata(qdata, scale, per_tensor_scale, act_per_tensor_scale, high_first)
        require_logical_dtype(orig_dtype)
        shape, strides = logical_layout(qdata)
        return torch.Tensor._make_wrapper_subclass(
            cls, shape, strides=strides, device=qdata.device, dtype=orig_dtype, requires_grad=False
        )

    def __init__(
        self,
        qdata: Tensor,
        scale: Tensor,
        block_size: int,
        orig_dtype: torch.dtype,
        per_tensor_scale: Tensor | None = None,
        act_per_tensor_scale: Tensor | None = None,
        is_swizzled_scales: bool = False,
        use_triton_kernel: bool = False,
        act_quant_kwargs: QuantizeTensorToNVFP4Kwargs | None = None,
        high_first: bool = False,
    ) -> None:
        self.qdata = qdata
        self.scale = scale
        self.block_size = block_size
        self.orig_dtype = orig_dtype
        self.per_tensor_scale = per_tensor_scale
        self.act_per_tensor_scale = act_per_tensor_scale
        self.is_swizzled_scales = is_swizzled_scales
        self.use_triton_kernel = use_triton_kernel
        self.act_quant_kwargs = act_quant_kwargs
        self.high_first = high_first

    @property
    def transposed(self) -> bool:
        """Whether the logical tensor is the transpose of the stored matrix."""
        return is_transposed(self.qdata)

    @classmethod
    def from_hp(
        cls,
        hp: Tensor,
        *,
        block_size: int = 16,
        per_tensor_scale: Tensor | None = None,
        compute_per_tensor_scale: bool = False,
        act_per_tensor_scale: Tensor | None = None,
        is_swizzled_scales: bool = False,
        use_triton_kernel: bool = False,
        act_quant_kwargs: QuantizeTensorToNVFP4Kwargs | None = None,
    ) -> Self:
        """Quantize a dense weight; the arithmetic is FP32.

        Args:
            hp: ``[out, in]`` or ``[experts, out, in]`` in float16, bfloat16 or float32; its
                dtype becomes the logical dtype. ``in`` must be a multiple of 16.
            block_size: Features per scale; 16 is the only one.
            per_tensor_scale: Given FP32 scalar second scale level, or one per expert
                ``[experts, 1, 1]``; kept by reference.
            compute_per_tensor_scale: Take ``amax / 2688`` as the second level.
            act_per_tensor_scale: Second-level scale of inputs, kept by reference.
            is_swizzled_scales: Store block scales in the 128x4 layout.
            use_triton_kernel: Let TorchAO quantize with its kernel.
            act_quant_kwargs: TorchAO's description of input quantization.

        Nothing is read back by the host, except that a computed second level must be finite.

        Raises:
            ValueError: The rank, dtype, layout, device or width of the source or the given
                second level is not supported, both second levels are asked for, or ``amax``
                is not finite.
        """
        qdata, scale, scale_level = _quantization.quantize(
            hp,
            block_size,
            per_tensor_scale,
            compute=compute_per_tensor_scale,
            swizzled=is_swizzled_scales,
            use_triton_kernel=use_triton_kernel,
        )
        return cls(
            qdata,
            scale,
            block_size,
            hp.dtype,
            per_tensor_scale=scale_level,
            act_per_tensor_scale=act_per_tensor_scale,
            is_swizzled_scales=is_swizzled_scales,
            use_triton_kernel=use_triton_kernel,
            act_quant_kwargs=act_quant_kwargs,
        )

    @classmethod
    def from_torchao(cls, tensor: NVFP4Tensor) -> Self:
        """Wrap the storage of a TorchAO tensor without a copy.

        Args:
            tensor: The weight; one of this class is returned itself. An attribute
                ``high_first`` of it is honoured.

        Raises:
            TypeError: It is no ``NVFP4Tensor``.
        """
        if isinstance(tensor, cls):
            return tensor
        return cls(**_quantization.torchao_fields(tensor))

    def dequantize(self, output_dtype: torch.dtype | None = None) -> Tensor:
        """Return the dense weight, computed in FP32 and rounded once.

        Args:
            output_dtype: float16, bfloat16 or float32; the logical dtype when omitted.

        Raises:
            ValueError: The dtype is not supported or the storage is no NVFP4 storage.
        """
        dtype = self.dtype if output_dtype is None else output_dtype
        require_logical_dtype(dtype)
        dense = _quantization.dequantize(self).to(dtype)
        return dense.transpose(-2, -1) if self.transposed else dense

    def get_hp_scales(self) -> Tensor:
        """Return the block scales in FP32 and plain order, times the second level if any.

        Returns:
            ``[..., out, in / 16]``, also for transposed weights.
        """
        return _quantization.block_scales(self)

    def _add(self, other: Tensor, *, alpha: float, rounding_seed: int | None) -> None:
        _update.add_(self, other, alpha=alpha, rounding_seed=rounding_seed)

    def _addmm(
        self, mat1: Tensor, mat2: Tensor, *, beta: float, alpha: float, rounding_seed: int | None
    ) -> None:
        _update.addmm_(self, mat1, mat2, beta=beta, alpha=alpha, rounding_seed=rounding_seed)

    def _alias(self) -> Self:
        return rebuild(self, aten.alias.default)

    def _transpose(self) -> Self:
        return rebuild(self, aten.t.default)

    def __repr__(self) -> str:  # pyright: ignore[reportIncompatibleMethodOverride]
        _, metadata = self.__tensor_flatten__()
        fields = {"shape": tuple(self.shape), "device": str(self.device), **metadata}
        inner = ", ".join(f"{name}={value!r}" for name, value in fields.items())
        return f"{type(self).__name__}({inner})"

    # TorchAO disables torch functions on this class; matrix products need theirs.
    __torch_function__: Any = TorchAOBaseTensor.__dict__["__torch_function__"]

    @classmethod
    def __torch_dispatch__(
        cls,
        func: Any,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        return dispatch_weight_op(cls._ATEN_OP_TABLE[cls], func, types, args, kwargs or {})


register_handlers(PiperNVFP4Tensor)
