"""The language of the task: colour names, their paint and the ways to ask for a disc."""

COLOURS: dict[str, tuple[float, float, float]] = {
    "red": (0.83, 0.13, 0.17),
    "green": (0.13, 0.60, 0.28),
    "blue": (0.14, 0.36, 0.84),
    "yellow": (0.98, 0.84, 0.18),
    "purple": (0.55, 0.24, 0.70),
    "orange": (0.97, 0.52, 0.09),
}
COLOUR_NAMES: tuple[str, ...] = tuple(COLOURS)

TEMPLATES: tuple[str, ...] = (
    "reach the {colour} disc",
    "go to the {colour} one",
    "move the pointer to the {colour} disc",
    "touch the {colour} disc",
    "point at the {colour} circle",
    "move to the {colour} target",
    "please reach the {colour} circle",
    "put the pointer on the {colour} disc",
)


def instruction(template: int, colour: int) -> str:
    """Words of one instruction.

    Args:
        template: index into `TEMPLATES`.
        colour: index into `COLOUR_NAMES`.

    Raises:
        IndexError: an index is outside its table.
    """
    return TEMPLATES[template].format(colour=COLOUR_NAMES[colour])
