"""From ``sound_tokenizer/`` of a checkpoint to a ready decoder."""

from pathlib import Path

import torch

from phyai.checkpoints import CheckpointError, CheckpointReader, load_into
from phyai.checkpoints.json_file import read_json_object
from phyai.models.cosmos3.sound.decoder import SoundDecoder


def load_sound_decoder(
    directory: Path | str,
    *,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
) -> SoundDecoder:
    """Loads the decoder from ``config.json`` and safetensors files.

    Tensors of the sound encoder are not read; every other one is accounted for.

    Args:
        directory: the folder ``sound_tokenizer`` of a checkpoint.
        dtype: of weights and activations.
        device: where the decoder lives.

    Raises:
        CheckpointError: if files or tensors are missing, unexpected or do not fit.
    """
    directory = Path(directory)

    def canonical(name: str) -> str | None:
        return None if name.startswith("encoder.") else name

    values = read_json_object(directory / "config.json")
    reader = CheckpointReader(directory, canonical, stem="diffusion_pytorch_model")
    try:
        decoder = SoundDecoder.from_config(values, dtype=dtype, device=device)
    except ValueError as error:
        raise CheckpointError(f"{directory / 'config.json'}: {error}") from error
    # A GPU casts faster than the host.
    place = device if torch.device(device).type == "cuda" else "cpu"
    load_into(decoder, reader.tensors(place), source=str(directory))
    return decoder.eval()
