"""Settings of the policy type ``phyai``."""
# pyright: reportMissingImports=false

from dataclasses import dataclass, field

from lerobot.configs.policies import PreTrainedConfig
from lerobot.configs.types import FeatureType, NormalizationMode, PolicyFeature
from lerobot.policies.rtc.configuration_rtc import RTCConfig


@PreTrainedConfig.register_subclass("phyai")
@dataclass
class PhyaiConfig(PreTrainedConfig):
    """Where the server is and what its policy reads.

    Normalisation is the server's, so that of LeRobot is the identity.

    Attributes:
        host: Address of the server, or a whole ``ws://`` address.
        port: Port; -1 when `host` has it.
        api_key_file: File with the server's key, empty for none.
        chunk_size: Actions of a chunk.
        n_action_steps: Actions of a chunk that `select_action` executes.
        num_steps: Integration steps; 0 takes the server's.
        timeout_s: Longest wait for a chunk.
        rtc_config: Set by LeRobot when it runs real-time chunking.
    """

    n_obs_steps: int = 1
    host: str = "127.0.0.1"
    port: int = 8000
    api_key_file: str = ""
    chunk_size: int = 50
    n_action_steps: int = 50
    num_steps: int = 0
    timeout_s: float = 30.0
    rtc_config: RTCConfig | None = None
    normalization_mapping: dict[str, NormalizationMode] = field(
        default_factory=lambda: dict.fromkeys(
            ("VISUAL", "STATE", "ACTION"), NormalizationMode.IDENTITY
        )
    )

    def __post_init__(self) -> None:
        """Check the number of executed actions.

        Raises:
            ValueError: It does not fit the chunk.
        """
        super().__post_init__()
        if not 1 <= self.n_action_steps <= self.chunk_size:
            raise ValueError(
                f"n_action_steps is {self.n_action_steps}; choose 1 to chunk_size, which is "
                f"{self.chunk_size}"
            )

    @property
    def observation_delta_indices(self) -> None:
        """Only the newest observation is read."""
        return

    @property
    def action_delta_indices(self) -> list[int]:
        """One action for each step of a chunk."""
        return list(range(self.chunk_size))

    @property
    def reward_delta_indices(self) -> None:
        """Rewards are not read."""
        return

    def get_optimizer_preset(self) -> None:
        """There is nothing to train."""
        return

    def get_scheduler_preset(self) -> None:
        """There is nothing to train."""
        return

    def validate_features(self) -> None:
        """Check that there is a picture to send.

        Raises:
            ValueError: There is none.
        """
        if not self.image_features:
            raise ValueError("the policy reads no picture; a server needs at least one camera")


def features_of(metadata: dict) -> tuple[dict[str, PolicyFeature], dict[str, PolicyFeature]]:
    """Return LeRobot's input and output features for the metadata of a server."""
    height, width, _ = metadata["image_shape"]
    picture = PolicyFeature(type=FeatureType.VISUAL, shape=(3, height, width))
    inputs = {f"observation.images.{key}": picture for key in metadata["image_keys"]}
    state = PolicyFeature(type=FeatureType.STATE, shape=(metadata["state_dim"],))
    action = PolicyFeature(type=FeatureType.ACTION, shape=(metadata["action_dim"],))
    return {**inputs, "observation.state": state}, {"action": action}
