"""Unbiased rounding to one of the two adjacent codes of a quantized format.

The Triton device functions live in ``piper_kernels.stochastic_quantization.triton``.
"""

from piper_kernels.stochastic_quantization._seed import signed_seed
from piper_kernels.stochastic_quantization.reference import (
    stochastic_codebook_indices,
    stochastic_round_to_int,
)

__all__ = ["signed_seed", "stochastic_codebook_indices", "stochastic_round_to_int"]
