"""Linear layers whose weight format comes from a quantization plan."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from phyai.checkpoints.errors import CheckpointError
from phyai.checkpoints.slots import TensorSlot, check_unquantized
from phyai.dispatch import CallSite
from phyai.dispatch.selection import Selection
from phyai.kernels.fp8_rows import RoundedRows
from phyai_quant import QuantConfigError, QuantScheme, get_active_plan, materialize
from phyai_quant.plan import Resolution
from phyai_quant.specs.base import AllocationRequest, LegSlice, WeightSpec

if TYPE_CHECKING:
    from phyai.layers.mlp import Activation


@dataclass(frozen=True)
class Leg:
    """One projection of a fused layer.

    Attributes:
        name: last component of its checkpoint name, such as ``q_proj``.
        width: output features that the layer holds.
        shard_id: how weight formats call it, such as ``"q"`` or ``0``.
    """

    name: str
    width: int
    shard_id: str | int | None = None


def sm_version(device: torch.device | str) -> int | None:
    """Returns the NVIDIA compute capability of ``device`` as ``90`` for 9.0, or None."""
    device = torch.device(device)
    if device.type != "cuda" or torch.version.cuda is None:
        return None
    major, minor = torch.cuda.get_device_capability(device)
    return 10 * major + minor


class Linear(nn.Module):
    """``y = x Wᵀ + b`` with a weight of any format the quantization plan names.

    The format is, in this order: ``spec``, ``scheme``, the active plan's answer for ``prefix``,
    the unquantized format in ``params_dtype``. A layer without a prefix asks no plan.

    A checkpoint stores either every leg or one tensor of all legs under the layer's own name.

    Args:
        in_features: K.
        out_features: N, or the legs of a fused projection whose widths add up to N.
        bias: whether there is a bias [N], kept in ``params_dtype``.
        prefix: the layer's name, which plans match and checkpoints use.
        role: call-site role for kernel policies.
        params_dtype: dtype of unquantized weights and logical dtype of quantized ones.
        device: where the weights live.
        spec: physical format, overriding everything.
        scheme: quantization scheme, overriding the plan.
        slices: which part of each leg's checkpoint tensors the layer holds, where N and K are
            those of one rank; all of them by default.
        stored: full checkpoint name of each leg where it does not follow from ``prefix``; plans
            match it too.

    Attributes:
        resolution: what decided the scheme; None where no plan was asked.

    Raises:
        QuantConfigError: if legs have different schemes, or nothing stores the scheme in this size
            or on this device.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int | Sequence[Leg],
        *,
        bias: bool = False,
        prefix: str = "",
        role: str = "linear",
        params_dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
        spec: WeightSpec | None = None,
        scheme: QuantScheme | None = None,
        slices: Sequence[LegSlice] = (),
        stored: Sequence[str] = (),
    ) -> None:
        super().__init__()
        self.prefix = prefix
        self._filled: dict[tuple[str, int], str] = {}
        parent, _, name = prefix.rpartition(".")
        alone = isinstance(out_features, int)
        self.legs: tuple[Leg, ...] = (Leg(name, out_features),) if alone else tuple(out_features)
        self.renamed: bool = bool(stored)
        self.stored: tuple[str, ...] = tuple(stored) or tuple(
            f"{parent}.{leg.name}" if parent else leg.name for leg in self.legs
        )
        self.in_features = in_features
        self.out_features: int = sum(leg.width for leg in self.legs)
        self.resolution: Resolution | None = None
        plan = get_active_plan()
        if spec is None and scheme is None and plan is not None and prefix:
            names = [leg.name for leg in self.legs] if len(self.legs) > 1 else None
            self.resolution = plan.explain(prefix, type(self), legs=names, stored=stored)
            scheme = self.resolution.scheme
        self.scheme: QuantScheme | None = scheme if spec is None else None
        self.params_dtype = params_dtype
        self.weight: Tensor
        request = AllocationRequest(
            weight_shape=(self.out_features, in_features),
            logical_widths=tuple(leg.width for leg in self.legs),
            shard_ids=tuple(leg.shard_id for leg in self.legs),
            params_dtype=params_dtype,
            device=torch.device(device),
            slices=tuple(slices),
        )
        self.slices: tuple[LegSlice, ...] = request.slices
        self.spec: WeightSpec = self._allocated(spec, request)
        self.bias: nn.Parameter | None = (
            nn.Parameter(
                torch.empty(self.out_features, dtype=params_dtype, device=device),
                requires_grad=False,
            )
            if bias
            else None
        )
        self._site = CallSite("gemm", role=role, dims={"N": self.out_features, "K": in_features})

    def _allocated(self, spec: WeightSpec | None, request: AllocationRequest) -> WeightSpec:
        """Makes the place of the weight in ``spec``, or in the format of the scheme."""
        try:
            if spec is None:
                spec = materialize(self.scheme, sm_version(request.device or "cpu"))
            spec.allocate(self, request)
        except QuantConfigError as error:
            plan = get_active_plan()
            if self.resolution is None or plan is None:
                raise
            text = str(error).removeprefix(f"{self.prefix}: ")
            decider = self.resolution.decided_by(plan.source)
            raise QuantConfigError(f"{self.prefix}: {text}; decided by {decider}") from error
        return spec

    def forward(self, x: Tensor | RoundedRows) -> Tensor:
        """Maps ``x`` [..., K] to [..., N] in the dtype of ``x``."""
        return self._multiply(x, self.bias)

    def activated(self, x: Tensor, activation: "Activation") -> Tensor:
        """Returns ``activation(self(x))``; a kernel may do both at once.

        Args:
            x: [..., K].
            activation: takes the output; a gated one takes it as ``[activated | multiplied]``.
        """
        if activation.gated == (self.bias is not None):
            return activation(self(x))
        site = self._gated_site if activation.gated else self._activated_site
        facts = self._facts(x.numel() // self.in_features, x.dtype, x.device)
        selection = site.select(**facts, attrs={"activation": activation.name})
        return selection.execute(self, activation, x)

    def takes_fp8_rows(self, rows: int, dtype: torch.dtype, device: torch.device) -> bool:
        """Whether the product of ``rows`` rows reads `Fp8Rows` instead of values of ``dtype``."""
        if self.spec.physical_signature.format != "fp8_e4m3":
            return False
        return bool(self._select(rows, dtype, device).impl.metadata.get("takes_fp8_rows"))

    def takes_int8_rows(self, rows: int, dtype: torch.dtype, device: torch.device) -> int | None:
        """Returns the rotation group of the `Int8Rows` that the product of ``rows`` rows reads.

        None if it reads values of ``dtype``: elsewhere than on a GPU there is nothing to save.
        """
        signature = self.spec.physical_signature
        fields = dict(signature.fields)
        rotates = signature.format == "int8" and signature.layout == "convrot"
        if not rotates or fields["input_scale"] != "dynamic" or device.type != "cuda":
            return None
        selection = self._select(rows, dtype, device)
        return fields["rotation_group"] if selection.impl.metadata.get("takes_int8_rows") else None

    def _multiply(self, x: Tensor | RoundedRows, bias: Tensor | None) -> Tensor:
        selection = self._select(x.numel() // self.in_features, x.dtype, x.device)
        return selection.execute(self, x, bias)

    def _select(self, rows: int, dtype: torch.dtype, device: torch.device) -> Selection:
        return self._site.select(**self._facts(rows, dtype, device))

    def _facts(self, rows: int, dtype: torch.dtype, device: torch.device) -> dict[str, Any]:
        return {
            "device": device,
            "dtype": {
                "input": dtype,
                "output": dtype,
                "weight": self.spec.weight_dtype or self.params_dtype,
            },
            "quant": self.spec.physical_signature,
            "dims": {"M": rows},
        }

    @cached_property
    def _gated_site(self) -> CallSite:
        dims = {"K": self.in_features, "hidden": self.out_features // 2}
        return CallSite("gated_product", role=self._site.role, dims=dims)

    @cached_property
    def _activated_site(self) -> CallSite:
        dims = {"K": self.in_features, "hidden": self.out_features}
        return CallSite("activated_product", role=self._site.role, dims=dims)

    def checkpoint_slots(self) -> Iterator[TensorSlot]:
        """Yields the weight, scales and bias of every leg, and those of all legs in one tensor."""
        everything = range(len(self.legs))
        for index, leg in enumerate(self.legs):
            yield from self._slots(self.stored[index], range(index, index + 1), leg.shard_id)
        if len(self.legs) > 1 and self.prefix:
            yield from self._slots(self.prefix, everything, None)

    def _slots(self, name: str, legs: range, shard_id: str | int | None) -> Iterator[TensorSlot]:
        for tensor in self.spec.tensor_names():
            yield self._weight_slot(f"{name}.{tensor}", tensor, legs, shard_id)
        if self.bias is not None:
            yield self._bias_slot(f"{name}.bias", legs)

    def _weight_slot(
        self, key: str, tensor: str, legs: range, shard_id: str | int | None
    ) -> TensorSlot:
        def load(source: Tensor) -> None:
            self._claim(key, tensor, legs)
            try:
                self.spec.load_weight(self, tensor, source, shard_id)
            except QuantConfigError as error:
                told = f"{key}: {error}" if self.renamed or len(self.legs) > 1 else str(error)
                raise QuantConfigError(told) from error

        # Formats accept tensors under several names: `missing_parts` knows what is needed.
        return TensorSlot(key, load, optional=True)

    def _bias_slot(self, key: str, legs: range) -> TensorSlot:
        held = [self.slices[leg] for leg in legs]
        width = sum(part.full_shape[0] for part in held)

        def load(source: Tensor) -> None:
            check_unquantized(key, source)
            if self.bias is None or source.shape != (width,):
                raise CheckpointError(
                    f"{key}: the checkpoint has shape {tuple(source.shape)}, "
                    f"the model needs ({width},)"
                )
            self._claim(key, "bias", legs)
            wholes = source.split([part.full_shape[0] for part in held])
            start = sum(leg.width for leg in self.legs[: legs.start])
            for leg, part, whole in zip(legs, held, wholes, strict=True):
                size = self.legs[leg].width
                kept = whole[part.row_start : part.row_start + size]
                self.bias.data[start : start + size].copy_(kept)
                start += size

        return TensorSlot(key, load, optional=True)

    def _claim(self, key: str, tensor: str, legs: range) -> None:
        """Refuses a tensor of legs that another checkpoint tensor has filled."""
        for leg in legs:
            first = self._filled.setdefault((tensor, leg), key)
            if first != key:
                raise CheckpointError(
                    f"{key}: the checkpoint also has {first}; it must hold one tensor for all "
                    "legs or one for each, not both"
                )

    def missing_parts(self) -> list[str]:
        """Returns the checkpoint names of weights, scales and biases that were never loaded."""
        missing = [self._in_checkpoint(part) for part in self.spec.missing_parts(self)]
        if self.bias is not None:
            missing += [
                f"{name}.bias"
                for index, name in enumerate(self.stored)
                if ("bias", index) not in self._filled
            ]
        return missing

    def _in_checkpoint(self, part: str) -> str:
        """Turns ``attn.qkv_proj.weight[q]``, as formats say it, into ``attn.q_proj.weight``."""
        if len(self.legs) == 1 and self.prefix:
            return f"{self.stored[0]}.{part.removeprefix(f'{self.prefix}.')}"
        for leg, name in zip(self.legs, self.stored, strict=True):
            suffix = f"[{leg.shard_id}]"
            if part.endswith(suffix):
                tensor = part.removesuffix(suffix).rpartition(".")[2]
                return f"{name}.{tensor}"
        return part

    def post_load(self) -> None:
        """Lets the format finish its weight."""
        self.spec.process_after_loading(self)
