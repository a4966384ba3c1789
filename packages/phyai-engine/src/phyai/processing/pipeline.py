"""The processor of a policy: observations in, model inputs out; model actions in, robot units out.

It keeps no state between calls: what a robot's actions are relative to comes from the observations
that are passed again to `postprocess`, so sessions can be interleaved freely.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor

from phyai.processing.errors import ProcessingError
from phyai.processing.images import ABSENT_PIXEL, prepare_image
from phyai.processing.inputs import ModelInputs, Observation, PolicyShape
from phyai.processing.presets import Preset
from phyai.processing.prompt import PromptForm, StateTextDims, build_prompt, check_task
from phyai.processing.resolve import PI0, ProcessorSpec, resolve_processor
from phyai.processing.robots import decode_actions, decode_state, encode_actions

_EXAMPLE_TASK = "pick up the red block"


class PolicyProcessor:
    """Prepares a policy's inputs and decodes its actions, on the CPU.

    Attributes:
        spec: All decisions that were made for this checkpoint.
    """

    def __init__(self, spec: ProcessorSpec) -> None:
        self.spec = spec

    @classmethod
    def from_checkpoint(
        cls,
        checkpoint_dir: str | Path,
        shape: PolicyShape,
        *,
        preset: str | Preset | None = None,
        stats: Path | None = None,
        tokenizer: Path | None = None,
        allow_identity_norm: bool = False,
    ) -> Self:
        """Builds the processor of a checkpoint from its own files.

        Args:
            checkpoint_dir: Folder of the checkpoint.
            shape: Sizes of the checkpoint; a `PI05Config` fits.
            preset: Name of a preset or your own; None detects it.
            stats: Statistics to use instead of the checkpoint's (see `load_stats`).
            tokenizer: Tokenizer file or folder to use instead of the checkpoint's.
            allow_identity_norm: Whether missing statistics mean "do not normalise".

        Raises:
            ProcessingError: A file is missing or malformed, the preset can not be told, or
                statistics are missing or degenerate.
        """
        spec = resolve_processor(
            Path(checkpoint_dir),
            shape,
            preset=preset,
            stats=stats,
            tokenizer=tokenizer,
            allow_identity_norm=allow_identity_norm,
        )
        return cls(spec)

    def preprocess(self, observations: Sequence[Observation]) -> ModelInputs:
        """Turns B observations into one batch of model inputs.

        Args:
            observations: At least one observation, in robot units.

        Raises:
            ProcessingError: An observation lacks what the policy reads, or has it in another form.
        """
        if not observations:
            raise ProcessingError("no observation; pass at least one")
        spec = self.spec
        images, image_mask = self._images(observations)
        states = self._states(observations)
        normalized = None
        if states is not None and spec.reads_state:
            normalized = self._normalized(states)
        prompts = self._prompts([observation.task for observation in observations], normalized)
        tokens, token_mask = spec.tokenizer.encode_batch(prompts, spec.max_length)
        state = None
        if normalized is not None and spec.shape.family == PI0:
            state = torch.from_numpy(self._pad_state(normalized).astype(np.float32))
        return ModelInputs(
            images=images,
            image_mask=image_mask,
            tokens=tokens,
            token_mask=token_mask,
            state=state,
            prompts=tuple("".join(pieces) for pieces in prompts),
        )

    def postprocess(self, actions: Tensor, observations: Sequence[Observation]) -> np.ndarray:
        """Turns model actions into robot units.

        Args:
            actions: `[B, T, max_action_dim]` normalised actions, any float dtype and device.
            observations: The B observations that the actions answer, in the same order.

        Returns:
            float32 `[B, T, action_dim]`.

        Raises:
            ProcessingError: The shape does not fit, or relative actions have no state to add.
        """
        spec = self.spec
        expected = (len(observations), "T", spec.shape.max_action_dim)
        if actions.ndim != 3 or (actions.shape[0], actions.shape[2]) != (expected[0], expected[2]):
            raise ProcessingError(
                f"actions have shape {tuple(actions.shape)}, expected [B={expected[0]}, T, "
                f"max_action_dim={expected[2]}] for {expected[0]} observations"
            )
        values = spec.action_norm.inverse(actions.detach().to("cpu", torch.float64).numpy())
        values = self._shifted(values, observations, 1)
        robot_units = encode_actions(spec.preset.robot, values[..., : spec.action_dim])
        return np.ascontiguousarray(robot_units, dtype=np.float32)

    def normalize_actions(self, actions: np.ndarray, observation: Observation) -> np.ndarray:
        """Turns robot units into model actions, the way back of `postprocess`.

        Args:
            actions: `[T, action_dim]` in robot units.
            observation: What relative actions become relative to; only its state is read.

        Returns:
            float32 `[T, max_action_dim]`, zero in columns that the robot does not have.

        Raises:
            ProcessingError: The shape does not fit, or relative actions have no state.
        """
        spec = self.spec
        if actions.ndim != 2 or actions.shape[1] != spec.action_dim:
            raise ProcessingError(
                f"actions have shape {actions.shape}, expected [T, action_dim={spec.action_dim}] "
                "in the robot's units"
            )
        values = decode_actions(spec.preset.robot, actions)
        values = self._shifted(values[None], [observation], -1)[0]
        padded = np.zeros((len(actions), spec.shape.max_action_dim), np.float32)
        padded[:, : spec.action_dim] = spec.action_norm.restore(values)
        return padded

    def describe(self) -> dict[str, Any]:
        """Returns the decisions as plain values, with an example prompt at a mid-range state."""
        spec, preset = self.spec, self.spec.preset
        example = self._prompts([_EXAMPLE_TASK], np.zeros((1, spec.state_dim)))[0]
        return {
            "preset": preset.name,
            "preset_reason": spec.reason,
            "prompt_form": spec.prompt_form.value,
            "prompt_example": "".join(example),
            "prompt_slots": spec.max_length,
            "state_text_dims": preset.state_text_dims.value,
            "state_used": spec.reads_state,
            "resize": preset.resize.value,
            "pad_value": preset.pad_value,
            "cameras": list(spec.cameras.cameras),
            "camera_aliases": dict(spec.cameras.aliases),
            "state_dim": spec.state_dim,
            "action_dim": spec.action_dim,
            "delta_mask": list(spec.delta_mask),
            "robot": preset.robot.value,
            "state_normalization": spec.state_norm.mode.value,
            "state_statistics": spec.state_norm.source,
            "action_normalization": spec.action_norm.mode.value,
            "action_statistics": spec.action_norm.source,
            "tokenizer": str(spec.tokenizer.source),
        }

    def _images(self, observations: Sequence[Observation]) -> tuple[Tensor, Tensor]:
        spec, preset = self.spec, self.spec.preset
        height, width = spec.shape.image_resolution
        size = (len(observations), len(spec.cameras.cameras))
        # NumPy copies and converts on the calling thread alone: threads of torch that other
        # processes keep from running would hold a request up by milliseconds.
        images = np.full((*size, 3, height, width), ABSENT_PIXEL, dtype=np.float32)
        mask = torch.zeros(size, dtype=torch.bool)
        for row, observation in enumerate(observations):
            for column, frame in spec.cameras.assign(observation.images).items():
                images[row, column] = prepare_image(
                    frame,
                    (height, width),
                    resize=preset.resize,
                    pad_value=preset.pad_value,
                    name=spec.cameras.cameras[column],
                ).numpy()
                mask[row, column] = True
        return torch.from_numpy(images), mask

    def _states(self, observations: Sequence[Observation]) -> np.ndarray | None:
        """Returns float64 `[B, dims]` states in the convention of the model."""
        rows = [self._state(index, item.state) for index, item in enumerate(observations)]
        present = [row for row in rows if row is not None]
        if len(present) < len(rows):
            return None
        widths = sorted({row.shape[0] for row in present})
        if len(widths) > 1:
            raise ProcessingError(
                f"states of one batch have different widths {widths}; send one robot per batch"
            )
        return decode_state(self.spec.preset.robot, np.stack(present))

    def _state(self, index: int, state: np.ndarray | None) -> np.ndarray | None:
        spec = self.spec
        limit = f"{'at most ' if spec.any_state_dim else ''}{spec.state_dim}"
        if state is None:
            if spec.needs_state:
                raise ProcessingError(
                    f"observation {index} has no state; this policy reads {limit} columns"
                )
            return None
        values = np.asarray(state)
        if values.dtype.kind not in "fiu":
            raise ProcessingError(
                f"observation {index}: the state has dtype {values.dtype}, expected numbers"
            )
        width = values.shape[0] if values.ndim == 1 else 0
        fits = 1 <= width <= spec.state_dim if spec.any_state_dim else width == spec.state_dim
        if not fits:
            raise ProcessingError(
                f"observation {index}: the state has shape {values.shape}, expected one vector of "
                f"{limit} columns"
            )
        bad = np.flatnonzero(~np.isfinite(values))
        if bad.size:
            raise ProcessingError(
                f"observation {index}: state column {bad[0]} is {values[bad[0]]}; send finite "
                "joint readings"
            )
        return values.astype(np.float64)

    def _normalized(self, states: np.ndarray) -> np.ndarray:
        with np.errstate(over="ignore"):
            normalized = self.spec.state_norm.forward(states)
            bad = np.argwhere(~np.isfinite(normalized.astype(np.float32)))
        if len(bad):
            index, column = bad[0]
            raise ProcessingError(
                f"observation {index}: state column {column} is {states[index, column]:g}, which "
                "is beyond float32 when it is normalised; send joint readings in the units of "
                f"the statistics ({self.spec.state_norm.source})"
            )
        return normalized

    def _prompts(
        self, tasks: Sequence[str], normalized: np.ndarray | None
    ) -> list[tuple[str, ...]]:
        spec = self.spec
        for index, task in enumerate(tasks):
            check_task(index, task)
        text_states = normalized if spec.prompt_form is PromptForm.TASK_STATE else None
        if text_states is not None and spec.preset.state_text_dims is StateTextDims.PADDED:
            text_states = self._pad_state(text_states)
        rows = [None] * len(tasks) if text_states is None else list(text_states)
        return [
            build_prompt(spec.prompt_form, task, row, clean=spec.clean_task)
            for task, row in zip(tasks, rows, strict=True)
        ]

    def _shifted(
        self, actions: np.ndarray, observations: Sequence[Observation], sign: int
    ) -> np.ndarray:
        """Adds `sign` times the state to the columns of `[B, T, dims]` that are relative to it."""
        mask = self.spec.delta_mask
        if not any(mask):
            return actions
        states = self._states(observations)
        if states is None:
            raise ProcessingError("actions are relative to the state, but there is none")
        return _add_state(actions, sign * states, mask)

    def _pad_state(self, states: np.ndarray) -> np.ndarray:
        missing = self.spec.shape.max_state_dim - states.shape[-1]
        return np.pad(states, ((0, 0), (0, missing)))


def _add_state(actions: np.ndarray, states: np.ndarray, mask: tuple[bool, ...]) -> np.ndarray:
    """Adds `states[B, dims]` to the masked columns of `actions[B, T, dims]`."""
    columns = np.flatnonzero(mask)
    if columns[-1] >= states.shape[-1]:
        raise ProcessingError(
            f"action column {columns[-1]} is relative to the state, which has only "
            f"{states.shape[-1]} columns"
        )
    moved = actions.copy()
    moved[..., columns] += states[:, None, columns].astype(actions.dtype)
    return moved
