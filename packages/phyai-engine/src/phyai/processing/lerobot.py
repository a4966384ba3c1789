"""LeRobot's processor files: what a checkpoint does before and after its model.

Reads `policy_preprocessor.json`, `policy_postprocessor.json` and the state files that they name.
"""

import logging
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from phyai.processing.errors import ProcessingError
from phyai.processing.json_reader import JsonObject, check_type, read_json
from phyai.processing.normalize import FeatureStats, NormMode
from phyai.processing.prompt import PromptForm
from phyai.processing.stats import ACTION, STATE, load_state_file

logger: logging.Logger = logging.getLogger(__name__)

PREPROCESSOR = "policy_preprocessor.json"
POSTPROCESSOR = "policy_postprocessor.json"
DEFAULT_EPS = 1e-8
STATE_KEY = "observation.state"

_RENAME = "rename_observations_processor"
_RELATIVE = "relative_actions_processor"
_ABSOLUTE = "absolute_actions_processor"
_NORMALIZER = "normalizer_processor"
_UNNORMALIZER = "unnormalizer_processor"
_PI05_PROMPT = "pi05_prepare_state_tokenizer_processor_step"
_PI0_PROMPT = "pi0_new_line_processor"
_TOKENIZER = "tokenizer_processor"
_PASSIVE = ("to_batch_processor", "device_processor")
PROMPT_STEPS = (_PI05_PROMPT, _PI0_PROMPT)
PRE_STEPS = (_RENAME, _RELATIVE, _NORMALIZER, *PROMPT_STEPS, _TOKENIZER, *_PASSIVE)
POST_STEPS = (_UNNORMALIZER, _ABSOLUTE, *_PASSIVE)


@dataclass(frozen=True)
class FeatureNorm:
    """How one feature is normalised: its mode, epsilon and statistics, if there are any."""

    mode: NormMode
    eps: float
    stats: FeatureStats | None
    searched: str


@dataclass(frozen=True)
class RelativeActions:
    """Actions are offsets from the current state, except for the named joints.

    Attributes:
        exclude_joints: Parts of joint names whose actions are absolute.
        action_names: Joint names of the action columns; None when the file does not tell.
    """

    exclude_joints: tuple[str, ...]
    action_names: tuple[str, ...] | None

    def mask(self, action_dim: int) -> tuple[bool, ...]:
        """Returns per action column whether the state is added; unnamed columns are relative."""
        excluded = [name.lower() for name in self.exclude_joints if name]
        names = [name.lower() for name in (self.action_names or ())[:action_dim]]
        named = tuple(not any(part in name for part in excluded) for name in names)
        return named + (True,) * (action_dim - len(named))


@dataclass(frozen=True)
class LeRobotProcessors:
    """The facts of both processor files.

    Attributes:
        rename: Observation key as sent to observation key as trained.
        state: Normalisation of the state.
        action: Normalisation of the action.
        relative: Set when the model predicts offsets that are made absolute afterwards.
        prompt_form: Form that the steps write; None when no step writes one.
        pads_state: Whether the prompt step declares the zero-padded state of old versions.
        tokenizer_name: Hub name or path of the tokenizer, None when absent.
        max_length: Prompt slots, None when absent.
    """

    rename: dict[str, str]
    state: FeatureNorm
    action: FeatureNorm
    relative: RelativeActions | None
    prompt_form: PromptForm | None
    pads_state: bool
    tokenizer_name: str | None
    max_length: int | None


@dataclass(frozen=True)
class _Step:
    name: str
    config: JsonObject
    state_file: Path | None
    described: str


@dataclass(frozen=True)
class _Steps:
    file: Path
    steps: tuple[_Step, ...] = field(default=())

    def find(self, name: str) -> _Step | None:
        found = [step for step in self.steps if step.name == name]
        if len(found) > 1:
            raise ProcessingError(f"{self.file}: {name} appears {len(found)} times, expected once")
        return found[0] if found else None

    def require(self, name: str) -> _Step:
        step = self.find(name)
        if step is None:
            names = ", ".join(s.name for s in self.steps) or "none"
            raise ProcessingError(f"{self.file}: step {name} is missing; found: {names}")
        return step


def read_lerobot(checkpoint_dir: Path) -> LeRobotProcessors:
    """Reads the processor files of a LeRobot checkpoint.

    Args:
        checkpoint_dir: Folder with both JSON files and their state files.

    Raises:
        ProcessingError: A file is missing or malformed, or holds a step that is not known.
    """
    pre = _read_steps(checkpoint_dir / PREPROCESSOR, PRE_STEPS)
    post = _read_steps(checkpoint_dir / POSTPROCESSOR, POST_STEPS)
    rename, tokenizer = pre.find(_RENAME), pre.find(_TOKENIZER)
    pi05, pi0 = pre.find(_PI05_PROMPT), pre.find(_PI0_PROMPT)
    if pi05 and pi0:
        raise ProcessingError(f"{pre.file}: steps {_PI05_PROMPT} and {_PI0_PROMPT} exclude another")
    form = PromptForm.TASK_STATE if pi05 else PromptForm.TASK_NEWLINE if pi0 else None
    name, max_length = _read_tokenizer(tokenizer) if tokenizer else (None, None)
    return LeRobotProcessors(
        rename=_read_rename(rename) if rename else {},
        state=_read_norm(pre.require(_NORMALIZER), "STATE", STATE),
        action=_read_norm(post.require(_UNNORMALIZER), "ACTION", ACTION),
        relative=_read_relative(pre, post),
        prompt_form=form,
        pads_state=pi05 is not None and "max_state_dim" in pi05.config,
        tokenizer_name=name,
        max_length=max_length,
    )


def parse_mode(value: str, where: str) -> NormMode:
    """Returns the mode of that name; an unknown one is a ProcessingError."""
    try:
        return NormMode(value)
    except ValueError:
        allowed = ", ".join(NormMode)
        raise ProcessingError(f"{where} is {value!r}; allowed: {allowed}") from None


def _read_steps(file: Path, known: tuple[str, ...]) -> _Steps:
    root = read_json(file)
    steps = []
    for index, entry in enumerate(root.get("steps", list)):
        where = f"steps[{index}]"
        check_type(entry, dict, root.where(where))
        steps.append(_read_step(JsonObject(entry, file, where), known))
    return _Steps(file, tuple(steps))


def _read_step(entry: JsonObject, known: tuple[str, ...]) -> _Step:
    name = entry.get("registry_name", str)
    if name not in known:
        raise ProcessingError(
            f"{entry.where('registry_name')}: unknown processor step {name!r}; known: "
            f"{', '.join(sorted(known))}. A step that changes data can not be skipped: remove it "
            "if it does not matter for inference"
        )
    state_name = entry.get("state_file", str, None)
    state_file = None
    if state_name is not None:
        if Path(state_name).name != state_name:
            raise ProcessingError(
                f"{entry.where('state_file')} is {state_name!r}; it must be the name of a file "
                "beside the JSON"
            )
        state_file = entry.file.parent / state_name
    return _Step(name, entry.child("config", optional=True), state_file, entry.where(name))


def _read_rename(step: _Step) -> dict[str, str]:
    table = step.config.child("rename_map", optional=True)
    return {key: table.get(key, str) for key in table.values}


def _read_norm(step: _Step, kind: str, feature: str) -> FeatureNorm:
    config = step.config
    norm_map = config.child("norm_map")
    modes: dict[str, NormMode] = {
        key: parse_mode(norm_map.get(key, str), norm_map.where(key)) for key in norm_map.values
    }
    if modes.get("VISUAL", NormMode.IDENTITY) is not NormMode.IDENTITY:
        raise ProcessingError(
            f"{norm_map.where('VISUAL')} is {modes['VISUAL']}; images are only scaled to [-1, 1], "
            "allowed: IDENTITY"
        )
    mode = modes.get(kind, NormMode.IDENTITY)
    only = config.strings("normalize_observation_keys")
    if feature == STATE and only is not None and STATE_KEY not in only:
        mode = NormMode.IDENTITY
    stats = load_state_file(step.state_file) if step.state_file else {}
    searched = (
        str(step.state_file) if step.state_file else f"{step.described}, which names no state_file"
    )
    eps = float(config.get("eps", float, DEFAULT_EPS))
    return FeatureNorm(mode, eps, stats.get(feature), searched)


def _read_relative(pre: _Steps, post: _Steps) -> RelativeActions | None:
    relative, absolute = pre.find(_RELATIVE), post.find(_ABSOLUTE)
    predicts_offsets = relative is not None and relative.config.get("enabled", bool, False)
    made_absolute = absolute is not None and absolute.config.get("enabled", bool, False)
    if not made_absolute:
        if predicts_offsets:
            logger.warning(
                "%s enables %s but %s does not enable %s: actions are returned as offsets",
                pre.file,
                _RELATIVE,
                post.file,
                _ABSOLUTE,
            )
        return None
    if relative is None:
        raise ProcessingError(
            f"{post.file}: {_ABSOLUTE} is enabled but {pre.file} has no {_RELATIVE}, which names "
            "the joints that stay absolute"
        )
    config = relative.config
    return RelativeActions(
        exclude_joints=config.strings("exclude_joints", ()) or (),
        action_names=config.strings("action_names"),
    )


def _read_tokenizer(step: _Step) -> tuple[str | None, int | None]:
    config = step.config
    side: Any = config.get("padding_side", str, "right")
    if side != "right":
        raise ProcessingError(f"{config.where('padding_side')} is {side!r}; allowed: right")
    max_length = config.get("max_length", int, None)
    if max_length is not None and max_length < 1:
        raise ProcessingError(f"{config.where('max_length')} is {max_length}; it must be positive")
    return config.get("tokenizer_name", str, None), max_length
