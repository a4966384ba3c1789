"""Turning a checkpoint, a preset and the user's choices into one settled specification."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from phyai.processing.cameras import CameraNames, short_name
from phyai.processing.detect import DetectedPreset, detect_preset
from phyai.processing.errors import ProcessingError
from phyai.processing.inputs import PolicyShape
from phyai.processing.lerobot import PREPROCESSOR, PROMPT_STEPS, LeRobotProcessors, read_lerobot
from phyai.processing.normalize import Normalizer, NormMode, NormSystem
from phyai.processing.presets import Preset, get_preset
from phyai.processing.prompt import PromptForm
from phyai.processing.resolve_norms import check_coverage, resolve_normalizers
from phyai.processing.stats import ACTION, STATE
from phyai.processing.tokenizer import PromptTokenizer, find_tokenizer, load_tokenizer

PI0 = "pi0"
_FAMILIES: Mapping[str, tuple[PromptForm, NormMode]] = {
    "pi05": (PromptForm.TASK_STATE, NormMode.QUANTILES),
    PI0: (PromptForm.TASK_NEWLINE, NormMode.MEAN_STD),
}


@dataclass(frozen=True)
class ProcessorSpec:
    """All decisions of one checkpoint's processing; nothing is looked up after this.

    Attributes:
        preset: The preset with its open fields filled in.
        reason: Why this preset.
        shape: Sizes of the checkpoint.
        cameras: Camera order and accepted names.
        prompt_form: What the prompt looks like.
        clean_task: Whether the task is cleaned before it is written into the prompt.
        max_length: Prompt slots.
        state_dim: Columns of the robot's state.
        any_state_dim: Whether narrower states are accepted: the checkpoint declares only the
            padded width.
        action_dim: Columns returned to the robot.
        delta_mask: Columns whose actions are offsets from the state; empty when none are.
        state_norm: Normaliser of the state.
        action_norm: Normaliser of the action.
        tokenizer: The checkpoint's tokenizer.
    """

    preset: Preset
    reason: str
    shape: PolicyShape
    cameras: CameraNames
    prompt_form: PromptForm
    clean_task: bool
    max_length: int
    state_dim: int
    any_state_dim: bool
    action_dim: int
    delta_mask: tuple[bool, ...]
    state_norm: Normalizer
    action_norm: Normalizer
    tokenizer: PromptTokenizer

    @property
    def reads_state(self) -> bool:
        """Whether the model reads the state, as text or as a vector."""
        return _reads_state(self.prompt_form, self.shape.family)

    @property
    def needs_state(self) -> bool:
        """Whether observations must carry a state."""
        return self.reads_state or any(self.delta_mask)


def resolve_processor(
    checkpoint_dir: Path,
    shape: PolicyShape,
    *,
    preset: str | Preset | None,
    stats: Path | None,
    tokenizer: Path | None,
    allow_identity_norm: bool,
) -> ProcessorSpec:
    """Settles every choice; the arguments are those of `PolicyProcessor.from_checkpoint`."""
    if shape.family not in _FAMILIES:
        raise ProcessingError(
            f"model family {shape.family!r} has no processing; allowed: {', '.join(_FAMILIES)}"
        )
    if not checkpoint_dir.is_dir():
        raise ProcessingError(f"checkpoint folder {checkpoint_dir} does not exist")
    chosen = _choose_preset(checkpoint_dir, preset)
    base = chosen.preset
    if base.family not in (None, shape.family):
        raise ProcessingError(
            f"preset {base.name!r} is for {base.family} but the checkpoint is {shape.family}; "
            f"choose another preset, such as those named openpi/{shape.family}_..., or derive one "
            "with dataclasses.replace"
        )
    files = _lerobot_files(checkpoint_dir, base)
    action_dim = base.action_dim or shape.action_dim
    state_dim = base.state_dim or shape.state_dim
    _check_widths(base, shape, state_dim, action_dim)
    form = _prompt_form(base, files, shape, checkpoint_dir)
    state_norm, action_norm = resolve_normalizers(
        checkpoint_dir,
        base,
        files,
        default_mode=_FAMILIES[shape.family][1],
        stats=stats,
        reads_state=_reads_state(form, shape.family),
        allow_identity_norm=allow_identity_norm,
    )
    check_coverage(action_norm, action_dim, shape.max_action_dim)
    named = files.tokenizer_name if files else None
    return ProcessorSpec(
        preset=base,
        reason=chosen.reason,
        shape=shape,
        cameras=_camera_names(base, shape, files.rename if files else {}),
        prompt_form=form,
        clean_task=not (shape.family == PI0 and base.system is NormSystem.LEROBOT),
        max_length=_max_length(files, shape, checkpoint_dir),
        state_dim=state_dim,
        any_state_dim=base.state_dim is None and shape.state_dim == shape.max_state_dim,
        action_dim=action_dim,
        delta_mask=_delta_mask(base, files, action_dim, state_dim),
        state_norm=state_norm,
        action_norm=action_norm,
        tokenizer=load_tokenizer(find_tokenizer(checkpoint_dir, override=tokenizer, named=named)),
    )


def _reads_state(form: PromptForm, family: str) -> bool:
    return form is PromptForm.TASK_STATE or family == PI0


def _choose_preset(checkpoint_dir: Path, preset: str | Preset | None) -> DetectedPreset:
    if preset is None:
        return detect_preset(checkpoint_dir)
    if isinstance(preset, Preset):
        return DetectedPreset(preset, "given as an object")
    return DetectedPreset(get_preset(preset), "asked for by name")


def _lerobot_files(checkpoint_dir: Path, preset: Preset) -> LeRobotProcessors | None:
    if preset.system is NormSystem.LEROBOT and (checkpoint_dir / PREPROCESSOR).is_file():
        return read_lerobot(checkpoint_dir)
    return None


def _prompt_form(
    preset: Preset, files: LeRobotProcessors | None, shape: PolicyShape, checkpoint_dir: Path
) -> PromptForm:
    if preset.prompt_form is not None:
        return preset.prompt_form
    if files is None:
        return _FAMILIES[shape.family][0]
    if files.prompt_form is None:
        raise ProcessingError(
            f"{checkpoint_dir / PREPROCESSOR} has no step that writes the prompt (allowed: "
            f"{', '.join(PROMPT_STEPS)}); give a preset with a prompt_form"
        )
    return files.prompt_form


def _check_widths(preset: Preset, shape: PolicyShape, state_dim: int, action_dim: int) -> None:
    for feature, dim, limit in (
        (STATE, state_dim, shape.max_state_dim),
        (ACTION, action_dim, shape.max_action_dim),
    ):
        if not 1 <= dim <= limit:
            raise ProcessingError(
                f"preset {preset.name!r}: the {feature} has {dim} columns but the model takes 1 to "
                f"{limit}; choose the preset of this checkpoint's robot"
            )


def _camera_names(preset: Preset, shape: PolicyShape, rename: Mapping[str, str]) -> CameraNames:
    cameras = preset.cameras or shape.cameras
    if len(cameras) > len(shape.cameras):
        raise ProcessingError(
            f"preset {preset.name!r} has {len(cameras)} cameras ({', '.join(cameras)}) but the "
            f"checkpoint has {len(shape.cameras)} ({', '.join(shape.cameras)})"
        )
    aliases = dict(preset.camera_aliases)
    for sent, trained in rename.items():
        if short_name(trained) in cameras:
            aliases[short_name(sent)] = short_name(trained)
    return CameraNames(cameras, aliases, preset.ignored_cameras)


def _max_length(files: LeRobotProcessors | None, shape: PolicyShape, checkpoint_dir: Path) -> int:
    if files is None or files.max_length is None:
        return shape.tokenizer_max_length
    if files.max_length > shape.tokenizer_max_length:
        raise ProcessingError(
            f"{checkpoint_dir / PREPROCESSOR}: tokenizer max_length is {files.max_length} but the "
            f"policy has {shape.tokenizer_max_length} prompt slots (tokenizer_max_length of "
            "config.json); make them equal"
        )
    return files.max_length


def _delta_mask(
    preset: Preset, files: LeRobotProcessors | None, action_dim: int, state_dim: int
) -> tuple[bool, ...]:
    if preset.delta_mask is not None:
        mask = preset.delta_mask
    elif files is not None and files.relative is not None:
        mask = files.relative.mask(action_dim)
    else:
        return ()
    width = max((column + 1 for column, relative in enumerate(mask) if relative), default=0)
    if width > min(action_dim, state_dim):
        raise ProcessingError(
            f"preset {preset.name!r}: action column {width - 1} is relative to the state, but the "
            f"state has {state_dim} columns and the action {action_dim}; exclude that joint"
        )
    return mask
