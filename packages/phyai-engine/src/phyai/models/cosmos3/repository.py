"""What a Cosmos3 repository holds and how its policy wants to be asked, without its weights."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from phyai.models.cosmos3.canvas import SPATIAL
from phyai.models.cosmos3.config import Cosmos3Config
from phyai.models.cosmos3.domains import find_domain
from phyai.models.cosmos3.droid import COMPOSED_SIZE, ActionSpace, PolicyContract
from phyai.models.cosmos3.plan_actions import SAMPLING
from phyai.models.cosmos3.plan_generation import IMAGE_SAMPLING, VIDEO_SAMPLING
from phyai.models.cosmos3.plans import latent_frames
from phyai.models.cosmos3.requests import PolicyRequest, Request, TextToImageRequest
from phyai.models.cosmos3.requests import TextToVideoRequest as VideoRequest
from phyai.models.cosmos3.sampler import Sampling
from phyai.models.cosmos3.state import ActionLayout, Layout
from phyai.processing.errors import ProcessingError
from phyai.processing.json_reader import read_json

PARTS = ("transformer", "vae", "text_tokenizer")
SOUND = "sound_tokenizer"
_CHECKPOINT = "checkpoint.json"


@dataclass(frozen=True)
class Repository:
    """The parts of a repository.

    Attributes:
        folder: where it is.
        config: sizes of the transformer.
        contract: how `PolicyRequest` is read and answered.
        policy: whether ``checkpoint.json`` says that the checkpoint is a robot policy.
        sound: whether it can make sound.
    """

    folder: Path
    config: Cosmos3Config
    contract: PolicyContract
    policy: bool
    sound: bool

    @classmethod
    def read(cls, folder: Path | str) -> "Repository":
        """Reads the small files of a repository.

        Raises:
            ProcessingError: a part is missing, or ``checkpoint.json`` has a value that is not
                allowed.
            CheckpointError: ``transformer/config.json`` cannot be used.
        """
        folder = Path(folder)
        missing = [name for name in PARTS if not (folder / name).is_dir()]
        if missing:
            raise ProcessingError(
                f"{folder} is no Cosmos3 repository: the folder {missing[0]} is missing; it needs "
                f"{', '.join(PARTS)} in the layout of diffusers"
            )
        config = Cosmos3Config.from_json(folder / "transformer")
        contract = PolicyContract.nano() if config.gated else PolicyContract.edge()
        policy = _policy(folder)
        return cls(
            folder=folder,
            config=config,
            contract=contract.updated(policy),
            policy=bool(policy),
            sound=config.sound_gen and (folder / SOUND).is_dir(),
        )

    @property
    def variant(self) -> str:
        """``nano``, ``super``, ``edge`` by the published sizes, else ``qwen`` or ``nemotron``."""
        depths = {36: "nano", 64: "super", 28: "edge"}
        published = self.config.hidden_size in (4096, 5120, 2048)
        family = "qwen" if self.config.gated else "nemotron"
        return depths.get(self.config.num_hidden_layers, family) if published else family

    def sampling(self, request: type[Request] | Request, **changes: Any) -> Sampling:
        """Returns how a request is integrated unless it says otherwise.

        Args:
            request: a request or its class.
            changes: fields to replace; None leaves one as it is.

        Raises:
            ValueError: for a value out of range.
        """
        kind = request if isinstance(request, type) else type(request)
        if issubclass(kind, PolicyRequest):
            found = self.contract.sampling
        elif issubclass(kind, TextToImageRequest):
            found = IMAGE_SAMPLING
        else:
            found = VIDEO_SAMPLING if issubclass(kind, VideoRequest) else SAMPLING
        return replace(found, **{k: v for k, v in changes.items() if v is not None})

    def policy_layout(self) -> Layout:
        """Returns the layout of a DROID policy's request, or of its video without action heads.

        The picture of 540 x 640 pixels fills 33 x 40 cells of the canvas.
        """
        contract = self.contract
        action = None
        if self.config.action_gen:
            rows = contract.chunk + (contract.space is ActionSpace.JOINT_POSITION)
            state = tuple(range(rows - contract.chunk))
            domain = find_domain(contract.domain).id
            action = ActionLayout(rows, 1 - len(state), state, contract.raw_dim, domain)
        frames = latent_frames(contract.chunk + 1)
        rows, columns = (size // SPATIAL for size in COMPOSED_SIZE)
        return Layout(frames, rows, columns, (0,), contract.fps, action)


def _policy(folder: Path) -> Mapping[str, Any]:
    if not (folder / _CHECKPOINT).is_file():
        return {}
    return read_json(folder / _CHECKPOINT).child("policy", optional=True).values
