"""INT8 convolutions of the MiniMax-H3 VAE's encoder: calibration, conversion and fusion."""

from piper_kernels.specializations.minimax_h3_vae._compile_options import (
    minimax_h3_vae_convrot_int8_conv3d_compile_options,
)
from piper_kernels.specializations.minimax_h3_vae.conv3d.calibration import (
    calibrate_activation_scales,
)
from piper_kernels.specializations.minimax_h3_vae.conv3d.conversion import quantize_convolutions
from piper_kernels.specializations.minimax_h3_vae.conv3d.scales import (
    CONVOLUTIONS,
    P995_ACTIVATION_SCALES,
    P995_INPUT_SCALES,
    ActivationScales,
    default_group_size,
)

__all__ = [
    "CONVOLUTIONS",
    "P995_ACTIVATION_SCALES",
    "P995_INPUT_SCALES",
    "ActivationScales",
    "calibrate_activation_scales",
    "default_group_size",
    "minimax_h3_vae_convrot_int8_conv3d_compile_options",
    "quantize_convolutions",
]
