"""Questions to the dispatcher: facts of the command line, recorded calls asked again."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from phyai.cli import engines
from phyai.cli.errors import CliError

if TYPE_CHECKING:
    from phyai.dispatch import Selector

NAMESPACES = ("shape", "dtype", "attrs", "quant")
EXAMPLE = "e.g. --op gemm --fact shape.M=50 --fact dtype.input=bf16"


def parse_facts(entries: list[str]) -> dict[str, dict[str, Any]]:
    """Sort the values of ``--fact PATH=VALUE`` into the arguments of a query.

    Args:
        entries: Values in the order given, e.g. ``["shape.M=50", "quant.fields.activation=int8"]``.

    Returns:
        Values by namespace and name. Numbers, true, false and null are read as such.

    Raises:
        ValueError: A value that is no PATH=VALUE, or an unknown namespace.
    """
    facts: dict[str, dict[str, Any]] = {}
    for entry in entries:
        path, separator, text = entry.partition("=")
        namespace, _, name = path.strip().partition(".")
        if not separator or not name:
            raise ValueError(f"{entry!r} is not PATH=VALUE; {EXAMPLE}")
        if namespace not in NAMESPACES:
            allowed = ", ".join(f"{known}.NAME" for known in NAMESPACES)
            raise ValueError(f"unknown fact {path.strip()!r}; allowed: {allowed}")
        target = facts.setdefault(namespace, {})
        if namespace == "quant":
            target, name = _quant_target(target, name)
        target[name] = _scalar(text.strip())
    if "block_k" in facts.get("quant", {}):
        facts["quant"]["block_shape"] = (1, facts["quant"].pop("block_k"))
    return facts


def _quant_target(quant: dict[str, Any], name: str) -> tuple[dict[str, Any], str]:
    head, _, rest = name.partition(".")
    return (quant.setdefault("fields", {}), rest) if head == "fields" and rest else (quant, name)


def _scalar(text: str) -> Any:
    words = {"true": True, "false": False, "null": None, "none": None}
    if text.lower() in words:
        return words[text.lower()]
    try:
        return int(text)
    except ValueError:
        return text


def ask(op: str, **query: Any) -> dict[str, Any]:
    """Return the trace of one query as a mapping; arguments are those of `dispatch.explain`.

    Raises:
        CliError: A value of the query that the dispatcher cannot read.
    """
    from phyai.dispatch import PolicyError, explain

    try:
        return explain(op, **query).as_dict()
    except PolicyError:
        raise
    except ValueError as error:
        raise CliError(str(error)) from None


def query_of(trace: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments that ask the dispatcher the question of `trace` again.

    Facts about device, model and libraries are left out: the selector supplies them.
    """
    entries: dict[str, dict[str, Any]] = {}
    for path, value in trace["facts"].items():
        namespace, _, name = path.partition(".")
        if namespace not in NAMESPACES or not name:
            continue
        target = entries.setdefault(namespace, {})
        if namespace == "quant":
            target, name = _quant_target(target, name)
        target[name] = value
    block_k = entries.get("quant", {}).pop("block_k", None)
    if block_k is not None:
        entries["quant"]["block_shape"] = (1, block_k)
    return {"role": trace["role"], **entries}


@contextmanager
def policy_in_force(
    kernel_config: Path | None, device: str | None, model: str | None
) -> "Iterator[Selector]":
    """Answer queries inside the body for `device` under the policy of `kernel_config`.

    Args:
        kernel_config: Policy file; None takes that of the environment.
        device: As `probe_device` reads it.
        model: Family that rules see; None matches no rule that names one.

    Raises:
        CliError: The device is unknown or not here.
        PolicyError: The policy file is wrong.
    """
    from phyai.dispatch import ModelContext, PolicyError
    from phyai.dispatch.bootstrap import initialize_kernel_system, reset_kernel_selector
    from phyai.dispatch.config import KernelConfig
    from phyai.dispatch.device import probe_device

    try:
        profile = probe_device(device)
    except ValueError as error:
        raise CliError(str(error)) from None
    with engines.flags_win({engines.POLICY_VARIABLE: kernel_config}):
        try:
            selector = initialize_kernel_system(
                KernelConfig(config_path=kernel_config),
                device=profile,
                model=ModelContext(family=model),
            )
        except PolicyError:
            raise
        except ValueError as error:
            raise CliError(str(error)) from None
    try:
        yield selector
    finally:
        reset_kernel_selector()
