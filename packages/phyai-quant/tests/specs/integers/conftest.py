"""Integer checkpoints written and read back by loops over Python numbers."""

import math
from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from torch import nn

from phyai_quant import Granularity, TensorQuant
from phyai_quant.specs.base import AllocationRequest

BITS = {"int4": 4, "int8": 8}


def pack_loop(rows: list[list[int]], bits: int) -> torch.Tensor:
    """Packs signed values into int32 words, first value in the lowest bits."""
    per_word = 32 // bits
    words = []
    for row in rows:
        packed = [0] * math.ceil(len(row) / per_word)
        for k, value in enumerate(row):
            packed[k // per_word] |= (value + 2 ** (bits - 1)) << bits * (k % per_word)
        words.append([word - 2**32 if word >= 2**31 else word for word in packed])
    return torch.tensor(words, dtype=torch.int32)


@dataclass
class IntegerCheckpoint:
    """The tensors of one leg: signed codes, scales by granularity, zero points, group order."""

    quant: TensorQuant
    codes: torch.Tensor
    scale: torch.Tensor
    zero: torch.Tensor
    order: torch.Tensor | None

    @property
    def bits(self) -> int:
        return BITS[self.quant.dtype.value]

    def entry(self, n: int, k: int) -> tuple[int, ...]:
        """Index of the scale of element (n, k)."""
        if self.quant.granularity is Granularity.PER_TENSOR:
            return ()
        if self.quant.block_shape is None:
            return (n, 0)
        block_n, block_k = self.quant.block_shape
        group = k // block_k if self.order is None else int(self.order[k])
        return (n // block_n, group)

    def expected(self) -> torch.Tensor:
        rows, columns = self.codes.shape
        out = torch.full((rows, columns), torch.nan)
        for n in range(rows):
            for k in range(columns):
                at = self.entry(n, k)
                zero = 0 if self.quant.symmetric else int(self.zero[at])
                out[n, k] = (int(self.codes[n, k]) - zero) * float(self.scale[at])
        return out

    def tensors(self, form: str) -> dict[str, torch.Tensor]:
        """Names and tensors on disk: ``rows`` is int-quantized, ``packed`` pack-quantized."""
        named = {"weight_scale": self.scale}
        if form == "rows":
            named["weight"] = self.codes
        else:
            named["weight_packed"] = pack_loop(self.codes.tolist(), self.bits)
            named["weight_shape"] = torch.tensor(self.codes.shape)
        if not self.quant.symmetric:
            named["weight_zero_point"] = self.zero
            if form == "packed" and self.zero.ndim == 2:
                packed = pack_loop(self.zero.t().tolist(), self.bits)
                named["weight_zero_point"] = packed.t().contiguous()
        if self.order is not None:
            named["weight_g_idx"] = self.order
        return named


def make_checkpoint(
    quant: TensorQuant, shape: tuple[int, int], seed: int = 0, scale_dtype=torch.float32
) -> IntegerCheckpoint:
    """Draws codes of the whole range; the first row is the lowest code and the last one 0."""
    generator = torch.Generator().manual_seed(seed)
    bits = BITS[quant.dtype.value]
    low, high = -(2 ** (bits - 1)), 2 ** (bits - 1)
    codes = torch.randint(low, high, shape, generator=generator, dtype=torch.int8)
    codes[0] = low
    codes[-1] = 0
    rows, columns = shape
    if quant.granularity is Granularity.PER_TENSOR:
        entries = ()
    elif quant.block_shape is None:
        entries = (rows, 1)
    else:
        block_n, block_k = quant.block_shape
        entries = (math.ceil(rows / block_n), math.ceil(columns / block_k))
    scale = (torch.rand(entries, generator=generator) + 0.01).to(scale_dtype)
    zero = torch.randint(low, high, entries, generator=generator, dtype=torch.int8)
    order = None
    if quant.act_order:
        shuffled = torch.randperm(columns, generator=generator)
        order = (shuffled // quant.block_shape[1]).to(torch.int32)
    return IntegerCheckpoint(quant, codes, scale, zero, order)


@pytest.fixture
def checkpoint_of() -> Callable[..., IntegerCheckpoint]:
    return make_checkpoint


@pytest.fixture
def allocate(make_layer) -> Callable[..., nn.Module]:
    """Allocates a layer with a spec; keywords are those of AllocationRequest."""

    def make(spec, shape, prefix="a.down_proj", **request) -> nn.Module:
        layer = make_layer(prefix)
        spec.allocate(layer, AllocationRequest(shape, torch.bfloat16, **request))
        return layer

    return make


@pytest.fixture
def load() -> Callable[..., None]:
    """Loads all tensors of a checkpoint into a leg."""

    def load_all(spec, layer, checkpoint, form="packed", shard_id=None) -> None:
        for name, tensor in checkpoint.tensors(form).items():
            spec.load_weight(layer, name, tensor, shard_id)

    return load_all
