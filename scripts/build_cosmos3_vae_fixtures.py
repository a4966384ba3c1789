# /// script
# requires-python = ">=3.12"
# dependencies = [
#     "accelerate==1.15.0",
#     "diffusers==0.42.1",
#     "torch==2.14.1",
#     "transformers==5.24.0",
# ]
# ///
"""Write the golden outputs of Cosmos3's VAE and sound decoder with the classes of diffusers.

The test suite does not need diffusers; run this apart:

    uv run --isolated --no-project scripts/build_cosmos3_vae_fixtures.py

Weights and inputs are not stored: both sides draw them from their names.
"""
# pyright: reportMissingImports=false

from typing import Any

import torch
from _engine_module import ENGINE, cosmos3_module
from diffusers import AutoencoderKLWan, Cosmos3AVAEAudioTokenizer
from safetensors.torch import save_file
from torch import Tensor, nn

OUT = ENGINE / "tests/models/cosmos3/fixtures"
CHANNELS = range(6)
VAE: dict[str, Any] = {
    "z_dim": len(CHANNELS),
    "base_dim": 16,
    "decoder_base_dim": 24,
    "dim_mult": [1, 2, 4, 4],
    "num_res_blocks": 2,
    "temperal_downsample": [False, True, True],
    "is_residual": True,
    "in_channels": 12,
    "out_channels": 12,
    "patch_size": 2,
    "scale_factor_spatial": 16,
    "scale_factor_temporal": 4,
    "latents_mean": [0.1 * channel - 0.25 for channel in CHANNELS],
    "latents_std": [0.7 + 0.1 * channel for channel in CHANNELS],
}
SOUNDS: dict[str, dict[str, Any]] = {
    "published_strides": {"dec_dim": 4},
    "odd_strides": {"dec_dim": 6, "dec_c_mults": [1, 2], "dec_strides": [3, 5]},
}
TILE, STRIDE, PIXELS = 3, 2, 16  # latents, latents, pixels of a latent


HASHED = cosmos3_module("hashed")


def fill(model: nn.Module) -> None:
    """Overwrite every parameter by what its name says."""
    for name, parameter in model.named_parameters():
        parameter.data = HASHED.hashed_weight(name, tuple(parameter.shape))


def latents(name: str, *shape: int) -> Tensor:
    """Return unnormalised latents [1, C, T, h, w] whose normalised values are within 2."""
    values = 2 * HASHED.hashed(name, shape)
    mean, std = (torch.tensor(VAE[f"latents_{kind}"]) for kind in ("mean", "std"))
    return (values * std.view(-1, 1, 1, 1) + mean.view(-1, 1, 1, 1)).unsqueeze(0)


@torch.no_grad()
def vae_outputs() -> dict[str, Tensor]:
    """Return means of a clip and pixels of latents, whole and tiled."""
    vae = AutoencoderKLWan(**VAE).eval()
    fill(vae)
    clip = HASHED.hashed("clip", (1, 3, 13, 32, 48))
    outputs = {
        "encoded": vae.encode(clip).latent_dist.mean[0],
        "decoded": vae.decode(latents("latents", 6, 4, 2, 3)).sample[0],
        "decoded_wide": vae.decode(latents("wide", 6, 2, 1, 5)).sample[0],
    }
    side, stride = PIXELS * TILE, PIXELS * STRIDE
    vae.enable_tiling(side, side, stride, stride)
    tiled = vae.decode(latents("tiles", 6, 2, 4, 6)).sample[0]
    return outputs | {"tiled": tiled[:, [0, 3]]}


@torch.no_grad()
def sound_outputs() -> dict[str, Tensor]:
    """Return the samples of each decoder."""
    outputs = {}
    for name, sizes in SOUNDS.items():
        sound = Cosmos3AVAEAudioTokenizer(vocoder_input_dim=5, encoder_enabled=False, **sizes)
        fill(sound.eval())
        outputs[name] = sound.decode(HASHED.hashed("sound", (5, 3)))
    return outputs


def main() -> None:
    """Write both files."""
    torch.set_num_threads(1)
    for name, outputs in (("vae", vae_outputs()), ("sound", sound_outputs())):
        for kind, tensor in outputs.items():
            print(name, kind, list(tensor.shape), f"largest {tensor.abs().max():.3f}")
        kept = {kind: tensor.contiguous() for kind, tensor in outputs.items()}
        save_file(kept, OUT / f"{name}.safetensors")


if __name__ == "__main__":
    main()
