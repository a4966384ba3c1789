"""LeRobot's policy type ``phyai``: the action chunks come from a PhyAI server."""

from lerobot_policy_phyai.configuration_phyai import PhyaiConfig

__all__ = ["PhyaiConfig"]
