"""Guessing a checkpoint's preset from its files, with the reason in words."""

from dataclasses import dataclass
from pathlib import Path

from phyai.processing.errors import ProcessingError
from phyai.processing.json_reader import read_json
from phyai.processing.lerobot import PREPROCESSOR, read_lerobot
from phyai.processing.openpi import asset_files
from phyai.processing.presets import PRESETS, Preset, get_preset

_HORIZON_HINTS = {10: "openpi/pi05_libero", 15: "openpi/pi05_droid", 16: "openpi/pi05_droid"}


@dataclass(frozen=True)
class DetectedPreset:
    """A preset and why it was chosen."""

    preset: Preset
    reason: str


def detect_preset(checkpoint_dir: Path) -> DetectedPreset:
    """Chooses the preset of a checkpoint.

    LeRobot's processor files decide first, then LeRobot's `config.json`, then the robot whose
    openpi statistics lie beside the weights, then the folder's name.

    Args:
        checkpoint_dir: The checkpoint.

    Raises:
        ProcessingError: Nothing tells, or several robots fit; the message lists presets and hints.
    """
    if (checkpoint_dir / PREPROCESSOR).is_file():
        return _from_processors(checkpoint_dir)
    config_file = checkpoint_dir / "config.json"
    config = read_json(config_file) if config_file.is_file() else None
    if config is not None and "type" in config:
        kind = config.get("type", str)
        return DetectedPreset(
            get_preset("lerobot"),
            f"{config_file} has LeRobot's type {kind!r}; there is no {PREPROCESSOR}",
        )
    horizon = config.get("action_horizon", int, None) if config is not None else None
    return _from_openpi(checkpoint_dir, horizon)


def _from_processors(checkpoint_dir: Path) -> DetectedPreset:
    processors = read_lerobot(checkpoint_dir)
    file = checkpoint_dir / PREPROCESSOR
    if processors.pads_state:
        return DetectedPreset(
            get_preset("lerobot-0.4"),
            f"{file} declares max_state_dim in its prompt step: LeRobot up to 0.4.4 padded the "
            "state before writing it into the prompt",
        )
    return DetectedPreset(
        get_preset("lerobot"),
        f"{file} exists; if the checkpoint was trained with LeRobot up to 0.4.4, choose "
        "'lerobot-0.4' (padded state in the prompt, letterbox -3)",
    )


def _from_openpi(checkpoint_dir: Path, horizon: int | None) -> DetectedPreset:
    assets = asset_files(checkpoint_dir)
    fits = {
        preset.name: asset_id
        for preset in PRESETS.values()
        for asset_id in preset.asset_ids
        # The files name the robot and not the family: π0 must be named.
        if asset_id in assets and preset.family != "pi0"
    }
    folder = checkpoint_dir.resolve().name
    named = [name for name in PRESETS if name.startswith("openpi/") and name[7:] in folder]
    if len(named) == 1 and (not fits or set(get_preset(named[0]).asset_ids) & set(fits.values())):
        return DetectedPreset(get_preset(named[0]), f"the folder is named {folder!r}")
    if len(fits) == 1:
        name, asset_id = next(iter(fits.items()))
        return DetectedPreset(get_preset(name), f"statistics of {asset_id!r}: {assets[asset_id]}")
    hints = [f"statistics of {name!r} at {file}" for name, file in assets.items()]
    if horizon is not None:
        likely = _HORIZON_HINTS.get(horizon)
        hints.append(f"action_horizon {horizon}" + (f" is that of {likely!r}" if likely else ""))
    found = "; ".join(hints) or f"no {PREPROCESSOR}, no config.json with a type, no assets"
    raise ProcessingError(
        f"{checkpoint_dir} does not tell how its inputs were prepared ({found}); pass a preset: "
        f"{', '.join(PRESETS)}"
    )
