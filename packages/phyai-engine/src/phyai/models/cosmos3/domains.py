"""Embodiments, viewpoints and picture sizes that Cosmos3 was trained on."""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

from phyai.processing.errors import ProcessingError


@dataclass(frozen=True)
class Domain:
    """One embodiment.

    Attributes:
        id: row of the tables of the action heads.
        raw_dim: columns of an action; None where it depends on the data set.
        chunk: actions of a request unless it says otherwise.
        fps: actions per second unless the request says otherwise.
        tier: resolution tier unless the request says otherwise.
    """

    id: int
    raw_dim: int | None
    chunk: int = 16
    fps: float = 10.0
    tier: str = "480"


DOMAINS: Mapping[str, Domain] = {
    "av": Domain(1, 9, chunk=60),
    "camera_pose": Domain(2, 9, chunk=60, fps=30.0),
    "hand_pose": Domain(3, None, fps=24.0),
    "pusht": Domain(4, 2, tier="256"),
    "libero": Domain(5, None, tier="256"),
    "umi": Domain(6, 10),
    "bridge_orig_lerobot": Domain(7, 10, fps=5.0),
    "droid_lerobot": Domain(8, 10, fps=15.0),
    "robomind-franka": Domain(8, 10),
    "embodiment_b": Domain(9, 30),
    "galbot": Domain(9, 30),
    "robomind-franka-dual": Domain(12, 20),
    "robomind-ur": Domain(13, 10),
    "agibotworld": Domain(15, 29),
    "embodiment_c_gripper": Domain(15, 29),
    "embodiment_c_gripper_ext": Domain(15, 29),
    "agibot_gear_gripper": Domain(15, 29),
    "agibot_gear_gripper_ext": Domain(15, 29),
    "xdof_yam": Domain(16, 20),
    "molmoact2_yam": Domain(16, 20),
    "abc_yam": Domain(16, 20),
    "robotwin": Domain(17, 14),
    "fractal": Domain(20, 10, fps=5.0),
    "drawanything": Domain(21, 3),
    "behavior1k_lerobot": Domain(22, 23),
    "maniparena": Domain(23, 20),
}
"""By name; several names share an id. Frame rates without a published preset are 10."""


def find_domain(name: str) -> Domain:
    """Returns the embodiment of a name.

    Raises:
        ProcessingError: for a name that is not known; the message lists those that are.
    """
    if name not in DOMAINS:
        raise ProcessingError(f"domain is {name!r}; known: {', '.join(sorted(DOMAINS))}")
    return DOMAINS[name]


class Viewpoint(StrEnum):
    """Where the camera of an action clip is."""

    EGO = "ego_view"
    THIRD_PERSON = "third_person_view"
    WRIST = "wrist_view"
    CONCAT = "concat_view"

    @property
    def sentence(self) -> str:
        """The words the model was trained with."""
        return _SENTENCES[self]


_SENTENCES = {
    Viewpoint.EGO: ("This video is captured from a first-person perspective looking at the scene."),
    Viewpoint.THIRD_PERSON: (
        "This video is captured from a third-person perspective looking towards the agent from "
        "the front."
    ),
    Viewpoint.WRIST: "This video is captured from a wrist-mounted camera.",
    Viewpoint.CONCAT: ("This video contains concatenated views from multiple camera perspectives."),
}

TIERS: Mapping[str, Mapping[str, tuple[int, int]]] = {
    "256": {
        "1,1": (256, 256),
        "4,3": (256, 320),
        "3,4": (320, 256),
        "16,9": (192, 320),
        "9,16": (320, 192),
    },
    "480": {
        "1,1": (640, 640),
        "4,3": (544, 736),
        "3,4": (736, 544),
        "16,9": (480, 832),
        "9,16": (832, 480),
    },
    "704": {
        "1,1": (960, 960),
        "4,3": (832, 1088),
        "3,4": (1088, 832),
        "16,9": (704, 1280),
        "9,16": (1280, 704),
    },
    "720": {
        "1,1": (960, 960),
        "4,3": (832, 1104),
        "3,4": (1104, 832),
        "16,9": (720, 1280),
        "9,16": (1280, 720),
    },
}
"""Canvas (height, width) by tier and by the name of the aspect ratio, ``width,height``."""


def find_canvas(tier: str, height: int, width: int) -> tuple[int, int]:
    """Returns the canvas (height, width) of a tier whose height / width is nearest to a picture's.

    Raises:
        ProcessingError: for a tier that is not known.
    """
    if tier not in TIERS:
        raise ProcessingError(f"tier is {tier!r}; allowed: {', '.join(TIERS)}")
    ratio = height / width
    return min(TIERS[tier].values(), key=lambda size: abs(size[0] / size[1] - ratio))
