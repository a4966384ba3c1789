"""Messages between a server and its replicas: length, then a value of the codec."""

import asyncio
import struct
from collections.abc import Mapping
from typing import Any

from phyai.client.codec import packb, unpackb
from phyai.client.scan import Limits

_LENGTH = struct.Struct(">I")
# Wider than what a client may send, for what the server adds.
INNER_LIMITS = Limits(frame_bytes=2**31, values=100_000, depth=24)


async def read_message(reader: asyncio.StreamReader) -> dict[str, Any] | None:
    """Return the next message, None at the end of the stream.

    Raises:
        CodecError: The other side wrote no message.
    """
    try:
        (length,) = _LENGTH.unpack(await reader.readexactly(_LENGTH.size))
        return unpackb(await reader.readexactly(length), INNER_LIMITS)
    except (asyncio.IncompleteReadError, ConnectionError):
        return None


def write_message(writer: asyncio.StreamWriter, message: Mapping[str, Any]) -> None:
    """Put a message into the stream's buffer; follow it with ``drain``."""
    frame = packb(message)
    writer.write(_LENGTH.pack(len(frame)))
    writer.write(frame)
