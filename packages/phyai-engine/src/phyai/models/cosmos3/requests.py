"""What can be asked of Cosmos3: one frozen dataclass per mode.

Pictures are RGB, uint8 or floats in [0, 1], ``[H, W, 3]`` or ``[3, H, W]``; clips stack them along
a leading axis. Everything that needs the checkpoint to judge is checked by the pipeline.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from phyai.models.cosmos3.domains import Viewpoint
from phyai.models.cosmos3.noise import NoiseKind
from phyai.models.cosmos3.normalizers import ActionNormalizer
from phyai.models.cosmos3.sampler import Sampling


@dataclass(frozen=True, eq=False, kw_only=True)
class _Request:
    """What all requests share.

    Attributes:
        prompt: the instruction, or the caption of what to generate.
        sampling: overrides the defaults of the mode.
        seed: of the noise, 0 to 2**32 - 1. None: the mode's default, which for `PolicyRequest` is
            a fresh number of the pipeline's stream.
        noise: which generator draws the noise; ``native`` is that of the model owner's server.
        return_latents: whether to return the video latents.
    """

    prompt: str
    sampling: Sampling | None = None
    seed: int | None = None
    noise: NoiseKind = "native"
    return_latents: bool = False


@dataclass(frozen=True, eq=False, kw_only=True)
class PolicyRequest(_Request):
    """An observation of the DROID robot, to be answered with joint positions or poses.

    Attributes:
        wrist: picture of the wrist camera; with ``exteriors`` or not at all.
        exteriors: pictures of the two exterior cameras.
        image: instead of the three, one picture with the wrist view on top of the exterior ones.
        joint_position: [7] radians.
        gripper_position: 0 open to 1 closed.
        eef_position: [3] metres and
        eef_quaternion: [4] as x, y, z, w; the pose that a pose-space policy starts from.
        history: [rows, 8 or 10] earlier states in the order of time, in the space of the model.
        decode_video: whether to return the predicted frames.
    """

    wrist: np.ndarray | None = None
    exteriors: Sequence[np.ndarray] | None = None
    image: np.ndarray | None = None
    joint_position: np.ndarray | Sequence[float] | None = None
    gripper_position: float | None = None
    eef_position: np.ndarray | Sequence[float] | None = None
    eef_quaternion: np.ndarray | Sequence[float] | None = None
    history: np.ndarray | None = None
    decode_video: bool = False


@dataclass(frozen=True, eq=False, kw_only=True)
class _ActionRequest(_Request):
    """What the modes of any embodiment share.

    Attributes:
        domain: name of the embodiment, see `domains.DOMAINS`.
        raw_dim: columns of its actions; None: those of the table.
        chunk: actions, a multiple of 4; None: the preset of the domain.
        fps: of actions and frames; None: the preset of the domain.
        tier: resolution tier of the canvas; None: the preset of the domain.
        viewpoint: where the camera is.
        view_description: further words about the views.
        normalizer: between units of the robot and those of the model; None: no conversion.
    """

    domain: str
    raw_dim: int | None = None
    chunk: int | None = None
    fps: float | None = None
    tier: str | None = None
    viewpoint: Viewpoint = Viewpoint.EGO
    view_description: str = ""
    normalizer: ActionNormalizer | None = None


@dataclass(frozen=True, eq=False, kw_only=True)
class WorldActionRequest(_ActionRequest):
    """First frame to future frames and actions of any embodiment.

    Attributes:
        image: the first frame.
        decode_video: whether to return the predicted frames.
    """

    image: np.ndarray
    decode_video: bool = False


@dataclass(frozen=True, eq=False, kw_only=True)
class ForwardDynamicsRequest(_ActionRequest):
    """First frame and actions to future frames.

    Attributes:
        image: the first frame.
        actions: [chunk, raw_dim] in units of the robot.
    """

    image: np.ndarray
    actions: np.ndarray


@dataclass(frozen=True, eq=False, kw_only=True)
class InverseDynamicsRequest(_ActionRequest):
    """Frames to the actions between them.

    Attributes:
        frames: clip of chunk + 1 pictures.
    """

    frames: np.ndarray


@dataclass(frozen=True, eq=False, kw_only=True)
class TextToImageRequest(_Request):
    """Caption to picture.

    Attributes:
        negative_prompt: what guidance leads away from.
        height: pixels, a multiple of 16.
        width: pixels, a multiple of 16.
        metadata: whether to append sentences about the format; JSON captions never get them.
    """

    negative_prompt: str = ""
    height: int = 1024
    width: int = 1024
    metadata: bool = True


@dataclass(frozen=True, eq=False, kw_only=True)
class TextToVideoRequest(_Request):
    """Caption to clip.

    Attributes:
        negative_prompt: what guidance leads away from.
        height: pixels, a multiple of 16.
        width: pixels, a multiple of 16.
        frames: 1 + a multiple of 4.
        fps: frames per second.
        sound: whether to generate sound with it.
        metadata: whether to append sentences about the format; JSON captions never get them.
    """

    negative_prompt: str = ""
    height: int = 720
    width: int = 1280
    frames: int = 189
    fps: float = 24.0
    sound: bool = False
    metadata: bool = True


@dataclass(frozen=True, eq=False, kw_only=True)
class ImageToVideoRequest(TextToVideoRequest):
    """Caption and first frame to clip.

    Attributes:
        image: the first frame; scaled to cover the canvas and cropped around its centre.
    """

    image: np.ndarray


@dataclass(frozen=True, eq=False, kw_only=True)
class VideoToVideoRequest(TextToVideoRequest):
    """Caption and 5 frames to the clip that continues them.

    Attributes:
        clip: at least 5 pictures; scaled to cover the canvas and cropped around their centre.
        take: whether the first or the last 5 pictures are continued.
    """

    clip: np.ndarray
    take: str = "last"


Request = (
    PolicyRequest
    | WorldActionRequest
    | ForwardDynamicsRequest
    | InverseDynamicsRequest
    | TextToImageRequest
    | TextToVideoRequest
    | ImageToVideoRequest
    | VideoToVideoRequest
)
