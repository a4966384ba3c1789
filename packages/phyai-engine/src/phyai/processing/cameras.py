"""Camera names: short, full and aliased spellings to positions in checkpoint order."""

import difflib
from collections.abc import Mapping
from dataclasses import dataclass

from phyai.processing.errors import ProcessingError

PREFIX = "observation.images."


def short_name(name: str) -> str:
    """Drops LeRobot's `observation.images.` from a camera name."""
    return name.removeprefix(PREFIX)


@dataclass(frozen=True)
class CameraNames:
    """The cameras of a policy.

    Attributes:
        cameras: Short names in checkpoint order.
        aliases: Other accepted names to short names.
        ignored: Names that are accepted and not used.
    """

    cameras: tuple[str, ...]
    aliases: Mapping[str, str]
    ignored: tuple[str, ...] = ()

    def index(self, name: str) -> int | None:
        """Returns the position of a camera, None for one that is ignored.

        Raises:
            ProcessingError: The name is unknown or no string; the message lists the allowed ones.
        """
        if not isinstance(name, str):
            raise ProcessingError(
                f"camera name {name!r} is {type(name).__name__}, expected one of the strings "
                f"{', '.join((*self.cameras, *self.aliases))}"
            )
        short = short_name(name)
        if short in self.cameras:
            return self.cameras.index(short)
        if short in self.aliases:
            return self.cameras.index(self.aliases[short])
        if short in self.ignored:
            return None
        allowed = (*self.cameras, *self.aliases)
        near = difflib.get_close_matches(short, allowed, n=1)
        hint = f" Did you mean {near[0]!r}?" if near else ""
        raise ProcessingError(f"unknown camera {name!r}; allowed: {', '.join(allowed)}.{hint}")

    def assign[T](self, images: Mapping[str, T]) -> dict[int, T]:
        """Maps positions to the frames of one observation.

        Raises:
            ProcessingError: A name is unknown, two names mean one camera, or no camera is given.
        """
        frames: dict[int, T] = {}
        names: dict[int, str] = {}
        for name, frame in images.items():
            index = self.index(name)
            if index is None:
                continue
            if index in frames:
                raise ProcessingError(
                    f"{names[index]!r} and {name!r} are both camera {self.cameras[index]!r}; "
                    "send one of them"
                )
            frames[index], names[index] = frame, name
        if not frames:
            raise ProcessingError(
                f"no camera image; send at least one of: {', '.join(self.cameras)}"
            )
        return frames
