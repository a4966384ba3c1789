"""The client's connection: what happens to it when a request ends otherwise than by its reply."""

import threading

import numpy as np
import pytest
from websockets.sync.server import serve

from phyai.client import PolicyClient, packb, unpackb

from .conftest import request


class Scripted:
    """A server that does what it is told at each request: reply, hang up, or say nothing."""

    def __init__(self, *script):
        self.script, self.requests, self.connections = list(script), [], 0
        self.closed = threading.Event()

    def __enter__(self):
        self._server = serve(self._answer, "127.0.0.1", 0)
        self.port = self._server.socket.getsockname()[1]
        self._thread = threading.Thread(target=self._server.serve_forever)
        self._thread.start()
        return self

    def __exit__(self, *exception):
        self._server.shutdown()
        self._thread.join(120)

    def _answer(self, connection):
        self.connections += 1
        connection.send(packb({"model": "scripted"}))
        for frame in connection:
            self.requests.append(unpackb(frame))
            if self.script.pop(0) == "reply":
                number = np.float32([[len(self.requests)]])
                connection.send(packb({"actions": number}))
                if self.script[:1] == ["hang up"]:
                    self.script.pop(0)
                    break
        connection.close()
        self.closed.set()


def test_a_connection_that_the_server_closed_is_opened_again_at_the_next_request():
    with Scripted("reply", "hang up", "reply") as server, PolicyClient(port=server.port) as client:
        assert client.infer(request())["actions"] == 1
        assert server.closed.wait(120)
        client._socket.recv_events_thread.join(120)
        assert client.infer(request())["actions"] == 2
        assert server.connections == 2


def test_the_reply_to_an_interrupted_request_is_not_taken_for_the_next_one(monkeypatch):
    with Scripted("silence", "reply") as server, PolicyClient(port=server.port) as client:

        def interrupt(timeout=None):
            raise KeyboardInterrupt

        monkeypatch.setattr(client._socket, "recv", interrupt)
        with pytest.raises(KeyboardInterrupt):
            client.infer(request())
        assert client.infer(request())["actions"] == 2
        assert server.connections == 2


def test_a_request_without_a_reply_in_time_ends_the_connection():
    with Scripted("silence") as server, PolicyClient(port=server.port) as client:
        client._timeout_s = 0.2
        with pytest.raises(TimeoutError, match=r"did not reply within 0\.2 s"):
            client.infer(request())
        assert client._socket is None


def test_options_are_sent_only_where_they_are_given():
    with (
        Scripted("reply", "reply") as server,
        PolicyClient(port=server.port, session="arm") as client,
    ):
        client.infer(request(), seed=3, video=True)
        client.reset()
        client.infer(request())
        assert server.requests[0]["__options__"] == {"seed": 3, "video": True, "session": "arm"}
        assert server.requests[1]["__options__"] == {"session": "arm", "reset": True}
