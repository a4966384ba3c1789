"""Adapters for new robots, written down in YAML."""

from pathlib import Path

from phyai.dispatch.policy_yaml import Document, read_document
from phyai.serving.adapters import PROMPT_KEYS, Adapter
from phyai.serving.vectors import ActionPart, StatePart
from phyai.serving.yaml_section import Section

SCHEMA = "phyai.adapter/v1"
_KEYS = (
    "schema",
    "name",
    "images",
    "ignored_images",
    "state",
    "prompt",
    "actions",
    "control_hz",
    "execute",
    "reset_pose",
)
_STATE = ("key", "size", "scale", "offset")
_ACTION = ("name", "size", "relative", "scale", "offset", "threshold", "clip")
_MAX_COLUMNS = 256


def read_adapter(path: str | Path) -> Adapter:
    """Read an adapter file.

    Raises:
        PolicyError: The file can not be used; the message names the line and what is allowed.
        OSError: The file can not be read.
    """
    return adapter_from(read_document(path))


def adapter_from(document: Document) -> Adapter:
    """Return the adapter that a document describes; see `read_adapter`."""
    top = Section(document, (), _KEYS)
    if top.needed("schema") != SCHEMA:
        top.fail("schema", f"expected {SCHEMA!r}")
    images = top.strings("images")
    if not images:
        top.fail("images", "name at least one request key and its camera, such as 'front: base'")
    states = tuple(_state(item) for item in top.items("state", _STATE))
    prompt = Section(document, ("prompt",), ("key", "default")) if "prompt" in top else None
    key = prompt.text("key") if prompt else None
    return Adapter(
        name=top.needed("name"),
        cameras=images,
        ignored=top.texts("ignored_images"),
        state_keys=(tuple(part.key for part in states),),
        prompt_keys=PROMPT_KEYS if key is None else (key,),
        default_prompt=prompt.text("default") if prompt else None,
        state_parts=states,
        action_parts=tuple(_action(item) for item in top.items("actions", _ACTION)),
        control_hz=top.number("control_hz", None, 1e-3, 1e5),
        execute=top.integer("execute", None, 1, 10_000),
        reset_pose=top.numbers("reset_pose", None, None),
    )


def _state(item: Section) -> StatePart:
    size = item.integer("size", 1, 1, _MAX_COLUMNS)
    scale, offset = item.numbers("scale", size, 1.0), item.numbers("offset", size, 0.0)
    return StatePart(item.needed("key"), size, scale, offset)


def _action(item: Section) -> ActionPart:
    size = item.integer("size", 1, 1, _MAX_COLUMNS)
    clip = item.numbers("clip", 2, None)
    if clip is not None and not (isinstance(clip, tuple) and clip[0] < clip[1]):
        item.fail("clip", "expected the lowest and the highest value, such as [0, 1]")
    return ActionPart(
        name=item.needed("name"),
        size=size,
        relative=item.flag("relative"),
        scale=item.numbers("scale", size, 1.0),
        offset=item.numbers("offset", size, 0.0),
        threshold=item.number("threshold", None),
        clip=clip,
    )
