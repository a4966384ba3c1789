"""LeRobot's processors of the policy type ``phyai``: names, batch axis, device."""
# pyright: reportMissingImports=false

from typing import Any

from lerobot.processor import make_default_pre_post_processors

from lerobot_policy_phyai.configuration_phyai import PhyaiConfig


def make_phyai_pre_post_processors(
    config: PhyaiConfig, dataset_stats: dict[str, Any] | None = None
) -> tuple[Any, Any]:
    """Return both pipelines; the statistics are the server's, so those of LeRobot are not used."""
    del dataset_stats
    return make_default_pre_post_processors(config)
