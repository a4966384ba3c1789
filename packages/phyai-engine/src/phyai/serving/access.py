"""Who may talk to the server."""

import base64
import binascii
import hmac
from ipaddress import ip_address

from websockets.datastructures import Headers


def sent_key(headers: Headers) -> str | None:
    """Return the key of a request's Authorization header.

    ``Api-Key KEY`` is what openpi's client sends; ``Bearer KEY`` and, for browsers, ``Basic`` with
    the key as password are read too.
    """
    values = headers.get_all("Authorization")
    if len(values) != 1:
        return None
    scheme, _, value = values[0].partition(" ")
    if scheme.lower() in ("api-key", "bearer"):
        return value.strip()
    if scheme.lower() == "basic":
        try:
            return base64.b64decode(value, validate=True).decode().partition(":")[2]
        except (binascii.Error, UnicodeDecodeError):
            return None
    return None


def allowed(expected: str | None, headers: Headers) -> bool:
    """Return whether a request has the key; the comparison takes the same time for every key."""
    if expected is None:
        return True
    sent = sent_key(headers)
    return sent is not None and hmac.compare_digest(sent.encode(), expected.encode())


def is_loopback(host: str) -> bool:
    """Return whether only this machine can reach an address."""
    if host == "localhost":
        return True
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return False
