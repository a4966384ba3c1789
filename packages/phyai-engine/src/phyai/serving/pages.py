"""What the server answers to plain HTTP GET requests on the port of the WebSocket."""

import asyncio
import html
import io
import itertools
import json
from collections.abc import Callable, Mapping, Sequence
from http import HTTPStatus
from importlib.resources import files
from typing import Any
from urllib.parse import unquote, urlsplit

import numpy as np
from PIL import Image
from websockets.datastructures import Headers
from websockets.http11 import Request, Response

from phyai.serving.images import as_image, is_file
from phyai.serving.jobs import RequestError
from phyai.serving.metrics import CONTENT_TYPE
from phyai.serving.service import LastExchange, Service

OPEN_PATHS = frozenset({"/healthz", "/readyz"})
_PAGE = "/dashboard"
_IMAGE = "/dashboard/image/"
_EDGES_MS = (0, 5, 10, 15, 20, 30, 40, 60, 80, 120, 200, 500)
_THUMBNAIL = 224


def response(status: HTTPStatus, body: str | bytes, content_type: str = "text/plain") -> Response:
    """Return a whole HTTP response."""
    data = body.encode() if isinstance(body, str) else body
    text = content_type.startswith("text/") and "charset" not in content_type
    headers = Headers(
        {
            "Content-Type": f"{content_type}; charset=utf-8" if text else content_type,
            "Content-Length": str(len(data)),
            "Connection": "close",
            "Cache-Control": "no-store",
            "X-Content-Type-Options": "nosniff",
            "Content-Security-Policy": "default-src 'self' 'unsafe-inline'",
        }
    )
    return Response(status.value, status.phrase, headers, data)


class Pages:
    """The pages of a server.

    Args:
        service: Whose numbers are shown.
        metadata: Of the policy.
        state: Returns ``loading``, ``ready``, ``hangs`` or ``draining``, and the engines' states.
    """

    def __init__(
        self, service: Service, metadata: Mapping[str, Any], state: Callable[[], dict[str, Any]]
    ) -> None:
        self._service, self._metadata, self._state = service, metadata, state

    async def answer(self, request: Request) -> Response | None:
        """Return the response to a path, None for one that has no page."""
        path = unquote(urlsplit(request.path).path)
        if path == "/healthz":
            return response(HTTPStatus.OK, "OK\n")
        if path == "/readyz":
            state = self._state()["state"]
            ready = HTTPStatus.OK if state == "ready" else HTTPStatus.SERVICE_UNAVAILABLE
            return response(ready, f"{state}\n")
        if path == "/metadata":
            return _json(self._metadata)
        if path == "/metrics":
            text = self._service.metrics.exposition()
            return response(HTTPStatus.OK, text, CONTENT_TYPE)
        if path.startswith(_PAGE) and self._service.config.dashboard:
            return await self._dashboard(path)
        return None

    async def _dashboard(self, path: str) -> Response | None:
        if path == _PAGE:
            page = files("phyai.serving").joinpath("dashboard.html").read_text(encoding="utf-8")
            title = html.escape(f"{self._metadata.get('model')} · {self._metadata.get('adapter')}")
            return response(HTTPStatus.OK, page.replace("{{title}}", title), "text/html")
        if path == f"{_PAGE}/data":
            return _json(self._data())
        last = self._service.last
        if path.startswith(_IMAGE) and last is not None:
            pictures = pictures_in(last.request)
            name = path.removeprefix(_IMAGE)
            if name in pictures:
                try:
                    data = await asyncio.to_thread(as_png, name, pictures[name])
                except RequestError as error:
                    return response(HTTPStatus.NOT_FOUND, f"{error}\n")
                return response(HTTPStatus.OK, data, "image/png")
        return None

    def _data(self) -> dict[str, Any]:
        service = self._service
        last = service.last
        return {
            **self._state(),
            "metadata": self._metadata,
            "waiting": service.backend.waiting,
            "sessions": len(service.sessions),
            "latency": latency_summary(list(service.metrics.recent_ms)),
            "last": None if last is None else _last(last),
        }


def latency_summary(recent_ms: Sequence[float]) -> dict[str, Any]:
    """Return quantiles in milliseconds and a histogram of recent requests."""
    edges = [*_EDGES_MS, float("inf")]
    counts = np.histogram(recent_ms, bins=edges)[0].tolist()
    names = [f"{low}-{high}" for low, high in itertools.pairwise(_EDGES_MS)]
    quantiles = np.quantile(recent_ms, (0.5, 0.9, 0.99)).tolist() if recent_ms else [None] * 3
    return {
        "count": len(recent_ms),
        **dict(zip(("p50_ms", "p90_ms", "p99_ms"), quantiles, strict=True)),
        "bins": [*names, f">{_EDGES_MS[-1]}"],
        "counts": counts,
    }


def pictures_in(request: Mapping[str, Any]) -> dict[str, Any]:
    """Return what looks like pictures in a request, by key."""
    nested = request.get("images")
    values = {**request, **(nested if isinstance(nested, Mapping) else {})}
    return {
        name: value
        for name, value in values.items()
        if is_file(value) or (isinstance(value, np.ndarray) and value.ndim >= 3)
    }


def as_png(name: str, value: Any) -> bytes:
    """Return a picture of a request as a small PNG file.

    Raises:
        RequestError: It is no picture.
    """
    array = as_image(name, value)
    if array.shape[0] == 3 and array.shape[2] != 3:
        array = array.transpose(1, 2, 0)
    if array.dtype != np.uint8:
        array = (np.clip(array, 0.0, 1.0) * 255).astype(np.uint8)
    if array.shape[2] != 3:
        raise RequestError(f"image {name!r} has {array.shape[2]} channels")
    picture = Image.fromarray(np.ascontiguousarray(array))
    picture.thumbnail((_THUMBNAIL, _THUMBNAIL))
    target = io.BytesIO()
    picture.save(target, "PNG")
    return target.getvalue()


def _last(last: LastExchange) -> dict[str, Any]:
    return {
        "images": sorted(pictures_in(last.request)),
        "prompt": last.prompt,
        "actions": [[round(float(value), 5) for value in row] for row in last.actions],
    }


def _json(value: Any) -> Response:
    body = json.dumps(value, default=str, allow_nan=False)
    return response(HTTPStatus.OK, body, "application/json")
