"""A video diffusion transformer block in plain PyTorch, quantized and compiled with fusions.

    python examples/piper_kernels/video_dit_block.py [--attention dense] [--tokens 1000]

The block is that of long video models: RMSNorm, projections with RMSNorm and RoPE of the heads,
sparse attention with a coarse residual behind a projected gate, and a SwiGLU network. Nothing in
it mentions quantization. ``quantize_block`` replaces its weights by ConvRot INT8 ones and
``compile_block`` asks one helper for the options that fuse what surrounds them. The example
compares the result with the block in its own dtype.
"""

import argparse
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional

from piper_kernels import SparsePiperAttention, piper_attention, sparse_piper_coarse_residual
from piper_kernels.fusions.convrot_int8_piper import convrot_int8_piper_compile_options
from piper_kernels.fusions.convrot_int8_sparse_piper import (
    convrot_int8_sparse_piper_compile_options,
)
from piper_kernels.fusions.convrot_int8_swiglu_ffn import convrot_int8_swiglu_ffn_compile_options
from piper_kernels.weights.convrot.int8 import ConvRotInt8Tensor

ROUTING = "minmax"
TILE = 64

Attention = Literal["sparse", "dense", "torch"]


@dataclass(frozen=True)
class BlockConfig:
    """Sizes of a block.

    Attributes:
        width: Features of a token.
        heads: Attention heads of ``width / heads`` features, 64 or 128.
        inner: Features inside the feed-forward network.
        keep: Share of the key blocks that a query block of the sparse attention reads.
        attention: ``"sparse"`` with its coarse residual, ``"dense"`` for Piper attention, or
            ``"torch"`` for ``scaled_dot_product_attention``.
    """

    width: int
    heads: int
    inner: int
    keep: float = 0.25
    attention: Attention = "sparse"

    @property
    def head_dim(self) -> int:
        """Features of a head."""
        return self.width // self.heads


class RMSNorm(nn.Module):
    """``x / sqrt(mean(x**2) + eps) * weight`` over the last axis, in FP32, rounded once."""

    def __init__(self, features: int, eps: float = 1e-6) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(features))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """Return the normalized input in its dtype."""
        wide = x.float()
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)
        return (wide * self.weight).to(x.dtype)


def rope_tables(tokens: int, features: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return cosines and sines FP32 ``[tokens, features]``, both halves equal."""
    frequencies = 10_000.0 ** (-torch.arange(0, features, 2, device=device) / features)
    angles = torch.arange(tokens, device=device)[:, None] * frequencies
    return torch.cat((angles.cos(),) * 2, -1), torch.cat((angles.sin(),) * 2, -1)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Return split-half RoPE of ``[B, S, H, D]``."""
    cos, sin = (table.to(x.dtype)[None, :, None] for table in (cos, sin))
    low, high = x.chunk(2, -1)
    return x * cos + torch.cat((-high, low), -1) * sin


class VideoAttention(nn.Module):
    """Self-attention of video tokens ``[B, S, width]``."""

    def __init__(self, config: BlockConfig) -> None:
        super().__init__()
        width, self.config = config.width, config
        self.query, self.key, self.value, self.out = (
            nn.Linear(width, width, bias=False) for _ in range(4)
        )
        self.query_norm, self.key_norm = RMSNorm(config.head_dim), RMSNorm(config.head_dim)
        if config.attention == "sparse":
            self.gate = nn.Linear(width, width, bias=False)
            self.sparse = SparsePiperAttention([config.keep] * config.heads, routing=ROUTING)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Return the attention, projected to ``[B, S, width]``."""

        def heads(linear: nn.Module) -> Tensor:
            return linear(x).unflatten(-1, (-1, self.config.head_dim))

        query = rotate(self.query_norm(heads(self.query)), cos, sin)
        key = rotate(self.key_norm(heads(self.key)), cos, sin)
        value = heads(self.value)
        if self.config.attention == "sparse":
            fine = self.sparse(query, key, value, sparse_key_blocks=x.shape[1] // TILE)
            attended = fine + sparse_piper_coarse_residual(
                query,
                key,
                value,
                heads(self.gate),
                routing=ROUTING,
                coarse_scale=self.config.head_dim**-0.5,
            )
        else:
            operands = (part.transpose(1, 2) for part in (query, key, value))
            dense = self.config.attention == "dense"
            attend: Any = piper_attention if dense else functional.scaled_dot_product_attention
            attended = attend(*operands).transpose(1, 2)
        return self.out(attended.flatten(2))


class FeedForward(nn.Module):
    """``down(silu(gate(x)) * value(x))``."""

    def __init__(self, config: BlockConfig) -> None:
        super().__init__()
        self.gate = nn.Linear(config.width, config.inner, bias=False)
        self.value = nn.Linear(config.width, config.inner, bias=False)
        self.down = nn.Linear(config.inner, config.width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Return ``[B, S, width]``."""
        return self.down(functional.silu(self.gate(x)) * self.value(x))


class VideoDiTBlock(nn.Module):
    """A block of a video diffusion transformer over tokens ``[B, S, width]``."""

    def __init__(self, config: BlockConfig) -> None:
        super().__init__()
        self.attention_norm, self.attention = RMSNorm(config.width), VideoAttention(config)
        self.ffn_norm, self.ffn = RMSNorm(config.width), FeedForward(config)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Return the tokens after attention and feed-forward network."""
        x = x + self.attention(self.attention_norm(x), cos, sin)
        return x + self.ffn(self.ffn_norm(x))


def make_block(config: BlockConfig, device: torch.device, dtype: torch.dtype) -> VideoDiTBlock:
    """Return a block for inference with random weights that keep the scale of their input.

    Norms stay in FP32.
    """
    torch.manual_seed(0)
    with device:
        block = VideoDiTBlock(config).eval().requires_grad_(False)
    for module in block.modules():
        if isinstance(module, nn.Linear):
            module.to(dtype).weight.normal_(std=module.in_features**-0.5)
        elif isinstance(module, RMSNorm):
            module.weight.uniform_(0.5, 1.5)
    return block


def quantize_block(block: VideoDiTBlock, group_size: int = 256) -> VideoDiTBlock:
    """Replace the weights of all linears of a block by ConvRot INT8 ones, in place."""
    for module in block.modules():
        if isinstance(module, nn.Linear):
            packed: Any = ConvRotInt8Tensor.from_hp(module.weight, group_size=group_size)
            module.weight = nn.Parameter(packed, requires_grad=False)
    return block


def compile_options(config: BlockConfig) -> dict[str, Any]:
    """Return the options that fuse a quantized block: attention, then the network."""
    if config.attention == "sparse":
        options = convrot_int8_sparse_piper_compile_options()
    else:
        options = convrot_int8_piper_compile_options(fuse_output=True)
    return convrot_int8_swiglu_ffn_compile_options(options)


def compile_block(block: VideoDiTBlock, config: BlockConfig) -> Any:
    """Return the compiled function of a quantized block."""
    return torch.compile(block, fullgraph=True, options=compile_options(config))


def mark_lengths(x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the operands of a block, marked so that one graph serves every number of tokens.

    ``dynamic=True`` would make numbers such as the epsilon of a norm symbolic too.
    """
    for operand, axis in ((x, 1), (cos, 0), (sin, 0)):
        torch._dynamo.mark_dynamic(operand, axis)
    return x, cos, sin


def main() -> None:
    """Compare the quantized, compiled block with the block in its own dtype."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--attention", choices=("sparse", "dense"), default="sparse")
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--backend", default="inductor", help="backend of torch.compile")
    arguments = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    config = BlockConfig(256, 4, 512, keep=1.0, attention=arguments.attention)
    block = make_block(config, device, torch.bfloat16)
    x = torch.randn(1, arguments.tokens, config.width, dtype=torch.bfloat16, device=device)
    tables = rope_tables(arguments.tokens, config.head_dim, device)
    with torch.inference_mode():
        expected = block(x, *tables)
        quantize_block(block)
        if arguments.backend == "inductor":
            run = compile_block(block, config)
        else:
            run = torch.compile(block, backend=arguments.backend, fullgraph=True)
        actual = run(x, *tables)
    change = (expected - x).float()
    error = (actual.float() - expected.float()).norm() / change.norm()
    print(f"{arguments.attention} attention, {arguments.tokens} tokens: relative error {error:.4f}")


if __name__ == "__main__":
    main()
