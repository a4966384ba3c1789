"""The ConvRot INT8 weight tensor."""

from collections.abc import Sequence
from typing import Any, Self

import torch
from torch import Tensor
from torchao.utils import TorchAOBaseTensor

from piper_kernels.weights._dispatch import dispatch_weight_op
from piper_kernels.weights._quantized import QuantizedWeight
from piper_kernels.weights._rebuild import rebuild
from piper_kernels.weights.convrot._rotation import require_group_size, rotate_groups
from piper_kernels.weights.convrot.int8 import _update
from piper_kernels.weights.convrot.int8._conversion import quantize_weight
from piper_kernels.weights.convrot.int8._handlers import register_handlers
from piper_kernels.weights.convrot.int8._storage import (
    LOGICAL_DTYPES,
    logical_layout,
    require_features,
    require_logical_dtype,
    validate_activation_scale,
    validate_storage,
)

aten: Any = torch.ops.aten


class ConvRotInt8Tensor(QuantizedWeight, TorchAOBaseTensor):  # pyright: ignore[reportIncompatibleMethodOverride]
    """A weight stored as INT8 codes in a rotated basis, with one FP32 scale per output row.

    It behaves as a dense ``[out, in]`` tensor of its logical dtype in ``F.linear``,
    ``x @ weight.t()`` and ``addmm``; ``W = rotate_groups(float(qdata) * scale)``.
    Conv3d weights ``[out, in, 3, 3, 3]`` can be packed and dequantized.

    Inference only. Construction and use check host metadata, never tensor contents.

    Attributes:
        qdata: int8 ``[out, in]``, or ``[out, 3, 3, 3, in]`` for conv3d; contiguous.
        scale: FP32 ``[out, 1]``, contiguous.
        group_size: Rotation group along ``in``: 16, 64 or 256.
        act_per_tensor_scale: FP32 scalar that quantizes every input row after activation
            and rotation, finite and positive; ``None`` scales each row by its maximum.
        transposed: Whether the logical tensor is the transpose of the stored matrix.
    """

    tensor_data_names: list[str] = ["qdata", "scale"]  # noqa: RUF012  # torchao copies this list
    tensor_attribute_names: list[str] = ["group_size", "dtype"]  # noqa: RUF012
    optional_tensor_data_names: list[str] = ["act_per_tensor_scale"]  # noqa: RUF012
    optional_tensor_attribute_names: list[str] = ["transposed"]  # noqa: RUF012

    qdata: Tensor
    scale: Tensor
    group_size: int
    act_per_tensor_scale: Tensor | None = None
    transposed: bool = False

    def __new__(  # noqa: D102
        cls,
        qdata: Tensor,
        scale: Tensor,
        group_size: int,
        dtype: torch.dtype = torch.bfloat16,
        act_per_tensor_scale: Tensor | None = None,
        transposed: bool = False,
    ) -> Self:
        validate_storage(qdata, scale, group_size)
        require_logical_dtype(dtype)
        validate_activation_scale(act_per_tensor_scale, qdata.device)
        if not isinstance(transposed, bool):
            raise TypeError(f"transposed must be bool, got {type(transposed).__name__}")
        if qdata.ndim == 5 and transposed:
            raise NotImplementedError("a conv3d weight cannot be transposed")
        shape, strides = logical_layout(qdata.shape, transposed=transposed)
        return torch.Tensor._make_wrapper_subclass(
            cls, shape, strides=strides, device=qdata.device, dtype=dtype, requires_grad=False
        )

    def __init__(
        self,
        qdata: Tensor,
        scale: Tensor,
        group_size: int,
        dtype: torch.dtype = torch.bfloat16,  # noqa: ARG002  # held by the wrapper
        act_per_tensor_scale: Tensor | None = None,
        transposed: bool = False,
    ) -> None:
        self.qdata = qdata
        self.scale = scale
        self.group_size = group_size
        self.act_per_tensor_scale = act_per_tensor_scale
        self.transposed = transposed

    @classmethod
    def from_hp(
        cls,
        hp_tensor: Tensor,
        *,
        group_size: int,
        act_per_tensor_scale: Tensor | None = None,
    ) -> Self:
        """Rotate and quantize a dense weight; the arithmetic is FP32.

        Args:
            hp_tensor: ``[out, in]`` or ``[out, in, 3, 3, 3]`` in float16, bfloat16 or
                float32; its dtype becomes the logical dtype.
            group_size: Rotation group, 16, 64 or 256; must divide ``in``.
            act_per_tensor_scale: Static input scale, see the class.

        Raises:
            ValueError: The tensor is on meta or its rank, dtype, layout or width is not
                supported.
        """
        require_group_size(group_size)
        if hp_tensor.ndim not in (2, 5):
            raise ValueError(
                "ConvRot INT8 weights must be 2-D [out, in] or 5-D [out, in, 3, 3, 3], "
                f"got shape {tuple(hp_tensor.shape)}"
            )
        if hp_tensor.dtype not in LOGICAL_DTYPES:
            raise ValueError(
                "ConvRot INT8 weights must use float16, bfloat16, or float32, "
                f"got {hp_tensor.dtype}"
            )
        if hp_tensor.layout != torch.strided:
            raise ValueError(f"hp_tensor must use strided layout, got {hp_tensor.layout}")
        if hp_tensor.device.type == "meta":
            raise ValueError("cannot quantize a meta tensor; use from_quantized on meta storage")
        require_features(hp_tensor.shape[1], group_size, conv=hp_tensor.ndim == 5)
        dense = hp_tensor.detach()
        if dense.ndim == 5:
            dense = dense.permute(0, 2, 3, 4, 1)
        codes, scale = quantize_weight(dense.flatten(1), group_size)
        return cls(
            codes.view(dense.shape), scale, group_size, hp_tensor.dtype, act_per_tensor_scale
        )

    @classmethod
    def from_quantized(
        cls,
        qdata: Tensor,
        scale: Tensor,
        *,
        group_size: int,
        logical_dtype: torch.dtype = torch.bfloat16,
        act_per_tensor_scale: Tensor | None = None,
    ) -> Self:
        """Wrap checkpoint storage; contiguous tensors, memory-mapped too, are not copied.

        Args:
            qdata: int8 codes in the rotated basis, see the class.
            scale: FP32 ``[out]`` or ``[out, 1]``.
            group_size: Rotation group of the codes.
            logical_dtype: float16, bfloat16 or float32.
            act_per_tensor_scale: Static input scale, kept by reference.

        Raises:
            ValueError: A shape, dtype, device or layout breaks the format.
        """
        rows = qdata.shape[0] if qdata.ndim else 0
        if tuple(scale.shape) not in ((rows,), (rows, 1)):
            raise ValueError(
                f"from_quantized scale must have shape {(rows,)} or {(rows, 1)}, "
                f"got {tuple(scale.shape)}"
            )
        return cls(
            qdata.contiguous(),
            scale.contiguous().view(-1, 1) if scale.ndim == 1 else scale.contiguous(),
            group_size,
            logical_dtype,
            act_per_tensor_scale,
        )

    @classmethod
    def from_gguf(
        cls,
        data: Tensor,
        *,
        quant_type: int | None = None,
        group_size: int,
        logical_dtype: torch.dtype = torch.bfloat16,
        allow_cpu: bool = False,
    ) -> Self:
        """Convert packed GGUF rows without a dense copy of the weight.

        Args:
            data: Packed rows ``[out, row_bytes]`` of any dtype, read as bytes; on a device
                that runs Triton unless ``allow_cpu``.
            quant_type: Type of the data, ``piper_kernels.gguf.GGUFQuantizationType`` or its
                integer; ``None`` reads ``data.quant_type``.
            group_size: Rotation group, 16, 64 or 256; must divide ``in``.
            logical_dtype: float16, bfloat16 or float32.
            allow_cpu: Convert on the CPU, in blocks of rows of at most 64 MiB of temporary
                memory, where the device has no kernel. Otherwise that is an error.

        Raises:
            TypeError: The data or its type is missing or of the wrong type.
            ValueError: The device, type or shape is not supported.
        """
        from piper_kernels.weights.convrot.int8 import _gguf

        require_logical_dtype(logical_dtype)
        qdata, scale = _gguf.from_gguf(data, quant_type, group_size, allow_cpu=allow_cpu)
        return cls(qdata, scale, group_size, logical_dtype)

    def copy_from_gguf_(
        self, data: Tensor, *, quant_type: int | None = None, allow_cpu: bool = False
    ) -> Self:
        """Overwrite the weight with packed GGUF rows; ``qdata`` and ``scale`` stay in place.

        Args:
            data: See ``from_gguf``; of the shape and device of this weight.
            quant_type: See ``from_gguf``.
            allow_cpu: See ``from_gguf``.

        Raises:
            NotImplementedError: The weight is transposed or a conv3d weight.
            TypeError: The data or its type is missing or of the wrong type.
            ValueError: The device, type, shape or storage is not supported.
        """
        from piper_kernels.weights.convrot.int8 import _gguf

        self._require_updatable()
        _gguf.copy_from_gguf_(
            self.qdata, self.scale, data, quant_type, self.group_size, allow_cpu=allow_cpu
        )
        return self

    def dequantize(self, output_dtype: torch.dtype | None = None) -> Tensor:
        """Return the dense weight, reconstructed in FP32 and rounded once.

        Args:
            output_dtype: float16, bfloat16 or float32; the logical dtype when omitted.

        Raises:
            ValueError: The dtype is not supported or the storage was made non-contiguous.
        """
        dtype = self.dtype if output_dtype is None else output_dtype
        require_logical_dtype(dtype)
        validate_storage(self.qdata, self.scale, self.group_size)
        scale = self.scale.view(-1, *([1] * (self.qdata.ndim - 1)))
        dense = rotate_groups(self.qdata.to(torch.float32) * scale, self.group_size).to(dtype)
        if dense.ndim == 5:
            return dense.permute(0, 4, 1, 2, 3).contiguous()
        return dense.t() if self.transposed else dense

    def _add(self, other: Tensor, *, alpha: float, rounding_seed: int | None) -> None:
        self._require_updatable()
        _update.add_(
            self.qdata,
            self.scale,
            other,
            group_size=self.group_size,
            logical_dtype=self.dtype,
            alpha=alpha,
            rounding_seed=rounding_seed,
        )

    def _addmm(
        self, mat1: Tensor, mat2: Tensor, *, beta: float, alpha: float, rounding_seed: int | None
    ) -> None:
        self._require_updatable()
        _update.addmm_(
            self.qdata,
            self.scale,
            mat1,
            mat2,
            group_size=self.group_size,
            logical_dtype=self.dtype,
            beta=beta,
            alpha=alpha,
            rounding_seed=rounding_seed,
        )

    def _require_updatable(self) -> None:
        if self.transposed or self.ndim != 2:
            raise NotImplementedError(
                "in-place updates need an untransposed 2-D ConvRotInt8Tensor, got shape "
                f"{tuple(self.shape)} with transposed={self.transposed}"
            )

    def _alias(self) -> Self:
        return rebuild(self, aten.alias.default)

    def _transpose(self) -> Self:
        return rebuild(self, aten.alias.default, transposed=not self.transposed)

    @classmethod
    def __torch_dispatch__(
        cls,
        func: Any,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        return dispatch_weight_op(cls._ATEN_OP_TABLE[cls], func, types, args, kwargs or {})


register_handlers(ConvRotInt8Tensor)
