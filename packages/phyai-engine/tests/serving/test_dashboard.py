"""The page in a real browser, where there is one."""

import shutil
import subprocess

import numpy as np
import pytest
from PIL import Image

from phyai.client import PolicyClient

from .conftest import request

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "chrome")
BROWSER = next(filter(None, map(shutil.which, BROWSERS)), None)


def browse(*words):
    common = ("--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars")
    waiting = ("--virtual-time-budget=3000", "--window-size=1100,900")
    return subprocess.run(
        [BROWSER, *common, *waiting, *words],
        capture_output=True,
        text=True,
        timeout=300,
        check=True,
    )


@pytest.mark.skipif(BROWSER is None, reason="no Chromium on this machine")
def test_the_page_shows_pictures_histogram_and_chunk(serve_fake, tmp_path):
    red, blue = (np.full((8, 8, 3), colour, np.uint8) for colour in ((250, 0, 0), (0, 0, 250)))
    with serve_fake() as server, PolicyClient(port=server.port) as client:
        for number in range(3):
            client.infer(request(number, front=red, hand=blue, prompt="reach <b>it</b>"))
        address = f"http://127.0.0.1:{server.port}/dashboard"
        page = browse("--dump-dom", address).stdout
        picture = tmp_path / "page.png"
        browse(f"--screenshot={picture}", address)
    assert 'data-loaded="true"' in page
    assert page.count("<polyline") == 2
    assert 'alt="front"' in page
    assert "reach &lt;b&gt;it&lt;/b&gt;" in page
    assert "1 of 1" in page
    pixels = np.asarray(Image.open(picture).convert("RGB")).astype(int).reshape(-1, 3)
    for colour in ((250, 0, 0), (0, 0, 250), (47, 111, 176)):
        near = (np.abs(pixels - colour).max(1) < 12).sum()
        assert near > 200, colour
