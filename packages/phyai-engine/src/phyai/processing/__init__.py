"""From a robot's observations to model inputs, and from model actions to robot units."""

from phyai.processing.detect import DetectedPreset, detect_preset
from phyai.processing.errors import ProcessingError
from phyai.processing.images import ResizeFilter
from phyai.processing.inputs import ModelInputs, Observation, PolicyShape
from phyai.processing.normalize import Normalizer, NormMode, NormSystem
from phyai.processing.pipeline import PolicyProcessor
from phyai.processing.presets import PRESETS, Preset, get_preset
from phyai.processing.prompt import PromptForm, StateTextDims
from phyai.processing.requests import observation_from_request
from phyai.processing.robots import RobotTransform
from phyai.processing.stats import load_stats
from phyai.processing.tokenizer import PromptTokenizer

__all__ = [
    "PRESETS",
    "DetectedPreset",
    "ModelInputs",
    "NormMode",
    "NormSystem",
    "Normalizer",
    "Observation",
    "PolicyProcessor",
    "PolicyShape",
    "Preset",
    "ProcessingError",
    "PromptForm",
    "PromptTokenizer",
    "ResizeFilter",
    "RobotTransform",
    "StateTextDims",
    "detect_preset",
    "get_preset",
    "load_stats",
    "observation_from_request",
]
