"""The one error of weight loading."""


class CheckpointError(ValueError):
    """A checkpoint cannot be loaded as asked; the text says which file and tensor, and why."""
