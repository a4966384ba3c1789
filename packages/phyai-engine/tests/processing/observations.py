"""Observations, and what the pipelines should make of their numbers."""

import math

import numpy as np

from phyai.processing import Observation

STATE = np.array([0.1, -3.0, 0.7, 2.0, 9.0])


def frame(seed: int, size=(224, 224)) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (*size, 3), dtype=np.uint8)


def observe(state=STATE, task="pick up", **images) -> Observation:
    return Observation(images or {"base_0_rgb": frame(0)}, state, task)


def bins(values) -> str:
    return " ".join(str(min(math.floor((v + 1) * 128), 255) if v >= -1 else -1) for v in values)


def quantile(values, stats, eps=0.0):
    low, high = stats["q01"][: len(values)], stats["q99"][: len(values)]
    return 2 * (np.asarray(values) - low) / (high - low + eps) - 1
