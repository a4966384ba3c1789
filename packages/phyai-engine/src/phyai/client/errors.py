"""What a client of the server can run into."""


class CodecError(ValueError):
    """A frame that is malformed, too large, too deep or of a kind that is never read."""


class ServerError(RuntimeError):
    """The server answered a request with an error text.

    Attributes:
        text: What the server sent.
    """

    def __init__(self, text: str) -> None:
        super().__init__(f"the server answered with an error:\n{text}")
        self.text = text
