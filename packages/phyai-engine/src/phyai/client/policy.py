"""A connection to a policy server, for code on a robot."""

import time
from collections.abc import Mapping
from typing import Any, Self

import numpy as np
from websockets.exceptions import ConnectionClosed, InvalidHandshake, InvalidStatus
from websockets.protocol import State
from websockets.sync.client import ClientConnection, connect

from phyai.client.codec import Dialect, packb, unpackb
from phyai.client.errors import ServerError
from phyai.client.scan import Limits

OPTIONS_KEY = "__options__"
_RETRY_S = 0.5
_REPLY_LIMITS = Limits(frame_bytes=256 * 2**20)


class PolicyClient:
    """Asks a server for action chunks; also talks to servers of openpi.

    A connection that broke is opened again at the next request.

    Args:
        host: Address, or a whole ``ws://`` or ``wss://`` address.
        port: Port; None when `host` has it.
        api_key: Key that the server asks for.
        timeout_s: Longest wait for one reply.
        connect_timeout_s: How long to try while the server can not be reached.
        session: Name under which the server keeps the last chunk beyond a connection.
        dialect: Spelling of arrays.

    Attributes:
        metadata: What the server said about its policy.

    Raises:
        TimeoutError: The server can not be reached in time.
        ServerError: The server refused the connection, for example for a wrong key.
    """

    def __init__(
        self,
        host: str = "127.0.0.1",
        port: int | None = 8000,
        *,
        api_key: str | None = None,
        timeout_s: float = 30.0,
        connect_timeout_s: float = 30.0,
        session: str | None = None,
        dialect: Dialect = Dialect.OPENPI,
    ) -> None:
        address = host if host.startswith("ws") else f"ws://{host}"
        self._address = address if port is None else f"{address}:{port}"
        self._headers = {"Authorization": f"Api-Key {api_key}"} if api_key else None
        self._timeout_s, self._connect_timeout_s = timeout_s, connect_timeout_s
        self._session, self._dialect = session, dialect
        self._reset = False
        self._socket: ClientConnection | None = None
        self.metadata: dict[str, Any] = {}
        self._connect()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def infer(
        self,
        observation: Mapping[str, Any],
        *,
        num_steps: int | None = None,
        seed: int | None = None,
        noise: np.ndarray | None = None,
        rtc: Mapping[str, Any] | None = None,
        video: bool = False,
    ) -> dict[str, Any]:
        """Ask for one action chunk.

        Args:
            observation: Request keys of the server's adapter; see `metadata`.
            num_steps: Integration steps.
            seed: Seed of the noise.
            noise: Starting point float32 [chunk, max_action_dim], instead of `seed`.
            rtc: Real-time chunking: `executed`, `delay`, `horizon`, `schedule`,
                `max_guidance_weight`, `prev`.
            video: Ask for the frames that the policy predicts, too.

        Returns:
            The reply with `actions` [chunk, action_dim], `policy_timing`, `server_timing`, and if
            asked for `rtc` and `video`, uint8 [T, H, W, 3].

        Raises:
            ServerError: The server answered with an error text.
            ConnectionError: The connection broke before the reply.
            TimeoutError: No reply in time. The connection is closed, since a late reply would be
                taken for the next one.
        """
        options = {"num_steps": num_steps, "seed": seed, "noise": noise, "rtc": rtc}
        options = {name: value for name, value in options.items() if value is not None}
        if video:
            options["video"] = True
        if self._session is not None:
            options["session"] = self._session
        if self._reset:
            options["reset"] = True
        request = {**observation, OPTIONS_KEY: options} if options else dict(observation)
        reply = self._exchange(packb(request, self._dialect))
        if isinstance(reply, str):
            raise ServerError(reply)
        self._reset = False
        return unpackb(reply, _REPLY_LIMITS)

    def reset(self) -> None:
        """Begin a new episode: the next request forgets the session's last chunk."""
        self._reset = True

    def close(self) -> None:
        """Close the connection."""
        if self._socket is not None:
            self._socket.close()
            self._socket = None

    def _exchange(self, frame: bytes) -> bytes | str:
        socket = self._socket
        if socket is None or socket.state is not State.OPEN:
            socket = self._connect()
        try:
            socket.send(frame)
            return socket.recv(timeout=self._timeout_s)
        except ConnectionClosed as error:
            self._socket = None
            raise ConnectionError(f"the connection to {self._address} broke: {error}") from None
        except TimeoutError:
            self.close()
            raise TimeoutError(
                f"{self._address} did not reply within {self._timeout_s:g} s"
            ) from None
        except BaseException:
            # Interrupted, for example by Ctrl-C: here, too, a late reply must not be the next one.
            self.close()
            raise

    def _connect(self) -> ClientConnection:
        deadline = time.monotonic() + self._connect_timeout_s
        while True:
            try:
                socket = self._open()
                break
            except (OSError, ConnectionClosed) as error:
                if time.monotonic() + _RETRY_S > deadline:
                    raise TimeoutError(
                        f"no policy server answers at {self._address}: {error}"
                    ) from None
                time.sleep(_RETRY_S)
        self._socket = socket
        return socket

    def _open(self) -> ClientConnection:
        try:
            socket = connect(
                self._address,
                compression=None,
                max_size=_REPLY_LIMITS.frame_bytes,
                additional_headers=self._headers,
                proxy=None,
            )
        except InvalidStatus as error:
            text = error.response.body.decode(errors="replace").strip()
            raise ServerError(f"HTTP {error.response.status_code}: {text}") from None
        except InvalidHandshake as error:
            raise ServerError(str(error)) from None
        try:
            hello = socket.recv(timeout=self._timeout_s)
            if isinstance(hello, str):
                raise ServerError(hello)
            self.metadata = unpackb(hello, _REPLY_LIMITS)
        except BaseException:
            socket.close()
            raise
        return socket
