"""The texts that Cosmos3 reads: instruction, viewpoint and format of the clip."""

import json
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from phyai.models.cosmos3.domains import Viewpoint

DROID_VIEWS = (
    "The top row is from the wrist-mounted camera. The bottom row contains two horizontally "
    "concatenated third-person perspective views of the scene from opposite sides, with the robot "
    "visible."
)
SYSTEM_IMAGE = "You are a helpful assistant who will generate images from a give prompt."
SYSTEM_VIDEO = "You are a helpful assistant who will generate videos from a give prompt."

_ASPECTS = {"1,1": 1.0, "4,3": 4 / 3, "3,4": 3 / 4, "16,9": 16 / 9, "9,16": 9 / 16}


class PromptStyle(StrEnum):
    """Whose habits text assembly follows where they differ."""

    NATIVE = "native"
    """The model owner's server: whole seconds, a space after a final full stop."""
    DIFFUSERS = "diffusers"
    """diffusers: real durations, final full stops replaced, inverse sentences when negative."""


@dataclass(frozen=True)
class ClipFormat:
    """What the texts say about the clip.

    Attributes:
        frames: pixel frames; 1 is a picture.
        fps: frames per second.
        height: pixels of the canvas, padding included.
        width: pixels of the canvas, padding included.
    """

    frames: int
    fps: float
    height: int
    width: int

    @property
    def seconds(self) -> float:
        """Duration."""
        return self.frames / self.fps


def plain_prompt(
    text: str,
    clip: ClipFormat,
    *,
    style: PromptStyle = PromptStyle.NATIVE,
    viewpoint: Viewpoint | None = None,
    views: str = "",
    negative: bool = False,
) -> str:
    """Returns a prompt with sentences about viewpoint, duration and resolution.

    Args:
        text: what the user wrote.
        clip: the clip's format.
        style: whose habits to follow.
        viewpoint: where the camera is, in action modes.
        views: further words about the views.
        negative: whether this is the negative prompt, which diffusers gives inverse sentences.
    """
    said = "is not" if negative else "is"
    sentences = [] if viewpoint is None else [viewpoint.sentence]
    sentences += [views] if views else []
    if clip.frames > 1:
        whole = style is PromptStyle.NATIVE
        seconds = float(int(clip.seconds)) if whole else clip.seconds
        sentences.append(
            f"The video {said} {seconds:.1f} seconds long and {said} of {clip.fps:.0f} FPS."
        )
    kind = "image" if clip.frames == 1 else "video"
    sentences.append(f"This {kind} {said} of {clip.height}x{clip.width} resolution.")
    for sentence in sentences:
        text = _joined(text, sentence, style)
    return text


def json_prompt(
    text: str,
    clip: ClipFormat,
    *,
    viewpoint: Viewpoint | None,
    views: str = "",
    idle_frame: int | None = None,
) -> str:
    """Returns the caption that action clips were trained with, as JSON; empty fields are left out.

    Args:
        text: the instruction; gets a full stop if it ends without one.
        clip: the clip's format.
        viewpoint: where the camera is.
        views: further words about the views.
        idle_frame: where the data set says that the robot stops moving.
    """
    description = text.strip()
    if description and not description.endswith((".", "!", "?")):
        description += "."
    framing = " ".join(part for part in (viewpoint.sentence if viewpoint else "", views) if part)
    minutes, seconds = divmod(round(clip.seconds), 60)
    action: dict[str, Any] = {"time": f"0:00-{minutes}:{seconds:02d}"}
    if description:
        action["description"] = description
    if idle_frame is not None:
        action["idle_frame"] = idle_frame
    caption: dict[str, Any] = {"cinematography": {"framing": framing}} if framing else {}
    ratio = clip.width / clip.height
    caption |= {
        "actions": [action],
        "duration": f"{int(clip.seconds)}s",
        "fps": float(clip.fps),
        "resolution": {"H": clip.height, "W": clip.width},
        "aspect_ratio": min(_ASPECTS, key=lambda name: abs(_ASPECTS[name] - ratio)),
    }
    return json.dumps(caption)


def is_json_caption(text: str) -> bool:
    """Returns whether a prompt is a JSON object, which gets no sentences appended."""
    if not text.lstrip().startswith("{"):
        return False
    try:
        return isinstance(json.loads(text), dict)
    except (ValueError, RecursionError):
        return False


def _joined(text: str, sentence: str, style: PromptStyle) -> str:
    if style is PromptStyle.DIFFUSERS:
        text = text.rstrip(".")
        return f"{text}. {sentence}" if text else sentence
    if not text:
        return sentence
    return f"{text} {sentence}" if text.endswith(".") else f"{text}. {sentence}"
