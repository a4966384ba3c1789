"""Work that can be left out without changing the result."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Savings:
    """Which exact simplifications are used.

    Attributes:
        drop_absent_cameras: skip the vision tower and the tokens of a camera that is not there,
            instead of computing them and masking them.
        pack_prompt: compute only the real tokens of the prompt, instead of all slots.
        lean_last_layer: of the last language layer load and compute only keys and values, the one
            part of it that the action expert reads.
        precompute_modulation: run the time network once for each step count instead of in
            every step.
    """

    drop_absent_cameras: bool = True
    pack_prompt: bool = True
    lean_last_layer: bool = True
    precompute_modulation: bool = True

    @classmethod
    def all(cls) -> "Savings":
        """Every saving on."""
        return cls()

    @classmethod
    def none(cls) -> "Savings":
        """Every saving off: the plain computation."""
        return cls(False, False, False, False)
