"""Reading a policy file: YAML 1.2 data with a line number for every key and item.

Only mappings, lists, strings, numbers, booleans and null are accepted. ``on``, ``off``, ``yes``
and ``no`` are strings. Duplicate keys, tags, merge keys, dates and deep nesting are errors with a
line number.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

from ruamel.yaml import YAML
from ruamel.yaml.error import MarkedYAMLError, YAMLError
from ruamel.yaml.nodes import MappingNode, Node, ScalarNode, SequenceNode
from ruamel.yaml.reader import ReaderError

from phyai.dispatch.errors import PolicyError

Path_ = tuple[str | int, ...]

MAX_DEPTH = 40
MAX_NODES = 20_000
_TAG = "tag:yaml.org,2002:"


def show_path(path: Path_) -> str:
    """Returns ``rules[0].match`` for ``("rules", 0, "match")``."""
    text = ""
    for part in path:
        text += f"[{part}]" if isinstance(part, int) else f".{part}" if text else str(part)
    return text


@dataclass
class Document:
    """Plain data of a policy and where each part stands.

    Attributes:
        data: mappings, lists and scalars.
        source: file, or an empty string.
        lines: 1-based line of every path.
    """

    data: Any
    source: str = ""
    lines: dict[Path_, int] = field(default_factory=dict)

    def line(self, path: Path_) -> int | None:
        """Returns the line of a path, or of its closest known parent."""
        for end in range(len(path), -1, -1):
            if path[:end] in self.lines:
                return self.lines[path[:end]]
        return None

    def value(self, path: Path_) -> Any:
        """Returns what stands at a path, or None where nothing does."""
        value = self.data
        for part in path:
            try:
                value = value[part]
            except (KeyError, IndexError, TypeError):
                return None
        return value

    def fail(self, path: Path_, message: str) -> NoReturn:
        """Raises a PolicyError that names file, line and path."""
        raise self.error(path, message)

    def error(self, path: Path_, message: str) -> PolicyError:
        """Returns a PolicyError that names file, line and path."""
        return PolicyError(message, source=self.source, line=self.line(path), path=show_path(path))


def read_document(path: str | Path) -> Document:
    """Reads a policy file.

    Raises:
        PolicyError: if the file cannot be read or is not an acceptable YAML document.
    """
    source = Path(path).expanduser()
    try:
        text = source.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError, ValueError) as error:
        raise PolicyError(f"cannot read the policy file: {error}", source=source) from None
    return parse_document(text, str(source))


def parse_document(text: str, source: str = "") -> Document:
    """Parses YAML text.

    Raises:
        PolicyError: if it is not an acceptable YAML document.
    """
    try:
        _check_depth(text, source)
        node = YAML(typ="safe", pure=True).compose(text)
    except PolicyError:
        raise
    except MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line = mark.line + 1 if mark is not None else 1
        problem = error.problem or error.context or "malformed YAML"
        raise PolicyError(f"malformed YAML: {problem}", source=source, line=line) from None
    except ReaderError as error:
        line = text.count("\n", 0, error.position) + 1
        problem = f"character #x{error.character:02x} is not allowed"
        raise PolicyError(f"malformed YAML: {problem}", source=source, line=line) from None
    except (YAMLError, ValueError, RecursionError, LookupError, TypeError, AttributeError) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise PolicyError(f"malformed YAML: {reason}", source=source, line=1) from None
    document = Document(None, source)
    if node is not None:
        document.data = _Builder(document).build(node, ())
    return document


def mapping_document(data: Any, source: str = "") -> Document:
    """Wraps plain data that did not come from a file."""
    return Document(data, source)


def _check_depth(text: str, source: str) -> None:
    """Refuses deep nesting before anything recursive sees it."""
    depth = 0
    for event in YAML(typ="safe", pure=True).parse(text):
        name = type(event).__name__
        if name in {"MappingStartEvent", "SequenceStartEvent"}:
            depth += 1
            if depth > MAX_DEPTH:
                raise PolicyError(
                    f"nested deeper than {MAX_DEPTH} levels",
                    source=source,
                    line=event.start_mark.line + 1,
                )
        elif name in {"MappingEndEvent", "SequenceEndEvent"}:
            depth -= 1


class _Builder:
    """Turns composed nodes into plain data and fills the document's lines."""

    def __init__(self, document: Document) -> None:
        self.document = document
        self.count = 0
        self.open: list[int] = []

    def fail(self, node: Node, path: Path_, message: str) -> NoReturn:
        raise self.error(node, path, message)

    def error(self, node: Node, path: Path_, message: str) -> PolicyError:
        line = node.start_mark.line + 1
        return PolicyError(message, source=self.document.source, line=line, path=show_path(path))

    def build(self, node: Node, path: Path_) -> Any:
        self.document.lines.setdefault(path, node.start_mark.line + 1)
        self.count += 1
        if self.count > MAX_NODES:
            self.fail(node, path, f"has more than {MAX_NODES} values (aliases counted)")
        if isinstance(node, ScalarNode):
            return self.scalar(node, path)
        if id(node) in self.open or len(self.open) > MAX_DEPTH:
            self.fail(node, path, "an alias contains itself or nests too deep")
        self.open.append(id(node))
        value = self.mapping(node, path) if isinstance(node, MappingNode) else None
        if isinstance(node, SequenceNode):
            if _tag(node) != "seq":
                self.fail(node, path, f"tag {node.tag} is not allowed")
            value = [self.build(item, (*path, i)) for i, item in enumerate(node.value)]
        self.open.pop()
        return value

    def mapping(self, node: MappingNode, path: Path_) -> dict[str, Any]:
        if _tag(node) != "map":
            self.fail(node, path, f"tag {node.tag} is not allowed")
        result: dict[str, Any] = {}
        for key_node, value_node in node.value:
            if isinstance(key_node, ScalarNode) and _tag(key_node) == "merge":
                self.fail(key_node, path, "merge keys (<<) are not supported; repeat the fields")
            if not isinstance(key_node, ScalarNode) or _tag(key_node) != "str":
                shown = repr(key_node.value) if isinstance(key_node, ScalarNode) else "a collection"
                self.fail(key_node, path, f"key {shown} is not a string; quote it")
            key = key_node.value
            here, line = (*path, key), key_node.start_mark.line + 1
            if key in result:
                first = self.document.lines[here]
                self.fail(key_node, path, f"duplicate key {key!r} (lines {first} and {line})")
            self.document.lines[here] = line
            result[key] = self.build(value_node, here)
        return result

    def scalar(self, node: ScalarNode, path: Path_) -> Any:
        tag, text = _tag(node), node.value
        if tag == "str":
            return text
        if tag == "null":
            return None
        if tag == "bool" and text.lower() in {"true", "false"}:
            return text.lower() == "true"
        if tag == "bool":
            return text
        try:
            if tag == "int":
                return int(text.replace("_", ""), 0 if text.lstrip("+-").startswith("0") else 10)
            if tag == "float":
                value = float(text.replace("_", "").lower().replace(".inf", "inf"))
                if math.isfinite(value):
                    return value
        except ValueError:
            pass
        if tag not in {"int", "float", "timestamp", "value"}:
            self.fail(node, path, f"tag {node.tag} is not allowed")
        raise self.error(node, path, f"value {text[:40]!r} is not a plain value; quote it")


def _tag(node: Node) -> str:
    return str(node.tag).removeprefix(_TAG)


def check_plain(document: Document, value: Any, path: Path_ = ()) -> Any:
    """Returns a copy of plain data, refusing anything that a YAML file could not hold."""
    if len(path) > MAX_DEPTH:
        document.fail(path[:3], f"nested deeper than {MAX_DEPTH} levels")
    if isinstance(value, Mapping):
        for key in value:
            if not isinstance(key, str):
                document.fail(path, f"key {key!r} is not a string")
        return {key: check_plain(document, item, (*path, key)) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [check_plain(document, item, (*path, i)) for i, item in enumerate(value)]
    if value is None or isinstance(value, str | bool | int):
        return value
    if isinstance(value, float) and math.isfinite(value):
        return value
    raise document.error(
        path, f"value {value!r} of type {type(value).__name__} is not a plain value"
    )
