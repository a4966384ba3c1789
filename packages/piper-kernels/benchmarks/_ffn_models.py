"""The networks that are measured: feed-forward networks and a transformer block."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import cast

import torch
from _linear_providers import nvfp4_options
from torch import Tensor, nn
from torch.nn import functional

from piper_kernels.weights.convrot.int8 import ConvRotInt8Tensor
from piper_kernels.weights.convrot.nvfp4 import ConvRotNVFP4Tensor
from piper_kernels.weights.nvfp4 import PiperNVFP4Tensor


@dataclass(frozen=True)
class FeedForwardCase:
    """A network on ``rows`` tokens, in bf16.

    Attributes:
        kind: ``"swiglu"``, ``"gelu"`` or ``"block"`` (attention and SwiGLU).
        rows: Tokens.
        width: Features of the residual stream.
        inner: Features inside the feed-forward network.
        heads: Attention heads of a block.
    """

    kind: str
    rows: int
    width: int
    inner: int
    heads: int = 0

    @property
    def name(self) -> str:
        """Kind and shape in words."""
        return f"{self.kind} M={self.rows} {self.width}-{self.inner}"

    @property
    def operations(self) -> int:
        """Multiplications and additions of the linears and of attention."""
        linears = (2 if self.kind == "gelu" else 3) * self.width * self.inner
        total = 2 * self.rows * linears
        if self.kind == "block":
            total += 2 * self.rows * 4 * self.width**2 + 4 * self.rows**2 * self.width
        return total


FULL = (
    FeedForwardCase("swiglu", 8192, 4096, 11008),
    FeedForwardCase("gelu", 8192, 4096, 16384),
)
BLOCKS = (FeedForwardCase("block", 4096, 4096, 11008, 32),)
QUICK = (
    FeedForwardCase("swiglu", 40, 256, 512),
    FeedForwardCase("gelu", 40, 256, 512),
)
QUICK_BLOCKS = (FeedForwardCase("block", 40, 256, 512, 4),)


class SwiGLU(nn.Module):
    """``down(silu(gate(x)) * value(x))``."""

    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.gate = nn.Linear(width, inner, bias=False)
        self.value = nn.Linear(width, inner, bias=False)
        self.down = nn.Linear(inner, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Return ``[..., width]`` of an input of the same shape."""
        return self.down(functional.silu(self.gate(x)) * self.value(x))


class GELU(nn.Module):
    """``down(gelu(up(x)))`` with the tanh approximation and biases."""

    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.up = nn.Linear(width, inner)
        self.down = nn.Linear(inner, width)

    def forward(self, x: Tensor) -> Tensor:
        """Return ``[..., width]`` of an input of the same shape."""
        return self.down(functional.gelu(self.up(x), approximate="tanh"))


class TransformerBlock(nn.Module):
    """Pre-norm attention and SwiGLU with residual connections."""

    def __init__(self, width: int, inner: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.attention_norm = nn.RMSNorm(width, eps=1e-6)
        self.query = nn.Linear(width, width, bias=False)
        self.key = nn.Linear(width, width, bias=False)
        self.val = nn.Linear(width, width, bias=False)
        self.output = nn.Linear(width, width, bias=False)
        self.ffn_norm = nn.RMSNorm(width, eps=1e-6)
        self.ffn = SwiGLU(width, inner)

    def forward(self, x: Tensor) -> Tensor:
        """Return ``[batch, tokens, width]`` of an input of the same shape."""
        normed = self.attention_norm(x)

        def split(projected: Tensor) -> Tensor:
            return projected.unflatten(-1, (self.heads, -1)).transpose(-3, -2)

        q, k, v = (split(linear(normed)) for linear in (self.query, self.key, self.val))
        attended = functional.scaled_dot_product_attention(q, k, v)
        x = x + self.output(attended.transpose(-3, -2).flatten(-2))
        return x + self.ffn(self.ffn_norm(x))


def build(case: FeedForwardCase, device: torch.device) -> nn.Module:
    """Return the network with random bf16 weights that keep the scale of its input."""
    torch.manual_seed(0)
    kinds: dict[str, Callable[[], nn.Module]] = {
        "swiglu": lambda: SwiGLU(case.width, case.inner),
        "gelu": lambda: GELU(case.width, case.inner),
        "block": lambda: TransformerBlock(case.width, case.inner, case.heads),
    }
    with torch.device(device):
        model = kinds[case.kind]()
    for parameter in model.parameters():
        parameter.requires_grad_(False)
        if parameter.ndim == 2:
            parameter.normal_(std=parameter.shape[1] ** -0.5)
    return model.to(torch.bfloat16).eval()


def quantized(model: nn.Module, group: int, weights: str = "convrot_int8") -> nn.Module:
    """Return a copy of a network whose linears hold quantized weights.

    Args:
        model: The network.
        group: Rotation group of the ConvRot formats.
        weights: ``"convrot_int8"``, or ``"nvfp4"`` or ``"convrot_nvfp4"`` with NVFP4 inputs.
    """
    import copy

    result = copy.deepcopy(model)
    linears = cast(
        "Sequence[nn.Linear]", [part for part in result.modules() if isinstance(part, nn.Linear)]
    )
    for linear in linears:
        weight = _packed(linear.weight.detach(), group, weights)
        linear.weight = nn.Parameter(weight, requires_grad=False)
    return result


def _packed(dense: Tensor, group: int, weights: str) -> Tensor:
    if weights == "convrot_int8":
        return ConvRotInt8Tensor.from_hp(dense, group_size=group)
    options = nvfp4_options(quantized_input=True)
    if weights == "convrot_nvfp4":
        return ConvRotNVFP4Tensor.from_hp(dense, group_size=group, **options)
    return PiperNVFP4Tensor.from_hp(dense, **options)
