"""What a request may hold: options, pictures and prompts of every form."""

import io
import struct
import zlib

import numpy as np
import pytest
from PIL import Image

from phyai.client import PolicyClient, ServerError, packb

from .conftest import FakeEngine, request


def test_options(serve_fake):
    with serve_fake() as server, PolicyClient(port=server.port) as client:
        noise = np.full((6, 4), 0.25, np.float32)
        assert client.infer(request(), noise=noise)["actions"][0, 0] == 0.25
        one, two = (client.infer(request(), seed=3)["actions"] for _ in range(2))
        np.testing.assert_array_equal(one, two)
        assert client.infer(request())["actions"][0, 0] != client.infer(request())["actions"][0, 0]
        client.infer(request(), num_steps=4)
        assert server.engine.steps[-1] == 4
        with pytest.raises(ServerError, match=r"noise has shape \(5, 4\); this policy needs"):
            client.infer(request(), noise=noise[:5])
        with pytest.raises(ServerError, match="either noise or seed"):
            client.infer(request(), noise=noise, seed=1)
        with pytest.raises(
            ServerError, match="num_steps is '0', expected an integer from 1 to 100"
        ):
            client.infer(request(), num_steps=0)


@pytest.mark.parametrize("value", [np.nan, np.inf, 1e38, 1e300])
def test_numbers_that_would_overflow_in_the_model_are_refused(serve_fake, value):
    with serve_fake() as server, PolicyClient(port=server.port) as client:
        with pytest.raises(ServerError, match="noise holds values that are not finite or beyond"):
            client.infer(request(), noise=np.full((6, 4), value))
        with pytest.raises(ServerError, match="prev holds values that are not finite or beyond"):
            client.infer(request(), rtc={"prev": np.full((3, 2), value)})
        assert client.infer(request(), noise=np.full((6, 4), -1e9))["actions"].shape == (6, 2)


def test_text_that_is_none_is_a_bad_request(serve_fake):
    with serve_fake() as server, PolicyClient(port=server.port) as client:
        frame = packb(request(prompt=np.array("xy")))
        text = "xy".encode("utf-32-le")
        assert text in frame
        client._socket.send(frame.replace(text, b"\xff" * 8))
        assert "no characters" in client._socket.recv()
        assert client.infer(request())["actions"].shape == (6, 2)


@pytest.mark.parametrize("kind", ["JPEG", "PNG"])
def test_encoded_pictures(serve_fake, kind):
    pixels = np.full((16, 24, 3), (200, 40, 90), np.uint8)
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, kind, quality=95)
    data = file.getvalue()
    with serve_fake() as server, PolicyClient(port=server.port) as client:
        for value in (data, np.frombuffer(data, np.uint8)):
            client.infer(request(front=value))
            seen = server.engine.observations[-1].images["front"]
            assert seen.shape == (16, 24, 3)
            assert np.abs(seen.astype(int) - pixels).max() < 12
        with pytest.raises(ServerError, match="can not be decoded"):
            client.infer(request(front=data[: len(data) // 2]))


def test_a_picture_that_claims_to_be_huge_is_refused_before_it_is_decoded(serve_fake):
    head = struct.pack(">IIBBBBB", 50_000, 50_000, 8, 2, 0, 0, 0)
    chunks = [(b"IHDR", head), (b"IDAT", zlib.compress(b"")), (b"IEND", b"")]
    bomb = b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))
        for name, data in chunks
    )
    with (
        serve_fake() as server,
        PolicyClient(port=server.port) as client,
        pytest.raises(ServerError, match="pixels"),
    ):
        client.infer(request(front=bomb))


def test_prompts_of_every_kind(serve_fake):
    with serve_fake() as server, PolicyClient(port=server.port) as client:
        for prompt in ("go π", "go π".encode(), np.array("go π"), np.array(["go π"])):
            client.infer(request(prompt=prompt))
            assert server.engine.observations[-1].task == "go π"
        without = request()
        without["task"] = without.pop("prompt")
        client.infer(without)
        with pytest.raises(ServerError, match="no UTF-8"):
            client.infer(request(prompt=b"\xff"))


@pytest.mark.parametrize("family", ["pi05", "pi0"])
def test_adapter_of_the_preset_is_taken(serve_fake, family):
    engine = FakeEngine(f"openpi/{family}_libero", state_dim=8)
    with serve_fake(engine) as server, PolicyClient(port=server.port) as client:
        assert client.metadata["adapter"] == "libero"
        assert client.metadata["control_hz"] == 20.0
        picture = np.zeros((8, 8, 3), np.uint8)
        keys = {"observation/image": picture, "observation/wrist_image": picture}
        client.infer({**keys, "observation/state": np.zeros(8), "prompt": "go"})
        assert set(server.engine.observations[-1].images) == {"front", "hand"}


def test_a_preset_of_no_known_robot_has_the_generic_adapter(serve_fake):
    with (
        serve_fake(FakeEngine("openpi/pi05_arm")) as server,
        PolicyClient(port=server.port) as client,
    ):
        assert client.metadata["adapter"] == "generic"
