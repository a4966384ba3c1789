"""Options that belong together, declared once as a dataclass and taken by commands as one value."""

import functools
import inspect
from collections.abc import Callable
from dataclasses import MISSING, fields, is_dataclass
from typing import Any, get_type_hints


def with_groups(command: Callable[..., None]) -> Callable[..., None]:
    """Return a command for Typer in which a parameter that is a dataclass is its fields.

    Typer sees an option for each field, where the dataclass stands; the command gets an instance.
    Fields without a default are required options.

    Args:
        command: Its parameters are annotated with types of Typer or with dataclasses whose fields
            are. A group has no default of its own.
    """
    hints = get_type_hints(command, include_extras=True)
    groups: dict[str, type[Any]] = {}
    shown: list[inspect.Parameter] = []
    for parameter in inspect.signature(command).parameters.values():
        kind = hints[parameter.name]
        if is_dataclass(kind) and isinstance(kind, type):
            groups[parameter.name] = kind
            shown += _options(kind)
        else:
            # Behind a group with defaults only keywords may have none.
            shown.append(parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY, annotation=kind))

    @functools.wraps(command)
    def flat(**given: Any) -> None:
        for name, kind in groups.items():
            given[name] = kind(**{field.name: given.pop(field.name) for field in fields(kind)})
        command(**given)

    flat.__signature__ = inspect.Signature(shown)  # pyright: ignore[reportAttributeAccessIssue]
    flat.__annotations__ = {parameter.name: parameter.annotation for parameter in shown}
    return flat


def _options(group: type[Any]) -> list[inspect.Parameter]:
    hints = get_type_hints(group, include_extras=True)
    return [
        inspect.Parameter(
            field.name,
            inspect.Parameter.KEYWORD_ONLY,
            default=inspect.Parameter.empty if field.default is MISSING else field.default,
            annotation=hints[field.name],
        )
        for field in fields(group)
    ]
