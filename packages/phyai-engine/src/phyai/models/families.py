"""Which model family a checkpoint folder belongs to."""

from pathlib import Path


def detect_family(folder: Path | str) -> str:
    """Return the plugin that serves a folder: ``cosmos3_policy`` or ``pi05``.

    A folder in the layout of diffusers, with ``transformer/`` and ``vae/``, is Cosmos3's.
    """
    folder = Path(folder)
    diffusers = (folder / "transformer" / "config.json").is_file() and (folder / "vae").is_dir()
    return "cosmos3_policy" if diffusers else "pi05"
