"""Which model family a checkpoint folder belongs to."""

from pathlib import Path


def detect_family(folder: Path | str) -> str:
    """Return the plugin that serves a folder: ``cosmos3_policy`` or ``pi05``.

    A folder in the layout of diffusers, with ``transformer/`` and ``vae/``, is Cosmos3's.
    """
    return "cosmos3_policy" if _is_cosmos3(Path(folder)) else "pi05"


def kernel_family(folder: Path | str) -> str:
    """Return what kernel policies call the family of a folder: ``cosmos3`` or ``pi05``."""
    return "cosmos3" if _is_cosmos3(Path(folder)) else "pi05"


def weights_folder(folder: Path | str) -> Path:
    """Return the folder whose config says how the large weights are quantized."""
    folder = Path(folder)
    return folder / "transformer" if _is_cosmos3(folder) else folder


def _is_cosmos3(folder: Path) -> bool:
    return (folder / "transformer" / "config.json").is_file() and (folder / "vae").is_dir()
