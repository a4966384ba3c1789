"""Plans of the modes without actions: pictures and clips from text, pictures and clips."""

from torch import Tensor

from phyai.models.cosmos3.canvas import SPATIAL, cover_canvas, to_frames
from phyai.models.cosmos3.checks import check_count, check_kinds, check_rate
from phyai.models.cosmos3.plans import TEMPORAL, Plan, Setup, latent_frames
from phyai.models.cosmos3.prompts import (
    ClipFormat,
    PromptStyle,
    is_json_caption,
    plain_prompt,
)
from phyai.models.cosmos3.requests import (
    ImageToVideoRequest,
    TextToImageRequest,
    TextToVideoRequest,
    VideoToVideoRequest,
)
from phyai.models.cosmos3.sampler import Sampling
from phyai.models.cosmos3.state import Layout
from phyai.processing.errors import ProcessingError

IMAGE_SAMPLING = Sampling(50, 4.0, 3.0)
VIDEO_SAMPLING = Sampling(35, 6.0, 10.0)
CONTINUED = 1 + TEMPORAL
"""Pixel frames that a clip is continued from: two latent frames."""

_PICTURE_FPS = 24.0


def plan_image(request: TextToImageRequest, setup: Setup) -> Plan:
    """Plans a picture.

    Raises:
        ProcessingError: for a size that is no multiple of 16.
    """
    check_kinds(request)
    clip = ClipFormat(1, _PICTURE_FPS, request.height, request.width)
    prompt, negative = _texts(request, clip, setup)
    return Plan(
        prompt=prompt,
        negative=negative,
        system=setup.system(clip),
        layout=Layout(1, *_cells(clip), (), _PICTURE_FPS),
        sampling=request.sampling or IMAGE_SAMPLING,
        fps=_PICTURE_FPS,
    )


def plan_video(request: TextToVideoRequest, setup: Setup) -> Plan:
    """Plans a clip, from text alone or continuing a picture or a clip.

    Raises:
        ProcessingError: for a size, length or frame rate that is not allowed, bad pictures, or
            sound from a checkpoint without it.
    """
    check_kinds(request, "clip")
    clip = ClipFormat(request.frames, request.fps, request.height, request.width)
    check_rate("fps", request.fps)
    frames = latent_frames(request.frames)
    cells = _cells(clip)
    pixels = _given_pixels(request, setup)
    clean = 0 if pixels is None else latent_frames(pixels.shape[1])
    if frames <= clean or frames < 2:
        raise ProcessingError(
            f"frames is {request.frames}; allowed: 1 + a multiple of {TEMPORAL}, at least "
            f"{1 + TEMPORAL * max(clean, 1)} here"
        )
    prompt, negative = _texts(request, clip, setup)
    return Plan(
        prompt=prompt,
        negative=negative,
        system=setup.system(clip),
        layout=Layout(
            frames,
            *cells,
            tuple(range(clean)),
            request.fps,
            sound_frames=_sound_frames(request, setup),
        ),
        sampling=request.sampling or VIDEO_SAMPLING,
        fps=request.fps,
        pixels=pixels,
        cells=cells,
    )


def _sound_frames(request: TextToVideoRequest, setup: Setup) -> int:
    if not request.sound:
        return 0
    if setup.sound is None:
        raise ProcessingError(
            "sound is True but the pipeline has no sound decoder or the checkpoint no sound heads; "
            "leave sound out or load a checkpoint with sound_tokenizer/"
        )
    return setup.sound(request.frames, request.fps)


def _cells(clip: ClipFormat) -> tuple[int, int]:
    for name in ("height", "width"):
        check_count(name, getattr(clip, name), least=SPATIAL, step=SPATIAL)
    return clip.height // SPATIAL, clip.width // SPATIAL


def _given_pixels(request: TextToVideoRequest, setup: Setup) -> Tensor | None:
    if isinstance(request, ImageToVideoRequest):
        frames = to_frames([request.image], "image")
    elif isinstance(request, VideoToVideoRequest):
        if not isinstance(request.take, str) or request.take not in ("first", "last"):
            raise ProcessingError(f"take is {request.take!r}; allowed: first, last")
        if len(request.clip) < CONTINUED:
            raise ProcessingError(
                f"'clip' has {len(request.clip)} pictures; it must have at least {CONTINUED}"
            )
        first = request.take == "first"
        kept = request.clip[:CONTINUED] if first else request.clip[-CONTINUED:]
        frames = to_frames(kept, "clip")
    else:
        return None
    return cover_canvas(frames.to(setup.device), (request.height, request.width))


def _texts(
    request: TextToImageRequest | TextToVideoRequest, clip: ClipFormat, setup: Setup
) -> tuple[str, str]:
    """Returns the texts of both branches; the native negative text has no sentences."""
    prompt, negative = request.prompt, request.negative_prompt
    if not request.metadata:
        return prompt, negative
    if setup.style is PromptStyle.DIFFUSERS:
        return (
            plain_prompt(prompt, clip, style=setup.style),
            plain_prompt(negative, clip, style=setup.style, negative=True),
        )
    return (prompt if is_json_caption(prompt) else plain_prompt(prompt, clip)), negative
