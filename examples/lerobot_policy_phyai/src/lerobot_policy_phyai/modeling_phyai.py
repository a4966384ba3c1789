"""The policy type ``phyai``."""
# pyright: reportMissingImports=false

from collections import deque
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch
from lerobot.policies.pretrained import PreTrainedPolicy
from torch import Tensor

from lerobot_policy_phyai.configuration_phyai import PhyaiConfig
from lerobot_policy_phyai.wire import requests_of, rtc_options
from phyai.client import PolicyClient


class PhyaiPolicy(PreTrainedPolicy):
    """Sends observations to a server and executes the chunks that it answers.

    The connection is opened with the first observation.
    """

    config_class = PhyaiConfig
    name = "phyai"

    def __init__(self, config: PhyaiConfig, **_: Any) -> None:
        super().__init__(config)
        self._client: PolicyClient | None = None
        self._actions: deque[Tensor] = deque()

    @classmethod
    def from_pretrained(
        cls,
        pretrained_name_or_path: str | Path,
        *,
        config: PhyaiConfig | None = None,
        **options: Any,
    ) -> Self:
        """Return the policy of a folder; it has a configuration and no weights."""
        if config is None:
            config = PhyaiConfig.from_pretrained(pretrained_name_or_path, **options)
        return cls(config)

    def _save_pretrained(self, save_directory: Path, state_dict: Any = None) -> None:
        del state_dict  # there are no weights
        self.config._save_pretrained(save_directory)

    def supports_rtc(self) -> bool:
        """The server joins chunks."""
        return True

    def get_optim_params(self) -> dict:
        """There is nothing to train."""
        return {}

    def forward(self, batch: dict[str, Tensor]) -> tuple[Tensor, dict | None]:
        """Refuse: there is nothing to train.

        Raises:
            NotImplementedError: Always.
        """
        raise NotImplementedError("a policy on a server can not be trained through LeRobot")

    def reset(self) -> None:
        """Begin a new episode."""
        self._actions.clear()
        if self._client is not None:
            self._client.reset()

    @torch.no_grad()
    def select_action(self, batch: dict[str, Tensor], **_: Any) -> Tensor:
        """Return the next action [B, action_dim]; asks when the chunk is used up."""
        if not self._actions:
            chunk = self.predict_action_chunk(batch)
            self._actions.extend(chunk[:, : self.config.n_action_steps].unbind(1))
        return self._actions.popleft()

    @torch.no_grad()
    def predict_action_chunk(
        self,
        batch: dict[str, Tensor],
        inference_delay: int | None = None,
        prev_chunk_left_over: Tensor | None = None,
        execution_horizon: int | None = None,
        **_: Any,
    ) -> Tensor:
        """Return a chunk [B, chunk_size, action_dim] in the robot's units.

        Args:
            batch: What LeRobot's preprocessor gives.
            inference_delay: Steps until the chunk is here, for real-time chunking.
            prev_chunk_left_over: Rest of the last chunk.
            execution_horizon: Actions from where on the new chunk is free.
        """
        settings = self.config.rtc_config
        schedule = getattr(getattr(settings, "prefix_attention_schedule", None), "name", None)
        horizon = execution_horizon or getattr(settings, "execution_horizon", None)
        requests = requests_of(batch)
        options = rtc_options(inference_delay, prev_chunk_left_over, horizon, schedule)
        rtc = options or [None] * len(requests)
        steps = self.config.num_steps or None
        client = self._connected()
        chunks = [
            client.infer(request, num_steps=steps, rtc=option)["actions"]
            for request, option in zip(requests, rtc, strict=True)
        ]
        return torch.from_numpy(np.stack(chunks).astype(np.float32)).to(self.config.device)

    def _connected(self) -> PolicyClient:
        if self._client is None:
            config = self.config
            key = Path(config.api_key_file).read_text().strip() if config.api_key_file else None
            port = None if config.port < 0 else config.port
            self._client = PolicyClient(config.host, port, api_key=key, timeout_s=config.timeout_s)
        return self._client
