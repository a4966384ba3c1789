"""The attention calls that are measured."""

from dataclasses import dataclass

DENSE = ("piper", "sage", "cudnn", "flash", "flashinfer_fa3", "sageattention")
SPARSE = ("sparse_minmax", "sparse_mean", "piper", "cudnn", "flash")


@dataclass(frozen=True)
class AttentionCase:
    """Dense bf16 attention.

    Attributes:
        rows: Queries and keys.
        head_dim: 64 or 128.
        causal: Whether later keys are masked.
        heads: Query heads.
        kv_heads: Key and value heads.
        batch: Sequences.
    """

    rows: int
    head_dim: int
    causal: bool = False
    heads: int = 32
    kv_heads: int = 32
    batch: int = 1

    @property
    def name(self) -> str:
        """Shape and mask in words."""
        groups = "" if self.heads == self.kv_heads else f"/{self.kv_heads}"
        mask = "causal" if self.causal else "full"
        return f"B{self.batch} H{self.heads}{groups} S{self.rows} D{self.head_dim} {mask}"

    @property
    def operations(self) -> int:
        """Multiplications and additions of both products over the visible pairs."""
        pairs = self.rows * (self.rows + 1) // 2 if self.causal else self.rows * self.rows
        return 4 * self.batch * self.heads * pairs * self.head_dim


@dataclass(frozen=True)
class SparseCase:
    """Sparse attention of which all complete blocks of 64 keys are routed.

    Attributes:
        rows: Queries and keys.
        head_dim: 64 or 128.
        keep: Share of the key blocks that every head keeps.
        heads: Heads.
    """

    rows: int
    head_dim: int
    keep: float
    heads: int = 32

    @property
    def name(self) -> str:
        """Shape and keep ratio in words."""
        return f"H{self.heads} S{self.rows} D{self.head_dim} keep {self.keep:g}"

    @property
    def dense(self) -> AttentionCase:
        """The dense call with the same operands."""
        return AttentionCase(self.rows, self.head_dim, False, self.heads, self.heads)

    @property
    def kept_operations(self) -> int:
        """Operations over the blocks of keys that are kept."""
        kept = max(1, round(self.keep * (self.rows // 64))) * 64 + self.rows % 64
        return 4 * self.heads * self.rows * kept * self.head_dim


FULL = (
    AttentionCase(16384, 128),
    AttentionCase(16384, 128, causal=True),
    AttentionCase(8192, 128),
    AttentionCase(8192, 128, causal=True),
    AttentionCase(16384, 64),
    AttentionCase(16384, 64, causal=True),
    AttentionCase(8192, 64),
    AttentionCase(8192, 128, kv_heads=8),
    AttentionCase(4096, 128),
)
QUICK = (
    AttentionCase(130, 64, heads=2, kv_heads=2),
    AttentionCase(67, 128, causal=True, heads=4, kv_heads=2),
)
FULL_SPARSE = (
    SparseCase(32768, 128, 0.2),
    SparseCase(32768, 128, 0.1),
    SparseCase(32768, 128, 0.5),
    SparseCase(32768, 64, 0.2),
    SparseCase(16384, 128, 0.2),
    SparseCase(32768, 128, 1.0),
)
QUICK_SPARSE = (SparseCase(260, 64, 0.5, heads=2), SparseCase(192, 128, 1.0, heads=2))
