"""The options that a request may carry beside its observation."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from phyai.client.policy import OPTIONS_KEY
from phyai.serving.continuation import MAX_GUIDANCE_WEIGHT, RTCOptions, Schedule
from phyai.serving.jobs import RequestError

MAX_STEPS = 100
MAX_SEED = 2**63 - 1
MAX_SESSION_CHARACTERS = 128
_OPTIONS = ("num_steps", "seed", "noise", "session", "reset", "rtc", "video")
_RTC = ("executed", "delay", "horizon", "schedule", "max_guidance_weight", "prev")
# LeRobot's names.
_ALIASES = {"inference_delay": "delay", "execution_horizon": "horizon"}
_MOST_GUIDANCE = 1000.0
# Larger numbers would overflow in the model, which looks like a failure of the engine.
_LARGEST = 1e9


@dataclass(frozen=True)
class RequestOptions:
    """The options of one request.

    Attributes:
        num_steps: Integration steps, 1 to 100.
        seed: Seed of the noise.
        noise: Starting point float32 [chunk, max_action_dim], instead of `seed`.
        session: Name under which the server keeps the last chunk, beyond a connection.
        reset: Whether to forget the session's last chunk first.
        rtc: Real-time chunking, off when None.
        video: Whether to return predicted frames.
    """

    num_steps: int | None = None
    seed: int | None = None
    noise: np.ndarray | None = None
    session: str | None = None
    reset: bool = False
    rtc: RTCOptions | None = None
    video: bool = False


def split_options(request: Any) -> tuple[dict[str, Any], RequestOptions]:
    """Take the options out of a decoded request.

    Args:
        request: What a client sent; a map with string keys.

    Returns:
        The observation without the options, and the options.

    Raises:
        RequestError: The request is no map, or an option is unknown or out of range.
    """
    if not isinstance(request, dict) or not all(isinstance(key, str) for key in request):
        raise RequestError(
            f"the request is {type(request).__name__}, expected a map with string keys"
        )
    observation = dict(request)
    raw = observation.pop(OPTIONS_KEY, None)
    return observation, RequestOptions() if raw is None else parse_options(raw)


def parse_options(raw: Any) -> RequestOptions:
    """Check the value of ``__options__``.

    Raises:
        RequestError: An option is unknown, of another type or out of range.
    """
    options = _known(raw, OPTIONS_KEY, _OPTIONS)
    noise = options.get("noise")
    if noise is not None:
        if options.get("seed") is not None:
            raise RequestError(f"{OPTIONS_KEY}: give either noise or seed, not both")
        noise = _matrix("noise", noise)
    session = options.get("session")
    if session is not None and not (
        isinstance(session, str) and 1 <= len(session) <= MAX_SESSION_CHARACTERS
    ):
        raise RequestError(
            f"{OPTIONS_KEY}.session is {str(session)[:40]!r}, expected a name of 1 to "
            f"{MAX_SESSION_CHARACTERS} characters"
        )
    rtc = options.get("rtc")
    return RequestOptions(
        num_steps=_integer("num_steps", options.get("num_steps"), 1, MAX_STEPS),
        seed=_integer("seed", options.get("seed"), 0, MAX_SEED),
        noise=noise,
        session=session,
        reset=_flag("reset", options),
        rtc=None if rtc is None else _rtc(rtc),
        video=_flag("video", options),
    )


def _flag(name: str, options: Mapping[str, Any]) -> bool:
    value = options.get(name, False)
    if not isinstance(value, bool):
        raise RequestError(f"{OPTIONS_KEY}.{name} is {value!r:.40}, expected true or false")
    return value


def _rtc(raw: Any) -> RTCOptions:
    options = dict(_known(raw, f"{OPTIONS_KEY}.rtc", (*_RTC, *_ALIASES)))
    named = {plain: plain for plain in _RTC}
    for alias, plain in _ALIASES.items():
        if alias in options and plain in options:
            raise RequestError(f"{OPTIONS_KEY}.rtc: give either {plain} or {alias}, not both")
        if alias in options:
            options[plain], named[plain] = options[alias], alias
    name = options.get("schedule", Schedule.LINEAR.value)
    if not isinstance(name, str) or name not in {schedule.value for schedule in Schedule}:
        raise RequestError(
            f"{OPTIONS_KEY}.rtc.schedule is {str(name)[:40]!r}; allowed: "
            f"{', '.join(schedule.value for schedule in Schedule)}"
        )
    prev = options.get("prev")
    return RTCOptions(
        executed=_integer("rtc.executed", options.get("executed"), 0, 10_000) or 0,
        delay=_integer(f"rtc.{named['delay']}", options.get("delay"), 0, 10_000) or 0,
        horizon=_integer(f"rtc.{named['horizon']}", options.get("horizon"), 1, 10_000),
        schedule=Schedule(name),
        max_guidance_weight=_weight(options.get("max_guidance_weight")),
        prev=None if prev is None else _matrix("rtc.prev", prev),
    )


def _known(raw: Any, where: str, allowed: tuple[str, ...]) -> Mapping[str, Any]:
    if not isinstance(raw, dict):
        raise RequestError(f"{where} is {type(raw).__name__}, expected a map")
    unknown = sorted(str(key) for key in raw if key not in allowed)
    if unknown:
        raise RequestError(f"{where} has no {unknown[0][:40]!r}; allowed: {', '.join(allowed)}")
    return raw


def _integer(name: str, value: Any, low: int, high: int) -> int | None:
    if value is None:
        return None
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise RequestError(
            f"{OPTIONS_KEY}.{name} is {str(value)[:40]!r}, expected an integer from {low} to {high}"
        )
    return value


def _weight(value: Any) -> float:
    if value is None:
        return MAX_GUIDANCE_WEIGHT
    if isinstance(value, np.generic):
        value = value.item()
    # A comparison with NaN is false.
    numeric = isinstance(value, int | float) and not isinstance(value, bool)
    if not numeric or not 0 < value <= _MOST_GUIDANCE:
        raise RequestError(
            f"{OPTIONS_KEY}.rtc.max_guidance_weight is {str(value)[:40]!r}, expected a number "
            f"above 0, at most {_MOST_GUIDANCE:g}"
        )
    return float(value)


def _matrix(name: str, value: Any) -> np.ndarray:
    if not isinstance(value, np.ndarray) or value.dtype.kind not in "fiu" or value.ndim != 2:
        seen = f"{value.dtype} {value.shape}" if isinstance(value, np.ndarray) else type(value)
        raise RequestError(f"{OPTIONS_KEY}.{name} is {seen}, expected an array of two axes")
    with np.errstate(over="ignore"):
        matrix = value.astype(np.float32)
    # A comparison with NaN is false.
    if not (np.abs(matrix) <= _LARGEST).all():
        raise RequestError(
            f"{OPTIONS_KEY}.{name} holds values that are not finite or beyond {_LARGEST:g}"
        )
    return matrix
