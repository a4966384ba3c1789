"""A VAE of random weights, made on the device without a checkpoint file."""

from phyai.checkpoints.slots import collect_slots, stored_shapes
from phyai.models.cosmos3.hashed import hashed_weight
from phyai.models.cosmos3.vae.config import WanVAEConfig
from phyai.models.cosmos3.vae.model import WanVAE


def tiny_config() -> WanVAEConfig:
    """Returns sizes that keep every layer and run in milliseconds on a CPU."""
    channels = range(6)
    return WanVAEConfig(
        z_dim=len(channels),
        base_dim=16,
        decoder_base_dim=24,
        latents_mean=tuple(0.1 * channel - 0.25 for channel in channels),
        latents_std=tuple(0.7 + 0.1 * channel for channel in channels),
    )


def fill(vae: WanVAE) -> WanVAE:
    """Fills a model on its device with weights that depend on their names alone; returns it."""
    slots = collect_slots(vae)
    for name, shape in stored_shapes(vae).items():
        slots[name].load(hashed_weight(name, shape, vae.device))
    return vae.eval()
