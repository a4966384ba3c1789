"""Choosing modes, epsilons and statistics of a checkpoint's state and action."""

import dataclasses
import logging
from pathlib import Path

from phyai.processing.errors import ProcessingError
from phyai.processing.json_reader import JsonObject, read_json
from phyai.processing.lerobot import (
    DEFAULT_EPS,
    PREPROCESSOR,
    FeatureNorm,
    LeRobotProcessors,
    parse_mode,
)
from phyai.processing.normalize import (
    Normalizer,
    NormMode,
    NormSystem,
    build_normalizer,
    identity,
)
from phyai.processing.openpi import find_norm_stats, search_order
from phyai.processing.presets import Preset
from phyai.processing.stats import ACTION, STATE, load_stats

logger: logging.Logger = logging.getLogger(__name__)


def resolve_normalizers(
    checkpoint_dir: Path,
    preset: Preset,
    files: LeRobotProcessors | None,
    *,
    default_mode: NormMode,
    stats: Path | None,
    reads_state: bool,
    allow_identity_norm: bool,
) -> tuple[Normalizer, Normalizer]:
    """Builds the normalizers of state and action.

    Args:
        checkpoint_dir: The checkpoint.
        preset: Its preset; modes and epsilon that it fixes win over the files.
        files: LeRobot's processor files, None when there are none.
        default_mode: Mode of the model family when neither preset nor files name one.
        stats: Statistics given by the user, used instead of the checkpoint's.
        reads_state: Whether the model reads the state; if not, it needs no statistics.
        allow_identity_norm: Whether missing statistics mean "do not normalise".

    Raises:
        ProcessingError: Statistics are missing, malformed or degenerate.
    """
    if preset.system is None:
        return _unscaled(STATE, NormSystem.LEROBOT), _unscaled(ACTION, NormSystem.LEROBOT)
    if files is None:
        state, action = _without_files(checkpoint_dir, preset, default_mode, stats)
    elif stats is None:
        state, action = files.state, files.action
    else:
        given = load_stats(stats)
        state, action = (
            dataclasses.replace(norm, stats=given.get(feature), searched=str(stats))
            for feature, norm in ((STATE, files.state), (ACTION, files.action))
        )
    return (
        _build(STATE, state, preset.state_mode, preset, allow_identity_norm)
        if reads_state
        else _unscaled(STATE, preset.system),
        _build(ACTION, action, preset.action_mode, preset, allow_identity_norm),
    )


def check_coverage(normalizer: Normalizer, action_dim: int, max_action_dim: int) -> None:
    """Demands statistics for every column returned to the robot.

    Only a policy that declares the padded width may return more columns than there are statistics;
    those stay normalised, and a warning is logged.

    Raises:
        ProcessingError: The robot has more action columns than the statistics.
    """
    if normalizer.mode is NormMode.IDENTITY or normalizer.width >= action_dim:
        return
    message = (
        f"{normalizer.source}: statistics of the action cover {normalizer.width} columns but the "
        f"policy returns {action_dim}"
    )
    if action_dim < max_action_dim:
        raise ProcessingError(f"{message}; pass the statistics of this robot")
    logger.warning("%s; the columns beyond stay normalised", message)


def _unscaled(feature: str, system: NormSystem) -> Normalizer:
    return identity(feature, system, "not normalised by this preset")


def _without_files(
    checkpoint_dir: Path, preset: Preset, default_mode: NormMode, stats: Path | None
) -> tuple[FeatureNorm, FeatureNorm]:
    searched = str(checkpoint_dir / PREPROCESSOR)
    path = stats
    if path is None and preset.system is NormSystem.OPENPI:
        path = find_norm_stats(checkpoint_dir, preset.asset_ids)
        searched = ", ".join(search_order(checkpoint_dir))
    loaded = load_stats(path) if path else {}
    searched = str(path) if path else searched
    state_mode, action_mode = _declared_modes(checkpoint_dir, default_mode)
    return (
        FeatureNorm(state_mode, DEFAULT_EPS, loaded.get(STATE), searched),
        FeatureNorm(action_mode, DEFAULT_EPS, loaded.get(ACTION), searched),
    )


def _declared_modes(checkpoint_dir: Path, default: NormMode) -> tuple[NormMode, NormMode]:
    """Modes of `normalization_mapping` in config.json, else the default."""
    file = checkpoint_dir / "config.json"
    config = read_json(file) if file.is_file() else JsonObject({}, file)
    mapping = config.child("normalization_mapping", optional=True)
    state, action = (
        parse_mode(mapping.get(kind, str, default.value), mapping.where(kind))
        for kind in ("STATE", "ACTION")
    )
    return state, action


def _build(
    feature: str,
    norm: FeatureNorm,
    mode: NormMode | None,
    preset: Preset,
    allow_identity_norm: bool,
) -> Normalizer:
    mode = mode or norm.mode
    if allow_identity_norm and norm.stats is None and mode is not NormMode.IDENTITY:
        logger.warning("the %s is not normalised: no statistics in %s", feature, norm.searched)
    return build_normalizer(
        feature,
        mode,
        norm.stats,
        system=preset.system or NormSystem.LEROBOT,
        eps=norm.eps if preset.eps is None else preset.eps,
        searched=norm.searched,
        allow_identity_norm=allow_identity_norm,
    )
