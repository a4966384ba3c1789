"""INT8 weights in a rotated basis: quantized at load, or read from a checkpoint."""

from typing import TYPE_CHECKING, cast

import torch
from torch import nn

from phyai_quant.scheme import Granularity, QDType, QuantScheme, TensorQuant
from phyai_quant.specs import _activations, _rotation, _scales, base, loading
from phyai_quant.specs.bf16 import check_float_source, check_params_dtype
from phyai_quant.specs.quantized_input import QuantizedInput
from phyai_quant.specs.slicing import local_parts, whole_legs

if TYPE_CHECKING:
    from piper_kernels.weights.convrot.int8 import ConvRotInt8Tensor

_INT8_MAX = 127
_SCALE_FLOOR = 1e-30
STORES = "rotated int8 per_channel (int8)"


class ConvRotInt8Spec(QuantizedInput):
    """ConvRot INT8: codes int8 ``[N, K]`` of the rotated weight and one fp32 scale per row.

    ``layer.weight`` is a parameter that wraps a `ConvRotInt8Tensor` whose logical dtype is the
    layer's ``params_dtype``. An online source is quantized whole and in fp32 as it arrives, so
    ranks share the scale of a row and no high-precision copy of the layer is kept. Inputs are
    rotated and quantized per token, or with the ``input_scale`` of a checkpoint that has one.

    Args:
        rotation_group: Length of the rotation along K: 16, 64 or 256.
        online: False when the checkpoint holds codes and scales.
        static_input: True when the checkpoint must hold an ``input_scale``.
    """

    weight_dtype: torch.dtype | None = torch.int8

    def __init__(
        self, rotation_group: int, *, online: bool = True, static_input: bool = False
    ) -> None:
        self.rotation_group = rotation_group
        self.online = online
        granularity = Granularity.PER_TENSOR if static_input else Granularity.PER_CHANNEL
        self.activation: TensorQuant | None = TensorQuant(
            QDType.INT8, granularity, dynamic=not static_input
        )
        self.spec_id: str = f"convrot_int8_g{rotation_group}"
        self.physical_signature: base.PhysicalSignature = base.PhysicalSignature(
            format="int8",
            layout="convrot",
            granularity="per_channel",
            scale_dtype="fp32",
            storage_dtype="int8",
            fields=(
                ("rotation_group", rotation_group),
                *_activations.signature_fields(self.activation),
            ),
        )

    def tensor_names(self) -> tuple[str, ...]:
        """Returns ``("weight",)`` for a high-precision source; else also the scales."""
        return ("weight",) if self.online else ("weight", "weight_scale", "input_scale")

    def allocate(self, layer: nn.Module, request: base.AllocationRequest) -> None:
        """Registers the quantized ``weight`` ``[N, K]``; its scales are NaN until loaded.

        Raises:
            QuantConfigError: The rotation group does not divide K or is cut by a slice, or
                ``params_dtype`` is not fp32, fp16 or bf16.
        """
        from piper_kernels.weights.convrot.int8 import ConvRotInt8Tensor

        check_params_dtype(layer, request.params_dtype)
        parts = ("weight",) if self.online else ("weight", "weight_scale")
        loading.attach_state(layer, request, (*parts, *self.static_names))
        _rotation.check_rotation(layer, self.rotation_group)
        rows, columns = request.weight_shape
        weight = ConvRotInt8Tensor.from_quantized(
            torch.zeros(rows, columns, dtype=torch.int8, device=request.device),
            torch.full((rows, 1), torch.nan, dtype=torch.float32, device=request.device),
            group_size=self.rotation_group,
            logical_dtype=request.params_dtype,
        )
        layer.register_parameter("weight", nn.Parameter(weight, requires_grad=False))
        if not self.online:
            _scales.register_nan(layer, "input_scale", (1,), request.device)

    def load_weight(
        self, layer: nn.Module, name: str, loaded: torch.Tensor, shard_id: base.ShardId = None
    ) -> None:
        """Takes this rank's part of a whole leg.

        An online ``weight`` is ``[w, K]`` in fp32, fp16 or bf16 and is quantized on the layer's
        device; a stored one is int8 ``[w, K]``. ``weight_scale`` is ``[w]``, ``[w, 1]`` or a
        scalar, ``input_scale`` a scalar.

        Raises:
            QuantConfigError: Wrong tensor name, leg, shape or dtype; a scale given twice.
        """
        loading.check_tensor_name(layer, name, self.tensor_names())
        legs = loading.legs_of(layer, shard_id)
        if name == "input_scale":
            _scales.load_input_part(layer, name, loaded, legs)
            return
        if name == "weight_scale":
            self._load_scale(layer, name, loaded, legs)
        elif self.online:
            self._quantize_legs(layer, name, loaded, legs)
        else:
            _scales.check_dtype(layer, name, loaded, (torch.int8,))
            self._copy_codes(layer, name, loaded, legs)
        loading.load_state(layer).loaded.update((name, leg) for leg in legs)

    def _quantize_legs(
        self, layer: nn.Module, name: str, loaded: torch.Tensor, legs: range
    ) -> None:
        from piper_kernels.weights.convrot.int8 import ConvRotInt8Tensor

        check_float_source(layer, loaded)
        for leg, source in whole_legs(layer, name, loaded, legs):
            on_device = source.to(_quantized(layer).qdata.device)
            whole = ConvRotInt8Tensor.from_hp(on_device, group_size=self.rotation_group)
            one = range(leg, leg + 1)
            self._copy_codes(layer, name, whole.qdata, one)
            self._copy_scale(layer, name, whole.scale, one)

    def _load_scale(self, layer: nn.Module, name: str, loaded: torch.Tensor, legs: range) -> None:
        _scales.check_first(layer, name, "weight_scale", legs, ("weight_scale",))
        values = _scales.float_scale(layer, name, loaded)
        if values.numel() == 1 and values.ndim < 3:
            with torch.no_grad():
                _quantized(layer).scale[loading.row_span(layer, legs)] = values.reshape(1, 1)
        else:
            self._copy_scale(layer, name, values, legs)

    def _copy_codes(self, layer: nn.Module, name: str, codes: torch.Tensor, legs: range) -> None:
        with torch.no_grad():
            for rows, part in local_parts(layer, name, codes, legs):
                _quantized(layer).qdata[rows].copy_(part)

    def _copy_scale(self, layer: nn.Module, name: str, scale: torch.Tensor, legs: range) -> None:
        with torch.no_grad():
            for rows, part in local_parts(layer, name, scale, legs, columns_per_entry=None):
                _quantized(layer).scale[rows, 0].copy_(part)

    def process_after_loading(self, layer: nn.Module) -> None:
        """Checks that every leg has arrived and puts a stored input scale on the weight.

        Raises:
            QuantConfigError: A leg or a scale was never loaded, or some legs have an input scale
                and others have none.
        """
        from piper_kernels.weights.convrot.int8 import ConvRotInt8Tensor

        loading.check_complete(layer)
        state = loading.load_state(layer)
        if state.finished:
            return
        if not self.online and _scales.finish_input(layer):
            weight = _quantized(layer)
            weight = ConvRotInt8Tensor.from_quantized(
                weight.qdata,
                weight.scale,
                group_size=self.rotation_group,
                logical_dtype=weight.dtype,
                act_per_tensor_scale=cast("nn.Parameter", layer.input_scale).detach().view(()),
            )
            layer.register_parameter("weight", nn.Parameter(weight, requires_grad=False))
        state.finished = True

    def dequantize_weight(self, layer: nn.Module) -> torch.Tensor:
        """Returns the weight ``[N, K]`` in fp32, rotated back."""
        return _quantized(layer).dequantize(torch.float32)

    def _quantize_activation(
        self,
        x: torch.Tensor,
        layer: nn.Module,
        activation: TensorQuant,  # noqa: ARG002
    ) -> base.ActivationView:
        """Rotates the activation and rounds it to int8, half to even.

        The scale is the stored ``input_scale`` or ``max|row| / 127`` per token, at least 1e-30.

        Returns:
            int8 codes ``[M, K]`` in the rotated basis.
        """
        rows = _rotation.rotate(x.reshape(-1, x.shape[-1]), self.rotation_group)
        scale, granularity = getattr(layer, "input_scale", None), Granularity.PER_TENSOR
        if scale is None:
            scale = (rows.abs().amax(1) / _INT8_MAX).clamp_min(_SCALE_FLOOR)
            granularity = Granularity.PER_CHANNEL
        codes = (rows / scale[:, None]).round().clamp(-_INT8_MAX - 1, _INT8_MAX)
        return base.ActivationView(codes.to(torch.int8), scale.detach(), granularity)

    def fake_quantize_activation(self, x: torch.Tensor, layer: nn.Module) -> torch.Tensor:
        """Returns the activation ``[..., K]`` quantized, read back in fp32 and rotated back."""
        return _rotation.rotate(super().fake_quantize_activation(x, layer), self.rotation_group)


def _quantized(layer: nn.Module) -> "ConvRotInt8Tensor":
    return cast("ConvRotInt8Tensor", layer.weight)


def build(scheme: QuantScheme | None, _sm: int | None = None) -> ConvRotInt8Spec | None:
    """Returns the spec of a scheme with a rotated int8 weight and int8 input, else None."""
    if scheme is None or scheme.weight.rotation_group is None or scheme.input is None:
        return None
    act, group = scheme.input, scheme.weight.rotation_group
    static = TensorQuant(QDType.INT8, Granularity.PER_TENSOR)
    if act not in (static, TensorQuant(QDType.INT8, Granularity.PER_CHANNEL, dynamic=True)):
        return None
    if scheme.weight != TensorQuant(QDType.INT8, Granularity.PER_CHANNEL, rotation_group=group):
        return None
    return ConvRotInt8Spec(group, online=scheme.online, static_input=act == static)
