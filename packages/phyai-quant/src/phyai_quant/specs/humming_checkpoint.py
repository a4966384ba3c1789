"""Weights that a checkpoint stores quantized, packed for Humming's kernels on an NVIDIA GPU."""

from dataclasses import replace
from importlib.util import find_spec
from typing import Any, cast

import torch
from torch import Tensor, nn

from phyai_quant.online_rules import minimum_sm
from phyai_quant.scheme import QDType, QuantConfigError, QuantScheme
from phyai_quant.specs import base, humming_staging, loading
from phyai_quant.specs.humming import finish_packed, refuse_reading
from phyai_quant.specs.humming_format import HummingFormat, find_misfit, format_of

_SMALLEST_GROUP = 16


class HummingCheckpointSpec:
    """A weight-only int4, int8, nvfp4 or mxfp4 checkpoint whose codes Humming packs unchanged.

    The portable format loads and checks the tensors in CPU memory. `process_after_loading` packs
    them when the layer's shape and dtype suit the GPU's kernels. Otherwise the layer keeps the
    portable format: ``layer.humming_refusal`` says why, and ``layer.spec``, if there, becomes it.

    Scales of integers are cast to the layer's ``params_dtype``. The global scales of nvfp4 legs
    stay fp32 when the legs agree; else every row gets its own in ``params_dtype``.

    Args:
        scheme: A scheme for which `suits` is true.
        portable: The format that stores the checkpoint's tensors on any device.
    """

    weight_dtype: torch.dtype | None = torch.int32

    def __init__(self, scheme: QuantScheme, portable: base.WeightSpec) -> None:
        self.scheme = scheme
        self.portable = portable
        self.stored: HummingFormat = format_of(scheme)
        self.spec_id: str = self.stored.spec_id("humming_checkpoint")
        self.physical_signature: base.PhysicalSignature = self.stored.signature("humming")
        self.needs_act_quant = False

    def tensor_names(self) -> tuple[str, ...]:
        """Returns the checkpoint tensors that the portable format accepts."""
        return self.portable.tensor_names()

    def allocate(self, layer: nn.Module, request: base.AllocationRequest) -> None:
        """Registers the placeholder and allocates the portable format in CPU memory.

        Raises:
            QuantConfigError: The portable format cannot hold the layer.
        """
        staging = nn.Module()
        staging.prefix = loading.layer_name(layer)  # pyright: ignore[reportArgumentType]
        self.portable.allocate(staging, replace(request, device="cpu"))
        inner = loading.load_state(staging)
        loading.attach_state(layer, request, inner.parts).loaded = inner.loaded
        humming_staging.attach_placeholder(layer, request)
        # kept out of the module tree: its tensors are not the layer's
        vars(layer)["humming_staging"] = staging

    def load_weight(
        self, layer: nn.Module, name: str, loaded: Tensor, shard_id: base.ShardId = None
    ) -> None:
        """Hands one checkpoint tensor to the portable format.

        Raises:
            QuantConfigError: The portable format refuses it, or the layer is finished.
        """
        if loading.load_state(layer).finished:
            raise QuantConfigError(
                f"{loading.layer_name(layer)}: the weight is packed already and cannot take "
                f"{name!r}; build the model again and load every tensor"
            )
        self.portable.load_weight(vars(layer)["humming_staging"], name, loaded, shard_id)

    def process_after_loading(self, layer: nn.Module) -> None:
        """Packs the tensors on the layer's GPU, or moves the portable ones there.

        Raises:
            QuantConfigError: A leg of the weight or of a scale was never loaded.
        """
        loading.check_complete(layer)
        if loading.load_state(layer).finished:
            return
        staging = cast("nn.Module", vars(layer)["humming_staging"])
        self.portable.process_after_loading(staging)
        refusal = self._pack(layer, staging)
        if refusal is not None:
            vars(layer)["humming_refusal"] = refusal
            _adopt(layer, staging)
            if "spec" in vars(layer):
                vars(layer)["spec"] = self.portable
        del vars(layer)["humming_staging"]
        loading.load_state(layer).finished = True

    def _pack(self, layer: nn.Module, staging: nn.Module) -> str | None:
        """Packs the layer, or returns why it cannot."""
        request = loading.load_state(layer).request
        misfit = find_misfit(self.stored, request, packed=True)
        if misfit is not None:
            return misfit
        try:
            finish_packed(layer, self.stored, raw_tensors(staging, self.stored, request))
        except QuantConfigError as error:
            return str(error)
        return None

    def dequantize_weight(self, layer: nn.Module) -> Tensor:
        """Returns the weight ``[N, K]`` in fp32 when the layer keeps the portable format.

        Raises:
            QuantConfigError: `process_after_loading` did not run, or the tensors are packed.
        """
        if hasattr(layer, "humming_config"):
            refuse_reading(layer)
        loading.check_finished(layer)
        return self.portable.dequantize_weight(layer)

    def missing_parts(self, layer: nn.Module) -> list[str]:
        """Returns the legs and scales that were never loaded."""
        return loading.load_state(layer).missing(loading.layer_name(layer))


def raw_tensors(
    staging: nn.Module, stored: HummingFormat, request: base.AllocationRequest
) -> dict[str, Tensor]:
    """Returns the raw tensors (see `HummingFormat`) of a portable layer that is finished.

    Raises:
        QuantConfigError: A scale is too large for ``params_dtype``.
    """
    rows = request.weight_shape[0]
    weight = cast("nn.Parameter", staging.weight).detach().contiguous().view(torch.int32)
    scale = cast("nn.Parameter", staging.weight_scale).detach()
    if not stored.weight.micro_scaled:
        scale = _narrowed(scale.reshape(rows, -1), request.params_dtype)
    raw = {"weight": weight, "weight_scale": scale}
    if stored.weight.dtype is QDType.NVFP4:
        per_leg = cast("nn.Parameter", staging.weight_global_scale).detach()
        if bool((per_leg == per_leg[0]).all()):
            raw["weight_scale_2"] = per_leg[:1]
        else:
            widths = torch.tensor(request.logical_widths)
            per_row = per_leg.repeat_interleave(widths)
            raw["weight_scale_2"] = _narrowed(per_row, request.params_dtype)
    return raw


def _narrowed(scale: Tensor, dtype: torch.dtype) -> Tensor:
    narrow = scale.to(dtype)
    if not bool(torch.isfinite(narrow).all()):
        raise QuantConfigError(
            f"a scale is too large for {dtype}; allowed: up to {torch.finfo(dtype).max:g}"
        )
    return narrow


def _adopt(layer: nn.Module, staging: nn.Module) -> None:
    """Moves the portable tensors to the layer's device."""
    device = humming_staging.placeholder_device(layer)
    for name, parameter in staging._parameters.items():
        moved = None if parameter is None else parameter.detach().to(device)
        kept = None if moved is None else nn.Parameter(moved, requires_grad=False)
        layer.register_parameter(name, kept)


def suits(scheme: QuantScheme) -> bool:
    """Tells whether a checkpoint's codes and scales are raw Humming tensors as they are."""
    weight = scheme.weight
    plain = weight.symmetric and not weight.dynamic and not weight.act_order
    if scheme.online or scheme.input is not None or not plain or weight.rotation_group is not None:
        return False
    if weight.dtype in (QDType.NVFP4, QDType.MXFP4):
        return weight.micro_scaled
    if weight.dtype not in (QDType.INT4, QDType.INT8) or weight.micro_scaled:
        return False
    if weight.block_shape is None:
        return weight.granularity == "per_channel"
    block_n, group = weight.block_shape
    return block_n == 1 and group >= _SMALLEST_GROUP and group & (group - 1) == 0


def build(scheme: QuantScheme | None, sm: int | None) -> Any:
    """Returns the spec of a weight-only checkpoint on an NVIDIA GPU that has Humming, else None."""
    if scheme is None or sm is None or not suits(scheme) or sm < minimum_sm(scheme):
        return None
    if find_spec("humming") is None:
        return None
    return HummingCheckpointSpec(scheme, _portable_spec(scheme))


def _portable_spec(scheme: QuantScheme) -> base.WeightSpec:
    if scheme.weight.dtype is QDType.NVFP4:
        from phyai_quant.specs.nvfp4 import Nvfp4Spec

        return Nvfp4Spec(scheme.weight)
    if scheme.weight.dtype is QDType.MXFP4:
        from phyai_quant.specs.mxfp4 import Mxfp4Spec

        return Mxfp4Spec(scheme.weight)
    from phyai_quant.specs.int_packed import IntPackedSpec

    return IntPackedSpec(scheme.weight)
