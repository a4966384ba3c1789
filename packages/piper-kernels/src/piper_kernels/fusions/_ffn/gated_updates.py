"""The residual update that ends a transformer block, with gates chosen by row.

``out = base + update_gate[index] * update + ffn_gate[index] * ffn`` in FP32, rounded once and
stored over ``update``, which becomes the result of the block.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from piper_kernels._triton.runtime import support

_PORTABLE_ROWS = 512  # bounds the FP32 temporaries of the portable update


@dataclass(frozen=True)
class GatedUpdates:
    """Operands of the update; contents of the index are a precondition.

    Attributes:
        base: ``[..., N]`` in the dtype of the network, contiguous.
        reusable_update: Like ``base``; overwritten by the result.
        update_gate: ``[gates, N]`` floating, columns side by side, any row stride.
        ffn_gate: Like ``update_gate``.
        gate_indices: int32 or int64 ``[rows]``, contiguous.
        python_indexing: Whether negative indices count from the end.
    """

    base: Tensor
    reusable_update: Tensor
    update_gate: Tensor
    ffn_gate: Tensor
    gate_indices: Tensor
    python_indexing: bool

    def validate(self, input: Tensor, out_features: int) -> None:  # noqa: A002
        """Check host metadata against the input of the network.

        Raises:
            ValueError: A shape, dtype, device or layout does not fit.
        """
        expected = (*input.shape[:-1], out_features)
        for name in ("base", "reusable_update"):
            tensor = getattr(self, name)
            if tuple(tensor.shape) != expected or tensor.dtype != input.dtype:
                raise ValueError(
                    f"{name} must be {input.dtype} of shape {expected}, "
                    f"got {tensor.dtype} {tuple(tensor.shape)}"
                )
            if not tensor.is_contiguous():
                raise ValueError(f"{name} must be contiguous, got strides {tensor.stride()}")
        for name in ("update_gate", "ffn_gate"):
            gate = getattr(self, name)
            if gate.ndim != 2 or gate.shape[1] != out_features or not gate.is_floating_point():
                raise ValueError(
                    f"{name} must be floating [gates, {out_features}], "
                    f"got {gate.dtype} {tuple(gate.shape)}"
                )
            if gate.stride(1) != 1:
                raise ValueError(f"{name} needs columns side by side, got {gate.stride()}")
        index = self.gate_indices
        rows = input.numel() // input.shape[-1]
        if index.dtype not in (torch.int32, torch.int64) or tuple(index.shape) != (rows,):
            raise ValueError(
                f"gate_indices must be int32 or int64 of shape {(rows,)}, "
                f"got {index.dtype} {tuple(index.shape)}"
            )
        if not index.is_contiguous():
            raise ValueError("gate_indices must be contiguous")
        for name in ("base", "reusable_update", "update_gate", "ffn_gate", "gate_indices"):
            if getattr(self, name).device != input.device:
                raise ValueError(
                    f"{name} must be on {input.device}, got {getattr(self, name).device}"
                )

    def apply(self, ffn: Tensor, start: int) -> None:
        """Update the rows that begin at ``start`` with a chunk ``[rows, N]`` of the network."""
        width = ffn.shape[1]
        rows = slice(start, start + ffn.shape[0])
        base = self.base.view(-1, width)[rows]
        update = self.reusable_update.view(-1, width)[rows]
        gates = (self.update_gate, self.ffn_gate)
        index = self.gate_indices[rows]
        if support(ffn.device)[0]:
            from piper_kernels.fusions._ffn import triton

            triton.apply_gated_updates(base, update, ffn, *gates, index, self.python_indexing)
        else:
            _apply_portable(base, update, ffn, *gates, index, self.python_indexing)


def _apply_portable(
    base: Tensor,
    update: Tensor,
    ffn: Tensor,
    update_gate: Tensor,
    ffn_gate: Tensor,
    gate_indices: Tensor,
    python_indexing: bool,
) -> None:
    for start in range(0, base.shape[0], _PORTABLE_ROWS):
        rows = slice(start, start + _PORTABLE_ROWS)
        index = gate_indices[rows].to(torch.int64)
        if python_indexing:
            index = torch.where(index < 0, index + update_gate.shape[0], index)
        total = base[rows].to(torch.float32)
        for gate, value in ((update_gate, update), (ffn_gate, ffn)):
            chosen = gate.index_select(0, index).to(torch.float32)
            total = total.addcmul(chosen, value[rows].to(torch.float32))
        update[rows] = total.to(update.dtype)
