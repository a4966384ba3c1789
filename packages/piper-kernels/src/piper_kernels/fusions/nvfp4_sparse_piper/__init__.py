"""NVFP4 projections fused with sparse Piper attention."""

from piper_kernels.fusions.nvfp4_sparse_piper._compile_options import (
    nvfp4_sparse_piper_compile_options,
)

__all__ = ["nvfp4_sparse_piper_compile_options"]
