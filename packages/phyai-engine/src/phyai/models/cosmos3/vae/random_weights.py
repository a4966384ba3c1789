"""A VAE of random weights, made on the device without a checkpoint file."""

import torch
from torch import Tensor

from phyai.checkpoints import collect_slots
from phyai.models.cosmos3.stored import stored_shapes
from phyai.models.cosmos3.vae.config import WanVAEConfig
from phyai.models.cosmos3.vae.model import WanVAE


def tiny_config() -> WanVAEConfig:
    """Returns sizes that keep every layer and run in milliseconds on a CPU."""
    count = 6
    return WanVAEConfig(
        z_dim=count,
        base_dim=16,
        decoder_base_dim=24,
        latents_mean=tuple(0.1 * index - 0.25 for index in range(count)),
        latents_std=tuple(0.7 + 0.1 * index for index in range(count)),
    )


def draw_tensor(name: str, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    """Draws one stored tensor: gammas in 0.5 to 1.5, biases near 0, convolutions of unit gain."""
    device = generator.device
    if name.endswith("gamma"):
        return 0.5 + torch.rand(shape, generator=generator, device=device)
    scale = torch.Size(shape[1:]).numel() ** -0.5 if len(shape) > 1 else 0.05
    return scale * torch.randn(shape, generator=generator, device=device)


def fill_randomly(vae: WanVAE, *, seed: int = 0) -> WanVAE:
    """Fills a model on its device with weights that depend on the seed alone, and returns it."""
    generator = torch.Generator(vae.device).manual_seed(seed)
    shapes, slots = stored_shapes(vae), collect_slots(vae)
    for name, shape in shapes.items():
        slots[name].load(draw_tensor(name, shape, generator))
    return vae.eval()
