"""JSON without the readings that make two readers disagree."""

import json
from typing import Any, NoReturn

from phyai_quant.scheme import QuantConfigError


def parse_json(text: str, source: str) -> Any:
    """Returns the value of a JSON text.

    Args:
        text: The text.
        source: Name of the file, for messages.

    Raises:
        QuantConfigError: It is no JSON, names a key twice in one object, or holds NaN or infinity.
    """

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        result = dict(pairs)
        if len(result) != len(pairs):
            names = [name for name, _ in pairs]
            twice = next(name for name in names if names.count(name) > 1)
            raise QuantConfigError(
                f"{source}: key {twice!r} stands twice in one object; keep the one that is meant"
            )
        return result

    def refuse(constant: str) -> NoReturn:
        raise QuantConfigError(f"{source}: {constant} is not JSON; write a number or null")

    try:
        return json.loads(text, object_pairs_hook=unique, parse_constant=refuse)
    except QuantConfigError:
        raise
    except (ValueError, RecursionError) as error:
        raise QuantConfigError(f"{source}: not a valid JSON file: {error}") from error
