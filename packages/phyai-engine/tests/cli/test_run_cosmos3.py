"""``phyai run cosmos3``: every mode, on a tiny repository, down to the pixels of the files."""

import json
import sys
import wave

import numpy as np
import pytest
import torch
from PIL import Image

from phyai.models.cosmos3.random_checkpoint import POLICY, write_random_checkpoint
from phyai.processing.video import read_video

av = pytest.importorskip("av", reason="PyAV is not installed: phyai-engine[video]")

SMALL = ("--height", 48, "--width", 64, "--frames", 9, "--steps", 2)
STATE = "0.1,-0.6,0,-2.5,0,1.9,0,0.25"


@pytest.fixture(scope="module")
def nano(tmp_path_factory):
    policy = {**POLICY, "action_chunk_size": 4}
    return write_random_checkpoint(tmp_path_factory.mktemp("nano"), policy=policy)


@pytest.fixture(scope="module")
def edge(tmp_path_factory):
    return write_random_checkpoint(tmp_path_factory.mktemp("edge"), "edge")


@pytest.fixture(scope="module")
def picture(tmp_path_factory):
    """A picture with structure, so that what is made of it is no constant."""
    path = tmp_path_factory.mktemp("pictures") / "scene.png"
    rows, columns = np.mgrid[0:48, 0:64]
    pixels = np.stack([4 * columns, 5 * rows, 255 - 4 * columns], axis=-1).astype(np.uint8)
    Image.fromarray(pixels).save(path)
    return path


@pytest.fixture
def run(phyai, nano, monkeypatch):
    """Run a mode on the CPU; ``checkpoint`` replaces Nano's."""
    monkeypatch.setenv("PHYAI_DEVICE", "cpu")
    threads = torch.get_num_threads()
    torch.set_num_threads(1)

    def start(mode, *words, checkpoint=nano, code=0):
        result = phyai("run", "cosmos3", mode, "--checkpoint", checkpoint, *words)
        assert result.code == code, result.err
        return result

    yield start
    torch.set_num_threads(threads)


def decoded(path, frames, height, width, fps):
    """The frames of a video file, after checking that they show something that moves."""
    clip = read_video(path)
    assert clip.frames.shape == (frames, height, width, 3)
    assert clip.fps == pytest.approx(fps)
    assert clip.frames.std(axis=(1, 2)).min() > 1, "a frame is constant"
    assert np.ptp(clip.frames.astype(int), axis=0).mean() > 1, "all frames are alike"
    return clip.frames


def test_text_to_video_with_sound(run, tmp_path):
    out, wav = tmp_path / "clip.mp4", tmp_path / "sound.wav"
    words = ("--prompt", "a cup falls", "--out", out, "--wav", wav, "--fps", 8, "--seed", 3)
    result = run("t2v", *words, *SMALL)
    assert "9 frames of 48x64 at 8 FPS" in result.out
    assert "2 steps, guidance 6, 4 forwards, seed 3" in result.out
    frames = decoded(out, 9, 48, 64, 8)
    with av.open(str(out)) as container:
        (audio,) = container.streams.audio
        assert (audio.rate, audio.channels) == (48_000, 2)
        heard = np.concatenate([f.to_ndarray() for f in container.decode(audio)], axis=1)
    with wave.open(str(wav)) as file:
        samples = file.getnframes()
        sound = np.frombuffer(file.readframes(samples), "<i2").reshape(-1, 2)
    # 9 frames at 8 FPS are 1.125 s: 29 latents of 1920 samples.
    assert samples == 29 * 1920
    assert sound.std(axis=0).min() > 10
    assert heard.shape[1] >= samples
    # Another seed makes another clip, the same seed the same.
    apart = []
    for seed in (3, 4):
        run("t2v", *words, "--seed", seed, *SMALL)
        apart.append(np.abs(decoded(out, 9, 48, 64, 8).astype(int) - frames).mean())
    assert apart[0] < 1 < 5 < apart[1]


def test_text_to_image(run, tmp_path):
    out = tmp_path / "picture.png"
    (tmp_path / "caption.txt").write_text("a cup\n")
    words = ("--prompt", f"@{tmp_path / 'caption.txt'}", "--out", out, "--height", 48)
    document = run("t2i", *words, "--width", 64, "--steps", 1, "--json").json
    assert document["prompt"] == "a cup. This image is of 48x64 resolution."
    assert document["image_shape"] == [48, 64, 3]
    assert document["sampling"]["guidance"] == 4.0
    pixels = np.asarray(Image.open(out))
    assert pixels.shape == (48, 64, 3)
    assert pixels.std() > 1


def test_image_to_video_begins_with_the_picture(run, picture, tmp_path):
    out = tmp_path / "clip.mkv"
    run("i2v", "--image", picture, "--prompt", "it moves", "--out", out, *SMALL)
    decoded(out, 9, 48, 64, 24)


def test_a_clip_goes_on_in_a_folder_of_pictures(run, picture, tmp_path, edge):
    clip, out = tmp_path / "clip", tmp_path / "frames"
    clip.mkdir()
    for index in range(6):
        Image.open(picture).rotate(7 * index).save(clip / f"{index}.png")
    words = ("--clip", clip, "--prompt", "it moves", "--out", out, *SMALL)
    run("v2v", *words, "--take", "first", checkpoint=edge)
    files = sorted(out.iterdir())
    assert [file.name for file in files] == [f"{index:04d}.png" for index in range(9)]
    frames = np.stack([np.asarray(Image.open(file)) for file in files])
    assert frames.shape == (9, 48, 64, 3)
    assert frames.std(axis=(1, 2)).min() > 1


def test_forward_and_inverse_dynamics(run, picture, tmp_path):
    out, actions = tmp_path / "future.mp4", tmp_path / "actions.csv"
    np.savetxt(actions, np.linspace(0, 1, 16).reshape(8, 2), delimiter=",")
    words = ("--domain", "pusht", "--prompt", "push the block", "--steps", 1)
    forward = ("--image", picture, "--actions", actions, "--out", out, *words)
    run("forward-dynamics", *forward)
    # The picture is smaller than the canvas and is not scaled up; 8 actions follow it.
    first = decoded(out, 9, 48, 64, 10)
    np.savetxt(actions, np.linspace(1, -1, 16).reshape(8, 2), delimiter=",")
    run("forward-dynamics", *forward)
    assert not np.array_equal(decoded(out, 9, 48, 64, 10), first)
    saved = tmp_path / "found.npz"
    inverse = ("--clip", out, *words, "--chunk", 4, "--out", saved, "--json")
    document = run("inverse-dynamics", *inverse).json
    assert document["shape"] == [4, 2]
    with np.load(saved) as found:
        np.testing.assert_allclose(found["actions"], document["actions"], rtol=1e-5)
        assert found["actions"].std() > 1e-3


def test_actions_and_frames_of_any_embodiment(run, picture, tmp_path):
    out, stats = tmp_path / "future.mp4", tmp_path / "stats.json"
    stats.write_text(json.dumps({"min": [-10.0, 90.0], "max": [10.0, 110.0]}))
    words = ("--image", picture, "--domain", "pusht", "--chunk", 4, "--steps", 1)
    prompt = ("--prompt", "push", "--viewpoint", "third_person_view", "--json")
    plain = run("world-action", *words, *prompt).json
    assert "third-person perspective" in plain["prompt"]
    scaled = run(
        "world-action",
        *words,
        *prompt,
        "--video",
        out,
        "--stats",
        stats,
        "--normalization",
        "minmax",
    ).json
    expected = np.array(plain["actions"]) * 10 + [0, 100]
    np.testing.assert_allclose(scaled["actions"], expected, rtol=1e-4)
    decoded(out, 5, 48, 64, 10)


def test_guidance_with_and_without_its_norm(run, tmp_path):
    words = ("--prompt", "a table", "--height", 32, "--width", 32, "--steps", 2, "--guidance", 8)
    pictures = []
    for name, more in (("plain", ()), ("scaled", ("--normalize-cfg",))):
        out = tmp_path / f"{name}.png"
        document = run("t2i", *words, *more, "--out", out, "--json").json
        assert document["sampling"]["normalize_cfg"] is bool(more)
        pictures.append(np.asarray(Image.open(out)))
    assert (pictures[0] != pictures[1]).any()


@pytest.mark.parametrize("views", ["apart", "together"])
def test_policy(run, picture, views):
    cameras = ("image",) if views == "together" else ("wrist", "exterior_1", "exterior_2")
    images = [word for name in cameras for word in ("--image", f"{name}={picture}")]
    words = ("--task", "put the cup away", "--state", STATE, "--steps", 1)
    result = run("policy", *images, *words, "--rows", 2)
    assert "1 step, guidance 3, 2 forwards, seed 0" in result.out
    assert "... 2 more steps (--rows 4 shows all)" in result.out
    document = run("policy", *images, *words, "--json").json
    assert document["shape"] == [4, 8]
    assert document["prompt"].startswith("put the cup away. This video contains concatenated views")
    assert document["engine"]["policy_checkpoint"] is True


@pytest.mark.parametrize(
    ("mode", "words", "reason"),
    [
        ("t2v", ["--prompt", "x", "--out", "clip.avi"], "does not end in .mp4, .mov, .mkv"),
        ("t2v", ["--prompt", "@none.txt", "--out", "c.mp4"], "text file none.txt does not exist"),
        ("t2v", ["--prompt", "x", "--out", "c.mp4", "--frames", 8], "frames is 8; allowed: 1 +"),
        ("t2v", ["--prompt", "x", "--out", "c.mp4", "--schedule", "new"], "schedule is 'new'"),
        ("t2v", ["--prompt", "x", "--out", "c.mp4", "--interval", "9"], "--interval is '9'"),
        ("t2i", ["--prompt", "x", "--out", "c.mp4"], "c.mp4 does not end in .png or .jpg"),
        ("t2i", ["--prompt", "x", "--out", "c.png", "--width", 65], "width is 65; allowed"),
    ],
)
def test_mistakes_are_named(run, tmp_path, monkeypatch, mode, words, reason):
    monkeypatch.chdir(tmp_path)
    assert reason in run(mode, *words, code=1).err


def test_mistakes_about_actions_are_named(run, picture, tmp_path, edge):
    words = ("--image", picture, "--prompt", "x")
    assert "domain is 'cat'; known:" in run("world-action", *words, "--domain", "cat", code=1).err
    text = tmp_path / "actions.txt"
    text.write_text("1")
    tail = ("--domain", "pusht", "--out", tmp_path / "o.mp4")
    for file, reason in ((text, "end in '.txt'"), (tmp_path / "no.csv", "do not exist")):
        found = run("forward-dynamics", *words, "--actions", file, *tail, code=1).err
        assert reason in found
    stats = ("--stats", tmp_path / "s.json")
    found = run("world-action", *words, "--domain", "pusht", *stats, code=1).err
    assert "--stats and --normalization belong together" in found
    policy = ("--task", "x", "--image", f"wrist={picture}")
    assert "give wrist, exterior_1" in run("policy", *policy, "--state", STATE, code=2).err
    assert "3 numbers; give 7 joint" in run("policy", *policy, "--state", "1,2,3", code=2).err
    sound = ("--prompt", "x", "--out", tmp_path / "o.mp4", "--sound", *SMALL)
    assert "no sound decoder" in run("t2v", *sound, checkpoint=edge, code=1).err


def test_a_folder_without_a_repository_is_named(run, tmp_path):
    words = ("--prompt", "x", "--out", tmp_path / "c.png")
    found = run("t2i", *words, checkpoint=tmp_path / "none", code=1).err
    assert "does not exist" in found
    assert "random_checkpoint" in found
    assert "the folder transformer is missing" in run(
        "t2i", *words, checkpoint=tmp_path, code=1
    ).err  # fmt: skip


def test_without_pyav_the_command_to_install_is_named_before_the_work(run, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "av", None)
    found = run("t2v", "--prompt", "x", "--out", tmp_path / "c.mp4", code=1).err
    assert 'pip install "phyai-engine[video]"' in found
    run("t2v", "--prompt", "x", "--out", tmp_path / "frames", *SMALL)
    assert (tmp_path / "frames" / "0008.png").is_file()
