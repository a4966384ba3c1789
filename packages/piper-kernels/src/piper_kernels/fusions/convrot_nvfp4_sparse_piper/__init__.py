"""ConvRot NVFP4 projections fused with sparse Piper attention."""

from piper_kernels.fusions.convrot_nvfp4_sparse_piper._compile_options import (
    convrot_nvfp4_sparse_piper_compile_options,
)

__all__ = ["convrot_nvfp4_sparse_piper_compile_options"]
