"""Clips survive a file; what can not be read or written is named."""

import sys
import wave

import numpy as np
import pytest

from phyai.processing import ProcessingError
from phyai.processing.video import Clip, check_target, read_video, write_video, write_wav

av = pytest.importorskip("av", reason="PyAV is not installed: phyai-engine[video]")


def moving(frames=7, height=48, width=64):
    """A bright square that moves right over a gradient."""
    rows = np.linspace(0, 90, height)[None, :, None, None]
    clip = np.broadcast_to(rows, (frames, height, width, 3)).astype(np.uint8).copy()
    for index in range(frames):
        clip[index, 8:24, 4 * index : 4 * index + 16] = (220, 120, 40)
    return clip


def tone(samples, rate=48_000):
    time = np.arange(samples) / rate
    return np.stack([np.sin(2 * np.pi * 440 * time), np.sin(2 * np.pi * 880 * time)]).astype("f4")


@pytest.mark.parametrize("suffix", [".mp4", ".mkv", ".mov"])
def test_a_clip_is_read_back(tmp_path, suffix):
    frames = moving()
    write_video(tmp_path / f"clip{suffix}", frames, 15.0)
    clip = read_video(tmp_path / f"clip{suffix}")
    assert clip.frames.shape == frames.shape
    assert clip.fps == pytest.approx(15.0)
    assert np.abs(clip.frames.astype(int) - frames).mean() < 4
    # The square is where it was: the order of frames, rows and colours is kept.
    assert clip.frames[5, 12, 28, 0] > 180 > clip.frames[5, 12, 28, 1] > clip.frames[5, 12, 28, 2]


@pytest.mark.parametrize(("height", "width"), [(47, 64), (48, 63), (17, 33)])
def test_odd_sizes_are_padded_by_one(tmp_path, height, width):
    write_video(tmp_path / "odd.mp4", moving(3, height, width), 24)
    shape = read_video(tmp_path / "odd.mp4").frames.shape
    assert shape == (3, height + height % 2, width + width % 2, 3)


def test_only_the_first_frames_are_read(tmp_path):
    write_video(tmp_path / "clip.mp4", moving(9), 10)
    assert len(read_video(tmp_path / "clip.mp4", most=5).frames) == 5


@pytest.mark.parametrize("samples", [1, 1023, 24_001])
def test_sound_is_muxed(tmp_path, samples):
    write_video(tmp_path / "clip.mp4", moving(12), 24, sound=tone(samples))
    with av.open(str(tmp_path / "clip.mp4")) as container:
        (audio,) = container.streams.audio
        assert (audio.rate, audio.layout.name) == (48_000, "stereo")
        heard = np.concatenate([f.to_ndarray() for f in container.decode(audio)], axis=1)
    assert heard.shape[1] >= samples
    if samples > 20_000:
        spectrum = np.abs(np.fft.rfft(heard[:, 2048:22_528]))
        frequency = np.fft.rfftfreq(20_480, 1 / 48_000)[spectrum.argmax(1)]
        assert frequency == pytest.approx([440, 880], abs=3)


def test_a_wav_holds_the_samples(tmp_path):
    sound = tone(481)
    sound[:, 3] = (2.0, -np.inf)
    write_wav(tmp_path / "a.wav", sound, 16_000)
    with wave.open(str(tmp_path / "a.wav")) as file:
        assert (file.getnchannels(), file.getframerate(), file.getnframes()) == (2, 16_000, 481)
        values = np.frombuffer(file.readframes(481), "<i2").reshape(-1, 2).T / 32767
    np.testing.assert_allclose(values[:, 4:], sound[:, 4:], atol=1e-4)
    np.testing.assert_allclose(values[:, 3], (1.0, -1.0), atol=1e-4)


@pytest.mark.parametrize(
    ("frames", "reason"),
    [
        (np.zeros((3, 8, 8), np.uint8), r"uint8 \(3, 8, 8\), not uint8 \[T, H, W, 3\]"),
        (np.zeros((3, 8, 8, 3), np.float32), "float32"),
        (np.zeros((0, 8, 8, 3), np.uint8), r"\(0, 8, 8, 3\)"),
    ],
)
def test_other_arrays_are_refused(tmp_path, frames, reason):
    with pytest.raises(ProcessingError, match=reason):
        write_video(tmp_path / "clip.mp4", frames, 15)


def test_other_sound_is_refused(tmp_path):
    with pytest.raises(ProcessingError, match=r"float32 \(1, 5\), not float \[2, samples\]"):
        write_wav(tmp_path / "a.wav", np.zeros((1, 5), np.float32))
    with pytest.raises(ProcessingError, match=r"float32 \(1, 5\), not float \[2, samples\]"):
        write_video(tmp_path / "a.mp4", moving(3), 24, sound=np.zeros((1, 5), np.float32))
    assert not list(tmp_path.iterdir())


def test_targets_are_checked_before_the_work(tmp_path):
    check_target(tmp_path / "clip.MP4")
    with pytest.raises(ProcessingError, match=r"does not end in \.mp4, \.mov, \.mkv"):
        check_target(tmp_path / "clip.png")
    with pytest.raises(ProcessingError, match="does not exist; create it first"):
        check_target(tmp_path / "nowhere" / "clip.mp4")


def test_files_without_video_are_named(tmp_path):
    with pytest.raises(ProcessingError, match=r"none\.mp4 does not exist"):
        read_video(tmp_path / "none.mp4")
    (tmp_path / "text.mp4").write_text("no video")
    with pytest.raises(ProcessingError, match=r"text\.mp4 cannot be decoded"):
        read_video(tmp_path / "text.mp4")
    write_wav(tmp_path / "only.wav", tone(4800))
    with pytest.raises(ProcessingError, match=r"only\.wav holds no video"):
        read_video(tmp_path / "only.wav")


def test_without_the_extra_the_command_to_install_is_named(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "av", None)
    with pytest.raises(ProcessingError, match=r'pip install "phyai-engine\[video\]"'):
        check_target(tmp_path / "clip.mp4")
    assert Clip(moving(), None).fps is None
