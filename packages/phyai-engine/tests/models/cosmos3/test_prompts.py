"""Texts: the sentences, the JSON caption, and where the two styles differ."""

import json

import pytest

from phyai.models.cosmos3.domains import Viewpoint
from phyai.models.cosmos3.prompts import (
    DROID_VIEWS,
    ClipFormat,
    PromptStyle,
    is_json_caption,
    json_prompt,
    plain_prompt,
)

DROID = ClipFormat(33, 15.0, 544, 736)


def test_droid_text():
    text = plain_prompt("pick up the cup", DROID, viewpoint=Viewpoint.CONCAT, views=DROID_VIEWS)
    assert text == (
        "pick up the cup. This video contains concatenated views from multiple camera "
        "perspectives. The top row is from the wrist-mounted camera. The bottom row contains two "
        "horizontally concatenated third-person perspective views of the scene from opposite "
        "sides, with the robot visible. The video is 2.0 seconds long and is of 15 FPS. This video "
        "is of 544x736 resolution."
    )


@pytest.mark.parametrize(
    ("style", "text", "start"),
    [
        (PromptStyle.NATIVE, "Go", "Go. The video is 7.0"),
        (PromptStyle.NATIVE, "Go.", "Go. The video is 7.0"),
        (PromptStyle.NATIVE, "Go..", "Go.. The video is 7.0"),
        (PromptStyle.NATIVE, "Go!", "Go!. The video is 7.0"),
        (PromptStyle.NATIVE, "", "The video is 7.0"),
        (PromptStyle.DIFFUSERS, "Go..", "Go. The video is 7.9"),
        (PromptStyle.DIFFUSERS, "Go", "Go. The video is 7.9"),
        (PromptStyle.DIFFUSERS, "", "The video is 7.9"),
    ],
)
def test_joining_and_duration(style, text, start):
    said = plain_prompt(text, ClipFormat(189, 24.0, 720, 1280), style=style)
    assert said == f"{start} seconds long and is of 24 FPS. This video is of 720x1280 resolution."


def test_picture_has_no_duration():
    picture = ClipFormat(1, 24.0, 1024, 768)
    assert plain_prompt("A cat", picture) == "A cat. This image is of 1024x768 resolution."


def test_inverse_sentences_of_diffusers():
    text = plain_prompt(
        "ugly", ClipFormat(5, 10.0, 16, 32), style=PromptStyle.DIFFUSERS, negative=True
    )
    assert text == (
        "ugly. The video is not 0.5 seconds long and is not of 10 FPS. This video is not of 16x32 "
        "resolution."
    )


def test_json_caption_as_the_model_was_trained_on():
    text = json_prompt("Pick up", ClipFormat(5, 15, 192, 320), viewpoint=Viewpoint.EGO)
    assert text == (
        '{"cinematography": {"framing": "This video is captured from a first-person perspective '
        'looking at the scene."}, "actions": [{"time": "0:00-0:00", "description": "Pick up."}], '
        '"duration": "0s", "fps": 15.0, "resolution": {"H": 192, "W": 320}, "aspect_ratio": "16,9"}'
    )


def test_json_caption_of_droid():
    caption = json.loads(
        json_prompt("Open it!", DROID, viewpoint=Viewpoint.CONCAT, views=DROID_VIEWS, idle_frame=7)
    )
    assert list(caption) == [
        "cinematography",
        "actions",
        "duration",
        "fps",
        "resolution",
        "aspect_ratio",
    ]
    assert caption["cinematography"]["framing"] == f"{Viewpoint.CONCAT.sentence} {DROID_VIEWS}"
    assert caption["actions"] == [{"time": "0:00-0:02", "description": "Open it!", "idle_frame": 7}]
    assert caption["duration"] == "2s"
    assert caption["resolution"] == {"H": 544, "W": 736}
    assert caption["aspect_ratio"] == "4,3"


def test_json_caption_drops_empty_fields_and_counts_minutes():
    caption = json.loads(json_prompt("  ", ClipFormat(1861, 24, 832, 480), viewpoint=None))
    assert "cinematography" not in caption
    assert caption["actions"] == [{"time": "0:00-1:18"}]
    assert caption["duration"] == "77s"
    assert caption["aspect_ratio"] == "9,16"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ('{"a": 1}', True),
        (' {"a": 1}\n', True),
        ("{broken", False),
        ("[1]", False),
        ('"text"', False),
        ("", False),
        ('{"a":' * 100_000, False),
    ],
)
def test_which_prompts_are_json_captions(text, expected):
    assert is_json_caption(text) is expected
