"""The error of weight files."""


class WeightFileError(ValueError):
    """A weight file is damaged, contradicts itself or holds what this version cannot read."""
