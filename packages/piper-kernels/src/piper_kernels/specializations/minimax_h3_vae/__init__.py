"""The MiniMax-H3 video VAE: schedules of its decoder's linears, fusions of its encoder."""

from piper_kernels.specializations.minimax_h3_vae._compile_options import (
    minimax_h3_vae_convrot_int8_compile_options,
    minimax_h3_vae_convrot_int8_conv3d_compile_options,
)

__all__ = [
    "minimax_h3_vae_convrot_int8_compile_options",
    "minimax_h3_vae_convrot_int8_conv3d_compile_options",
]
