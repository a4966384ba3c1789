"""The error of reading processor files and of turning observations into model inputs."""


class ProcessingError(ValueError):
    """An observation, processor file, tokenizer or statistic that can not be used as it is."""
