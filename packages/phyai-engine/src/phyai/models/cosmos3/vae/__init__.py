"""The Wan 2.2 VAE of Cosmos3: 16 x 16 pixels of 4 frames to 48 latent channels and back."""

from phyai.models.cosmos3.vae.config import WanVAEConfig
from phyai.models.cosmos3.vae.loading import load_vae
from phyai.models.cosmos3.vae.model import WanVAE
from phyai.models.cosmos3.vae.tiling import TileConfig

__all__ = ["TileConfig", "WanVAE", "WanVAEConfig", "load_vae"]
