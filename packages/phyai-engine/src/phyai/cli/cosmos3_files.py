"""Captions, clips, actions and statistics from files; clips, pictures and actions into files."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from phyai.cli.errors import CliError

if TYPE_CHECKING:
    import numpy as np

_MOST_CAPTION = 1 << 20


def read_text(value: str) -> str:
    """Return a text as it was typed, or the contents of the file behind ``@``.

    Raises:
        CliError: The file is missing, too long or no text.
    """
    if not value.startswith("@"):
        return value
    path = Path(value[1:]).expanduser()
    if not path.is_file():
        raise CliError(f"text file {path} does not exist", "a text that begins with @ names a file")
    if path.stat().st_size > _MOST_CAPTION:
        raise CliError(f"text file {path} is longer than {_MOST_CAPTION} bytes")
    try:
        return path.read_text(encoding="utf-8").strip()
    except UnicodeDecodeError:
        raise CliError(f"text file {path} is not in UTF-8") from None


def read_clip(path: Path, *, most: int | None = None) -> "np.ndarray":
    """Return the frames of a video file, or of a folder of pictures in the order of their names.

    Args:
        path: File or folder.
        most: Frames to read; None reads all.

    Returns:
        uint8 [T, H, W, 3].

    Raises:
        CliError: The folder holds no pictures, or pictures of several sizes.
        ProcessingError: The video cannot be read.
    """
    import numpy as np

    from phyai.cli.images import read_image
    from phyai.processing.video import read_video

    path = path.expanduser()
    if not path.is_dir():
        return read_video(path, most=most).frames
    files = sorted(file for file in path.iterdir() if file.suffix.lower() in (".png", ".jpg"))
    if not files:
        raise CliError(f"{path} holds no .png or .jpg", "give a video file or a folder of pictures")
    frames = [read_image(file) for file in files[:most]]
    sizes = {frame.shape for frame in frames}
    if len(sizes) > 1:
        raise CliError(f"{path} holds pictures of several sizes: {sorted(sizes)}")
    return np.stack(frames)


def read_actions(path: Path) -> "np.ndarray":
    """Return actions [T, columns] of a .npy, .npz (key ``actions``), .csv or .json file.

    Raises:
        CliError: The file is missing, of another form, or holds no matrix of finite numbers.
    """
    import numpy as np

    path = path.expanduser()
    if not path.is_file():
        raise CliError(f"actions {path} do not exist", "give a .npy, .npz, .csv or .json file")
    readers = {".npy": _npy, ".npz": _npz, ".csv": _csv, ".json": _json}
    reader = readers.get(path.suffix.lower())
    if reader is None:
        raise CliError(f"actions {path} end in {path.suffix!r}", f"use {', '.join(readers)}")
    try:
        actions = np.asarray(reader(path), dtype=np.float64)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CliError(f"actions {path} cannot be read: {error}") from None
    if actions.ndim != 2 or not actions.size or not np.isfinite(actions).all():
        raise CliError(
            f"actions {path} have shape {actions.shape}", "give finite numbers [actions, columns]"
        )
    return actions


def _npy(path: Path) -> Any:
    import numpy as np

    return np.load(path, allow_pickle=False)


def _npz(path: Path) -> Any:
    import numpy as np

    with np.load(path, allow_pickle=False) as arrays:
        return arrays["actions"]


def _csv(path: Path) -> Any:
    import numpy as np

    return np.loadtxt(path, delimiter=",", ndmin=2)


def _json(path: Path) -> Any:
    value = json.loads(path.read_text(encoding="utf-8"))
    return value["actions"] if isinstance(value, dict) else value


def read_normalizer(stats: Path | None, kind: str | None) -> Any:
    """Return the map between a robot's units and the model's, or None without either option.

    Raises:
        CliError: One of the options is missing, or the file is no JSON object.
        ProcessingError: The statistics cannot be used.
    """
    if stats is None and kind is None:
        return None
    if stats is None or kind is None:
        raise CliError(
            "--stats and --normalization belong together",
            "give the statistics of the actions and how they scale them, or neither",
        )
    from phyai.models.cosmos3.normalizers import ActionNormalizer
    from phyai.processing.json_reader import read_json

    return ActionNormalizer.from_statistics(kind, read_json(stats.expanduser()).values)


def is_folder(path: Path) -> bool:
    """Return whether a clip goes into a folder of pictures instead of a video file."""
    return path.is_dir() or not path.suffix


def check_clip_target(path: Path) -> None:
    """Check, before the work begins, that a clip can be written.

    Raises:
        CliError: The folder above it does not exist.
        ProcessingError: PyAV is missing or the suffix is unknown.
    """
    from phyai.processing.video import check_target

    path = path.expanduser()
    if not is_folder(path):
        check_target(path)
    elif not path.resolve().parent.is_dir():
        raise CliError(f"{path}: the folder {path.parent} does not exist", "create it first")


def write_clip(path: Path, result: Any) -> None:
    """Write a result's frames, and its sound where it has one.

    Args:
        path: Video file; or folder, which gets ``0000.png``, ... and ``sound.wav``.
        result: With ``frames``, ``fps``, and perhaps ``sound`` and ``sample_rate``.
    """
    from phyai.processing.video import write_video, write_wav

    path = path.expanduser()
    sound = getattr(result, "sound", None)
    rate = getattr(result, "sample_rate", 0)
    if not is_folder(path):
        write_video(path, result.frames, result.fps, sound=sound, sample_rate=rate)
        return
    path.mkdir(exist_ok=True)
    for index, frame in enumerate(result.frames):
        write_picture(path / f"{index:04d}.png", frame)
    if sound is not None:
        write_wav(path / "sound.wav", sound, rate)


def write_picture(path: Path, pixels: "np.ndarray") -> None:
    """Write uint8 [H, W, 3] in the form that the suffix says."""
    from PIL import Image

    Image.fromarray(pixels).save(path.expanduser())


def check_picture_target(path: Path) -> None:
    """Check, before the work begins, that a picture can be written.

    Raises:
        CliError: Another suffix, or the folder does not exist.
    """
    if path.suffix.lower() not in (".png", ".jpg", ".jpeg"):
        raise CliError(f"{path} does not end in .png or .jpg", "the suffix says how it is stored")
    if not path.expanduser().resolve().parent.is_dir():
        raise CliError(f"{path}: the folder {path.parent} does not exist", "create it first")


def write_actions(path: Path, result: Any) -> None:
    """Save ``actions``, ``normalized``, ``prompt`` and ``seed``."""
    import numpy as np

    with path.expanduser().open("wb") as file:
        np.savez(
            file,
            actions=result.actions,
            normalized=result.normalized,
            prompt=np.array(result.prompt),
            seed=np.array(result.seed),
        )
