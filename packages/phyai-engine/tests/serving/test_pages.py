"""What the server answers over plain HTTP."""

import io
import json

import numpy as np
from PIL import Image

from phyai.client import PolicyClient

from .conftest import request


def test_pages(serve_fake):
    with serve_fake() as server, PolicyClient(port=server.port) as client:
        assert server.get("/readyz") == (200, b"ready\n")
        assert server.get("/nothing")[0] == 404
        assert json.loads(server.get("/dashboard/data")[1])["last"] is None
        assert server.get("/dashboard/image/front")[0] == 404
        client.infer(request(), seed=1)
        data = json.loads(server.get("/dashboard/data")[1])
        assert data["connections"] == 1
        assert data["latency"]["count"] == sum(data["latency"]["counts"]) == 1
        assert data["last"]["images"] == ["front"]
        assert np.array(data["last"]["actions"]).shape == (6, 2)
        picture = Image.open(io.BytesIO(server.get("/dashboard/image/front")[1]))
        assert np.asarray(picture).tolist() == np.full((8, 8, 3), 7).tolist()
        assert json.loads(server.get("/metadata")[1])["action_dim"] == 2
        assert b"fake \xc2\xb7 generic" in server.get("/dashboard")[1]
        assert server.metric('phyai_requests_total{outcome="ok"}') == 1
        assert server.metric("phyai_connections") == 1
        assert server.metric("phyai_batch_size_sum") == 1
        assert server.metric('phyai_stage_seconds_count{stage="queue"}') == 1


def test_only_pictures_are_shown_as_pictures(serve_fake):
    file = io.BytesIO()
    Image.new("RGB", (8, 8)).save(file, "PNG")
    with serve_fake() as server, PolicyClient(port=server.port) as client:
        client.infer(request(front=file.getvalue(), prompt=b"go"))
        assert json.loads(server.get("/dashboard/data")[1])["last"]["images"] == ["front"]
        assert server.get("/dashboard/image/front")[0] == 200
        assert server.get("/dashboard/image/prompt")[0] == 404


def test_the_page_can_be_turned_off(serve_fake):
    with serve_fake(dashboard=False) as server:
        assert server.get("/dashboard")[0] == 404
        assert server.get("/dashboard/data")[0] == 404


def test_an_unready_engine_is_not_ready(serve_fake):
    with serve_fake() as server:
        server.server._engines = lambda: ["loading"]
        assert server.get("/readyz") == (503, b"loading\n")
        assert server.get("/healthz")[0] == 200
