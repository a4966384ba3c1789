"""Settings of the kernel system, from code and from the environment."""

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from phyai.dispatch.types import Profile

ENV_CONFIG = "PHYAI_KERNEL_CONFIG"
ENV_PROFILE = "PHYAI_KERNEL_PROFILE"
ENV_AUTOTUNE_CACHE = "PHYAI_KERNEL_AUTOTUNE_CACHE"
ENV_VERIFY_FROZEN = "PHYAI_KERNEL_VERIFY_FROZEN"
ENV_FREEZE = "PHYAI_FREEZE_KERNEL_CHOICES"

_POLICY_ADVICE = f"write a kernel policy and name it in {ENV_CONFIG}"
REMOVED_VARIABLES = {
    "PHYAI_ATTN_BACKEND": f"{_POLICY_ADVICE}, with a rule for op attention or attention_paged",
    "PHYAI_NORM_BACKEND": f"{_POLICY_ADVICE}, with a rule for op rmsnorm or layernorm",
    "PHYAI_LINEAR_BACKEND": f"{_POLICY_ADVICE}, with a rule for op gemm",
    "PHYAI_FLASHINFER_PREFILL_BACKEND": (
        f"{_POLICY_ADVICE}, with a rule that restricts attention_paged to "
        "flashinfer.attention_paged.fa2 or another variant"
    ),
    "PHYAI_FORCE_LINEAR_KERNEL": f"{_POLICY_ADVICE}, with an override for op gemm",
}
_TRUE_WORDS = frozenset({"1", "true", "yes", "on"})
_FALSE_WORDS = frozenset({"0", "false", "no", "off", ""})


@dataclass(frozen=True)
class KernelConfig:
    """Settings of the dispatcher.

    Attributes:
        profile: overrides the policy's profile; None keeps it.
        config_path: policy file.
        autotune_cache: JSON file of measured winners; None keeps them in memory.
        benchmark: measures a prepared row, ``(impl, facts, selection) -> milliseconds``; None
            installs the built-in one when the profile is autotune.
        policy_config: inline policy, instead of ``config_path``.

    Raises:
        ValueError: for an unknown profile, or when both policy sources are given.
        TypeError: if the benchmark is not callable or the inline policy is no mapping.
    """

    profile: Profile | str | None = None
    config_path: str | Path | None = None
    autotune_cache: str | Path | None = None
    benchmark: Callable[..., float] | None = None
    policy_config: Mapping[str, Any] | None = None

    def __post_init__(self) -> None:
        if self.profile is not None:
            object.__setattr__(self, "profile", parse_profile(self.profile, "profile"))
        if self.config_path is not None and self.policy_config is not None:
            raise ValueError("config_path and policy_config exclude each other; give one")
        if self.benchmark is not None and not callable(self.benchmark):
            raise TypeError(f"benchmark must be callable, got {type(self.benchmark).__name__}")
        if self.policy_config is not None and not isinstance(self.policy_config, Mapping):
            raise TypeError(
                f"policy_config must be a mapping, got {type(self.policy_config).__name__}"
            )

    def with_env(self, environ: Mapping[str, str] | None = None) -> "KernelConfig":
        """Returns the settings with the environment applied, which wins over code.

        Raises:
            ValueError: if a removed variable is set, or a value is unusable.
        """
        env = os.environ if environ is None else environ
        check_removed_variables(env)
        config = self
        if path := env.get(ENV_CONFIG, "").strip():
            config = replace(config, config_path=Path(path).expanduser(), policy_config=None)
        if profile := env.get(ENV_PROFILE, "").strip():
            config = replace(config, profile=parse_profile(profile, ENV_PROFILE))
        if cache := env.get(ENV_AUTOTUNE_CACHE, "").strip():
            config = replace(config, autotune_cache=Path(cache).expanduser())
        return config

    @classmethod
    def from_env(cls, environ: Mapping[str, str] | None = None) -> "KernelConfig":
        """Returns the settings that the environment alone gives."""
        return cls().with_env(environ)


def parse_profile(value: Profile | str, name: str) -> Profile:
    """Returns the profile a string names, in any case.

    Raises:
        ValueError: naming the setting and the allowed values.
    """
    try:
        return Profile(str(value).strip().lower())
    except ValueError:
        allowed = ", ".join(Profile)
        raise ValueError(f"{name} is {value!r}; allowed: {allowed}") from None


def check_removed_variables(environ: Mapping[str, str]) -> None:
    """Refuses environment variables that no longer have an effect.

    Raises:
        ValueError: naming the variable and what replaces it.
    """
    for name, advice in REMOVED_VARIABLES.items():
        if environ.get(name, "").strip():
            raise ValueError(f"{name} was removed: {advice}")


def env_flag(name: str, environ: Mapping[str, str] | None = None, *, default: bool = False) -> bool:
    """Returns a boolean environment variable.

    Raises:
        ValueError: naming the variable, for anything but 1/true/yes/on and 0/false/no/off.
    """
    env = os.environ if environ is None else environ
    if name not in env:
        return default
    word = env[name].strip().lower()
    if word not in _TRUE_WORDS | _FALSE_WORDS:
        raise ValueError(f"{name} is {env[name]!r}; allowed: 1/true/yes/on or 0/false/no/off")
    return word in _TRUE_WORDS
