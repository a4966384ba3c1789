"""From ``vae/`` of a checkpoint to a ready model."""

from collections.abc import Sequence
from pathlib import Path

import torch

from phyai.checkpoints import CheckpointError, CheckpointReader, load_into
from phyai.checkpoints.json_file import read_json_object
from phyai.models.cosmos3.vae.convs import Layout
from phyai.models.cosmos3.vae.model import PARTS, Part, WanVAE
from phyai.models.cosmos3.vae.tiling import TileConfig

_OWNER = {
    "encoder": "encoder",
    "quant_conv": "encoder",
    "decoder": "decoder",
    "post_quant_conv": "decoder",
}


def load_vae(
    directory: Path | str,
    *,
    parts: Sequence[Part] = PARTS,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    layout: Layout = "volume",
    tiling: TileConfig | None = None,
) -> WanVAE:
    """Loads the VAE, or one part of it, from ``config.json`` and safetensors files.

    Tensors of a part that is not asked for are not read; every other one is accounted for.

    Args:
        directory: the folder ``vae`` of a checkpoint.
        parts: what to load; the encoder alone is a fifth of the weights.
        dtype: of weights and activations.
        device: where the model lives.
        layout: how convolutions over time are computed, see `Build`.
        tiling: decode in overlapping tiles.

    Raises:
        CheckpointError: if files or tensors are missing, unexpected or do not fit.
    """
    directory = Path(directory)

    def canonical(name: str) -> str | None:
        owner = _OWNER.get(name.partition(".")[0])
        return None if owner is not None and owner not in parts else name

    values = read_json_object(directory / "config.json")
    reader = CheckpointReader(directory, canonical, stem="diffusion_pytorch_model")
    try:
        vae = WanVAE.from_config(
            values,
            parts=parts,
            dtype=dtype,
            device=device,
            layout=layout,
            tiling=tiling,
        )
    except ValueError as error:
        raise CheckpointError(f"{directory / 'config.json'}: {error}") from error
    # A GPU casts faster than the host.
    place = device if torch.device(device).type == "cuda" else "cpu"
    load_into(vae, reader.tensors(place), source=str(directory))
    return vae.eval()
