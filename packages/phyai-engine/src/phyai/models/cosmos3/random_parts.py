"""Random weights of the VAE and of the sound decoder under their stored names."""

from collections.abc import Mapping
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

Shapes = dict[str, tuple[int, ...]]


def vae_shapes(config: Mapping[str, Any]) -> Shapes:
    """Returns the shape of every tensor of ``vae/`` by its stored name."""
    latent, mult = config["z_dim"], config["dim_mult"]
    blocks, temporal = config["num_res_blocks"], config["temperal_downsample"]
    down = [config["base_dim"] * factor for factor in (1, *mult)]
    up = [config["decoder_base_dim"] * factor for factor in (mult[-1], *reversed(mult))]
    shapes = _conv("encoder.conv_in", down[0], config["in_channels"], 3, 3, 3)
    for index, (inputs, outputs) in enumerate(pairwise(down)):
        block = f"encoder.down_blocks.{index}"
        for part in range(blocks):
            shapes |= _residual(
                f"{block}.resnets.{part}", inputs if part == 0 else outputs, outputs
            )
        if index < len(temporal):
            shapes |= _conv(f"{block}.downsampler.resample.1", outputs, outputs, 3, 3)
            if temporal[index]:
                shapes |= _conv(f"{block}.downsampler.time_conv", outputs, outputs, 3, 1, 1)
    shapes |= _ends("encoder", down[-1], middle=down[-1], outputs=2 * latent)
    shapes |= _conv("quant_conv", 2 * latent, 2 * latent, 1, 1, 1)
    shapes |= _conv("post_quant_conv", latent, latent, 1, 1, 1)
    shapes |= _conv("decoder.conv_in", up[0], latent, 3, 3, 3)
    for index, (inputs, outputs) in enumerate(pairwise(up)):
        block = f"decoder.up_blocks.{index}"
        for part in range(blocks + 1):
            shapes |= _residual(
                f"{block}.resnets.{part}", inputs if part == 0 else outputs, outputs
            )
        if index < len(temporal):
            shapes |= _conv(f"{block}.upsampler.resample.1", outputs, outputs, 3, 3)
            if temporal[-1 - index]:
                shapes |= _conv(f"{block}.upsampler.time_conv", 2 * outputs, outputs, 3, 1, 1)
    return shapes | _ends("decoder", up[-1], middle=up[0], outputs=config["out_channels"])


def _conv(name: str, outputs: int, inputs: int, *kernel: int) -> Shapes:
    return {f"{name}.weight": (outputs, inputs, *kernel), f"{name}.bias": (outputs,)}


def _residual(name: str, inputs: int, outputs: int) -> Shapes:
    return {
        f"{name}.norm1.gamma": (inputs, 1, 1, 1),
        **_conv(f"{name}.conv1", outputs, inputs, 3, 3, 3),
        f"{name}.norm2.gamma": (outputs, 1, 1, 1),
        **_conv(f"{name}.conv2", outputs, outputs, 3, 3, 3),
        **(_conv(f"{name}.conv_shortcut", outputs, inputs, 1, 1, 1) if inputs != outputs else {}),
    }


def _ends(name: str, width: int, *, middle: int, outputs: int) -> Shapes:
    return {
        **_residual(f"{name}.mid_block.resnets.0", middle, middle),
        f"{name}.mid_block.attentions.0.norm.gamma": (middle, 1, 1),
        **_conv(f"{name}.mid_block.attentions.0.to_qkv", 3 * middle, middle, 1, 1),
        **_conv(f"{name}.mid_block.attentions.0.proj", middle, middle, 1, 1),
        **_residual(f"{name}.mid_block.resnets.1", middle, middle),
        f"{name}.norm_out.gamma": (width, 1, 1, 1),
        **_conv(f"{name}.conv_out", outputs, width, 3, 3, 3),
    }


def vae_tensors(config: Mapping[str, Any], generator: torch.Generator) -> dict[str, Tensor]:
    """Returns random fp32 weights of ``vae/``: gammas in 0.5 to 1.5, convolutions of unit gain."""

    def draw(name: str, shape: tuple[int, ...]) -> Tensor:
        if name.endswith("gamma"):
            return 0.5 + torch.rand(shape, generator=generator)
        scale = torch.Size(shape[1:]).numel() ** -0.5 if len(shape) > 1 else 0.05
        return scale * torch.randn(shape, generator=generator)

    return {name: draw(name, shape) for name, shape in vae_shapes(config).items()}


TINY_SOUND: dict[str, Any] = {
    "_class_name": "Cosmos3AVAEAudioTokenizer",
    "dec_c_mults": [1, 2, 2, 2, 4],
    "dec_dim": 8,
    "dec_out_channels": 2,
    "dec_strides": [2, 4, 5, 6, 8],
    "dec_use_snake": True,
    "encoder_enabled": False,
    "sampling_rate": 48000,
    "snake_logscale": True,
    "stereo": True,
}


def sound_shapes(config: Mapping[str, Any]) -> Shapes:
    """Returns the shape of every tensor of ``sound_tokenizer/`` by its stored name."""
    widths = [config["dec_dim"] * factor for factor in reversed(config["dec_c_mults"])]
    shapes = _weight_norm("decoder.conv1", widths[0], config["vocoder_input_dim"], 7)
    strides = [*reversed(config["dec_strides"])]
    for index, (inputs, outputs) in enumerate(pairwise([*widths, config["dec_dim"]])):
        block = f"decoder.block.{index}"
        shapes |= _snake(f"{block}.snake1", inputs)
        # A transposed convolution stores its inputs first and has its norm over them.
        shapes |= _weight_norm(f"{block}.conv_t1", inputs, outputs, 2 * strides[index])
        shapes[f"{block}.conv_t1.bias"] = (outputs,)
        for unit in (f"{block}.res_unit{number}" for number in (1, 2, 3)):
            for number, kernel in ((1, 7), (2, 1)):
                shapes |= _snake(f"{unit}.snake{number}", outputs)
                shapes |= _weight_norm(f"{unit}.conv{number}", outputs, outputs, kernel)
    shapes |= _snake("decoder.snake1", config["dec_dim"])
    last = _weight_norm("decoder.conv2", config["dec_out_channels"], config["dec_dim"], 7)
    del last["decoder.conv2.bias"]
    return shapes | last


def _weight_norm(name: str, rows: int, columns: int, kernel: int) -> Shapes:
    return {
        f"{name}.bias": (rows,),
        f"{name}.weight_g": (rows, 1, 1),
        f"{name}.weight_v": (rows, columns, kernel),
    }


def _snake(name: str, width: int) -> Shapes:
    return {f"{name}.alpha": (1, width, 1), f"{name}.beta": (1, width, 1)}


def sound_tensors(
    width: int, generator: torch.Generator
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Returns the config of a tiny sound decoder for ``width`` channels, and its fp32 weights."""
    config = {**TINY_SOUND, "vocoder_input_dim": width}

    def draw(name: str, shape: tuple[int, ...]) -> Tensor:
        if name.endswith("weight_g"):
            return 0.5 + torch.rand(shape, generator=generator)
        return (1.0 if name.endswith("weight_v") else 0.1) * torch.randn(shape, generator=generator)

    return config, {name: draw(name, shape) for name, shape in sound_shapes(config).items()}
