"""The ConvRot NVFP4 weight tensor."""

from typing import Self

import torch
from torch import Tensor
from torchao.prototype.mx_formats.nvfp4_tensor import NVFP4Tensor, QuantizeTensorToNVFP4Kwargs

from piper_kernels.weights.convrot._rotation import (
    require_divisible,
    require_group_size,
    rotate_groups,
)
from piper_kernels.weights.convrot.nvfp4._handlers import register_handlers
from piper_kernels.weights.convrot.nvfp4._storage import validate_rotation
from piper_kernels.weights.nvfp4 import PiperNVFP4Tensor, _quantization
from piper_kernels.weights.nvfp4._storage import (
    require_logical_dtype,
    require_source,
)


class ConvRotNVFP4Tensor(PiperNVFP4Tensor):
    """An NVFP4 weight whose codes are in a basis rotated in groups along ``in``.

    ``W = rotate_groups(code * (per_tensor_scale * block_scale))``. The storage, its layouts
    and the operators are those of ``PiperNVFP4Tensor``; weights are matrices.

    Attributes:
        group_size: Rotation group along ``in``: 16, 64 or 256.
        act_per_tensor_scale: Second-level scale of rotated inputs.
    """

    tensor_attribute_names: list[str] = ["block_size", "orig_dtype", "group_size"]  # noqa: RUF012

    group_size: int

    def __new__(  # noqa: D102
        cls,
        qdata: Tensor,
        scale: Tensor,
        block_size: int,
        orig_dtype: torch.dtype,
        group_size: int,
        per_tensor_scale: Tensor | None = None,
        act_per_tensor_scale: Tensor | None = None,
        is_swizzled_scales: bool = False,  # noqa: ARG004  # set by __init__
        use_triton_kernel: bool = False,  # noqa: ARG004
        act_quant_kwargs: QuantizeTensorToNVFP4Kwargs | None = None,  # noqa: ARG004
        high_first: bool = False,
    ) -> Self:
        validate_rotation(qdata, group_size)
        return super().__new__(
            cls,
            qdata,
            scale,
            block_size,
            orig_dtype,
            per_tensor_scale,
            act_per_tensor_scale,
            high_first=high_first,
        )

    def __init__(
        self,
        qdata: Tensor,
        scale: Tensor,
        block_size: int,
        orig_dtype: torch.dtype,
        group_size: int,
        per_tensor_scale: Tensor | None = None,
        act_per_tensor_scale: Tensor | None = None,
        is_swizzled_scales: bool = False,
        use_triton_kernel: bool = False,
        act_quant_kwargs: QuantizeTensorToNVFP4Kwargs | None = None,
        high_first: bool = False,
    ) -> None:
        super().__init__(
            qdata,
            scale,
            block_size,
            orig_dtype,
            per_tensor_scale,
            act_per_tensor_scale,
            is_swizzled_scales,
            use_triton_kernel,
            act_quant_kwargs,
            high_first,
        )
        self.group_size = group_size

    @classmethod
    def from_hp(  # pyright: ignore[reportIncompatibleMethodOverride]  # one keyword more
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
        group_size: int | None = None,
    ) -> Self:
        """Rotate and quantize a dense weight ``[out, in]``; the arithmetic is FP32.

        Args:
            hp: ``[out, in]`` in float16, bfloat16 or float32, which becomes the logical dtype.
            block_size: 16.
            per_tensor_scale: Given second level for the rotated weight.
            compute_per_tensor_scale: Take it from ``amax`` of the rotated weight.
            act_per_tensor_scale: See the class.
            is_swizzled_scales: Layout of the block scales.
            use_triton_kernel: Let TorchAO quantize with its kernel.
            act_quant_kwargs: TorchAO's description of input quantization.
            group_size: Rotation group, 16, 64 or 256; must divide ``in``.

        Raises:
            TypeError: No group size is given.
            ValueError: As for ``PiperNVFP4Tensor.from_hp``, and for the group size.
        """
        if group_size is None:
            raise TypeError("ConvRotNVFP4Tensor.from_hp requires a group size: group_size=64")
        if hp.ndim != 2:
            raise ValueError(f"ConvRot NVFP4 weights must be 2-D, got shape {tuple(hp.shape)}")
        require_group_size(group_size)
        require_source(hp, block_size, swizzled=is_swizzled_scales)
        require_divisible(hp.shape[1], group_size)
        qdata, scale, level = _quantization.quantize(
            hp,
            block_size,
            per_tensor_scale,
            compute=compute_per_tensor_scale,
            swizzled=is_swizzled_scales,
            group_size=group_size,
            use_triton_kernel=use_triton_kernel,
        )
        return cls(
            qdata,
            scale,
            block_size,
            hp.dtype,
            group_size,
            per_tensor_scale=level,
            act_per_tensor_scale=act_per_tensor_scale,
            is_swizzled_scales=is_swizzled_scales,
            use_triton_kernel=use_triton_kernel,
            act_quant_kwargs=act_quant_kwargs,
        )

    @classmethod
    def from_torchao(cls, tensor: NVFP4Tensor, *, group_size: int | None = None) -> Self:
        """Wrap TorchAO storage that holds a rotated weight, without a copy.

        Args:
            tensor: The weight; one of this class with the same group is returned itself.
            group_size: Rotation group of its codes.

        Raises:
            TypeError: It is no ``NVFP4Tensor``, or no group size is known.
            ValueError: The weight is one of this class with another group.
        """
        if isinstance(tensor, cls):
            if group_size not in (None, tensor.group_size):
                raise ValueError(f"weight uses group size {tensor.group_size}, not {group_size}")
            return tensor
        if group_size is None:
            raise TypeError("ConvRotNVFP4Tensor.from_torchao requires a group size: group_size=64")
        return cls(**_quantization.torchao_fields(tensor), group_size=group_size)

    @classmethod
    def from_gguf(
        cls,
        data: Tensor,
        *,
        quant_type: int | None = None,
        logical_dtype: torch.dtype = torch.bfloat16,
        block_size: int = 16,
        per_tensor_scale: Tensor | None = None,
        compute_per_tensor_scale: bool = False,
        act_per_tensor_scale: Tensor | None = None,
        is_swizzled_scales: bool = False,
        use_triton_kernel: bool = False,
        act_quant_kwargs: QuantizeTensorToNVFP4Kwargs | None = None,
        group_size: int,
        high_first: bool = False,
        allow_cpu: bool = False,
    ) -> Self:
        """Convert packed GGUF rows without a dense copy of the weight.

        Args:
            data: Packed rows ``[out, row_bytes]`` of any dtype, read as bytes; on a CUDA
                device from sm_80 unless ``allow_cpu``. Data that is not finite gives a weight
                that is not finite: no value is read back to the host.
            quant_type: Type of the data, ``piper_kernels.gguf.GGUFQuantizationType`` or its
                integer; ``None`` reads ``data.quant_type``.
            logical_dtype: float16, bfloat16 or float32.
            block_size: 16.
            per_tensor_scale: Given second level for the rotated weight, kept by reference.
            compute_per_tensor_scale: Take it from the rotated ``amax``, decoding twice.
            act_per_tensor_scale: See the class.
            is_swizzled_scales: Layout of the block scales.
            use_triton_kernel: Attribute for TorchAO.
            act_quant_kwargs: Attribute for TorchAO.
            group_size: Rotation group, 16, 64 or 256; must divide ``in``.
            high_first: Whether the even feature is the high nibble of a byte.
            allow_cpu: Convert on the CPU, in blocks of rows of at most 64 MiB of temporary
                memory, where the device has no kernel. Otherwise that is an error.

        Raises:
            TypeError: The data or its type is missing or of the wrong type.
            ValueError: The device, type, shape or scaling is not supported.
        """
        from piper_kernels.weights.convrot.nvfp4 import _gguf

        fields = _gguf.from_gguf(
            data,
            quant_type,
            logical_dtype=logical_dtype,
            group_size=group_size,
            block_size=block_size,
            per_tensor_scale=per_tensor_scale,
            compute_per_tensor_scale=compute_per_tensor_scale,
            swizzled=is_swizzled_scales,
            high_first=high_first,
            allow_cpu=allow_cpu,
        )
        fields |= {"use_triton_kernel": use_triton_kernel, "act_quant_kwargs": act_quant_kwargs}
        return cls(**fields, act_per_tensor_scale=act_per_tensor_scale)

    def copy_from_gguf_(
        self,
        data: Tensor,
        *,
        quant_type: int | None = None,
        compute_per_tensor_scale: bool = False,
        allow_cpu: bool = False,
    ) -> Self:
        """Overwrite the weight with packed GGUF rows; every inner tensor keeps its storage.

        Args:
            data: See ``from_gguf``; of the shape and device of this weight.
            quant_type: See ``from_gguf``.
            compute_per_tensor_scale: Recompute the global scale, which must exist; otherwise
                the rows are encoded with the present one.
            allow_cpu: See ``from_gguf``.

        Raises:
            NotImplementedError: The weight is transposed.
            TypeError: The data or its type is missing or of the wrong type.
            ValueError: The device, type, shape, storage or scaling is not supported.
        """
        from piper_kernels.weights.convrot.nvfp4 import _gguf

        if self.transposed:
            raise NotImplementedError("cannot overwrite a transposed ConvRotNVFP4Tensor from GGUF")
        _gguf.copy_from_gguf_(
            _gguf.Nvfp4Storage(
                self.qdata,
                self.scale,
                self.per_tensor_scale,
                self.group_size,
                self.is_swizzled_scales,
                self.high_first,
            ),
            data,
            quant_type,
            shape=self.shape,
            block_size=self.block_size,
            compute_per_tensor_scale=compute_per_tensor_scale,
            allow_cpu=allow_cpu,
        )
        return self

    def dequantize(self, output_dtype: torch.dtype | None = None) -> Tensor:
        """Return the dense weight in the logical basis.

        The stored values are rounded to the output dtype and rotated back in it.

        Args:
            output_dtype: float16, bfloat16 or float32; the logical dtype when omitted.

        Raises:
            ValueError: The dtype is not supported or the storage is no NVFP4 storage.
        """
        dtype = self.dtype if output_dtype is None else output_dtype
        require_logical_dtype(dtype)
        dense = rotate_groups(_quantization.dequantize(self).to(dtype), self.group_size)
        return dense.t() if self.transposed else dense


register_handlers(ConvRotNVFP4Tensor)
