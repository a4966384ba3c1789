"""The linears that are measured: shapes, activations and who takes part."""

from dataclasses import dataclass

INT8 = ("piper_int8", "bf16", "int_mm", "fp8_rowwise")
INT8_ALL = (*INT8, "torchao_int8", "humming_int8")
FOUR_BIT = ("piper_nvfp4", "piper_convrot_nvfp4", "bf16")
FOUR_BIT_ALL = (
    *FOUR_BIT,
    "piper_nvfp4_w4a4",
    "piper_convrot_nvfp4_w4a4",
    "humming_w4a16",
    "humming_nvfp4",
)
COPY_BYTES = 160_000_000
MOST_SETS = 24


@dataclass(frozen=True)
class LinearCase:
    """``[M, factor * K]`` times ``[N, K]`` transposed, in bf16.

    Attributes:
        m: Rows of the input.
        n: Output features.
        k: Input features of the weight.
        providers: Names of the providers that take part.
        bias: Whether there is a bf16 bias.
        activation: ``None``, ``"gelu_tanh"`` or ``"swiglu"``.
        group: Rotation group of the ConvRot formats.
    """

    m: int
    n: int
    k: int
    providers: tuple[str, ...] = INT8
    bias: bool = True
    activation: str | None = None
    group: int = 256

    @property
    def name(self) -> str:
        """Shape, activation and bias in words."""
        parts = [f"M={self.m} N={self.n} K={self.k}"]
        parts += [self.activation] if self.activation else []
        parts += [f"g{self.group}"] if self.group != 256 else []
        return " ".join(parts if self.bias else [*parts, "no bias"])

    @property
    def input_features(self) -> int:
        """Width of the input: twice ``k`` for swiglu."""
        return self.k * (2 if self.activation == "swiglu" else 1)

    @property
    def operations(self) -> int:
        """Multiplications and additions of the product."""
        return 2 * self.m * self.n * self.k

    @property
    def preparation_bytes(self) -> int:
        """Least traffic of an INT8 preparation: input, codes and row scales."""
        return self.m * (2 * self.input_features + self.k + 4)

    def sets(self, weight_bits: float) -> int:
        """Return how many operand sets are larger than the caches together."""
        size = int(self.n * self.k * weight_bits / 8) + 2 * self.m * self.input_features
        return max(2, min(MOST_SETS, -(-COPY_BYTES // size)))


FULL = (
    LinearCase(8192, 8192, 8192),
    LinearCase(4096, 4096, 4096),
    LinearCase(1024, 16384, 2048),
    LinearCase(1024, 2048, 16384),
    LinearCase(4096, 16384, 2048),
    LinearCase(4096, 2048, 16384),
    LinearCase(8192, 2048, 16384),
    LinearCase(1, 8192, 8192, FOUR_BIT, bias=False),
    LinearCase(16, 8192, 8192, FOUR_BIT_ALL, bias=False),
    LinearCase(1024, 8192, 8192, FOUR_BIT_ALL, bias=False),
    LinearCase(4096, 8192, 8192, INT8_ALL, bias=False),
    LinearCase(1024, 8192, 8192, INT8, group=64),
    LinearCase(8192, 8192, 8192, ("piper_int8", "bf16", "int_mm"), group=64),
    LinearCase(968, 16384, 2048),
    LinearCase(968, 2048, 16384),
    LinearCase(968, 2560, 2048),
    LinearCase(50, 4096, 1024),
    LinearCase(50, 1024, 4096),
    LinearCase(64, 8192, 8192, (*INT8, "piper_nvfp4", "humming_w4a16"), bias=False),
    LinearCase(4096, 2048, 8192, activation="gelu_tanh"),
    LinearCase(4096, 2048, 16384, activation="swiglu"),
)
QUICK = (
    LinearCase(33, 64, 256, INT8_ALL),
    LinearCase(33, 64, 256, FOUR_BIT_ALL, bias=False),
    LinearCase(17, 48, 512, activation="swiglu", group=64),
)
