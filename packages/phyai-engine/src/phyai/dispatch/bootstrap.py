"""The process-wide selector."""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import replace
from typing import Any

from phyai.dispatch.benchmark import default_benchmark
from phyai.dispatch.catalog import Catalog, build_catalog
from phyai.dispatch.config import KernelConfig
from phyai.dispatch.policy import Policy
from phyai.dispatch.policy_load import load_policy, policy_from_mapping
from phyai.dispatch.selector import Selector
from phyai.dispatch.types import ModelContext, Profile

_SCOPED: ContextVar[Selector | None] = ContextVar("phyai_kernel_selector", default=None)


class _Process:
    selector: Selector | None = None


def get_kernel_selector() -> Selector:
    """Returns the selector in force: the scoped one, else the process's.

    The first call in a process without one builds it from the environment.
    """
    selector = _SCOPED.get() or _Process.selector
    return selector if selector is not None else initialize_kernel_system()


def set_kernel_selector(selector: Selector) -> None:
    """Makes ``selector`` the process's selector. Call sites notice the change."""
    _Process.selector = selector


def reset_kernel_selector() -> None:
    """Drops the process's selector; the next use builds one from the environment."""
    _Process.selector = None


@contextmanager
def kernel_selector_scope(selector: Selector) -> Iterator[Selector]:
    """Uses ``selector`` in this context only."""
    token = _SCOPED.set(selector)
    try:
        yield selector
    finally:
        _SCOPED.reset(token)


def resolve_policy(config: KernelConfig, catalog: Catalog | None = None) -> Policy:
    """Returns the policy that the settings name, with a profile override applied.

    Raises:
        PolicyError: if the policy is malformed; the text names file and line.
    """
    catalog = catalog if catalog is not None else build_catalog()
    if config.config_path is not None:
        policy = load_policy(config.config_path, catalog=catalog)
    elif config.policy_config is not None:
        policy = policy_from_mapping(config.policy_config, catalog=catalog)
    else:
        policy = Policy()
    return policy if config.profile is None else replace(policy, profile=Profile(config.profile))


def initialize_kernel_system(
    config: KernelConfig | None = None, device: Any = None, model: ModelContext | None = None
) -> Selector:
    """Builds the process's selector from settings and environment, and returns it.

    Args:
        config: settings; the environment wins over them.
        device: anything `probe_device` takes; None is the GPU if there is one.
        model: which model runs.

    Raises:
        PolicyError: if the policy is malformed.
        ValueError: if an environment variable or the device is unusable.
    """
    config = (config or KernelConfig()).with_env()
    catalog = build_catalog()
    policy = resolve_policy(config, catalog)
    benchmark = config.benchmark
    if benchmark is None and policy.profile is Profile.AUTOTUNE:
        benchmark = default_benchmark(catalog)
    selector = Selector(
        catalog,
        policy,
        device=device,
        model=model,
        benchmark=benchmark,
        autotune_cache=config.autotune_cache,
    )
    set_kernel_selector(selector)
    return selector
