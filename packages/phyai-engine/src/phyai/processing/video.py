"""Clips from and to files, through PyAV, which the extra ``phyai-engine[video]`` installs."""

import wave
from dataclasses import dataclass
from fractions import Fraction
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from phyai.processing.errors import ProcessingError

INSTALL = 'pip install "phyai-engine[video]"'
SUFFIXES = (".mp4", ".mov", ".mkv")
_CODECS = ("libx264", "libopenh264", "mpeg4")
_AUDIO_BITS = 192_000


@dataclass(frozen=True, eq=False)
class Clip:
    """Frames and their rate.

    Attributes:
        frames: uint8 [T, H, W, 3], RGB.
        fps: frames per second; None when the file does not say.
    """

    frames: np.ndarray
    fps: float | None


def require_video() -> Any:
    """Return the module ``av``.

    Raises:
        ProcessingError: It is not installed.
    """
    try:
        import av
    except ImportError as error:
        raise ProcessingError(
            f"reading and writing video needs PyAV ({error}); install it: {INSTALL}. Pictures "
            "(PNG) and sound (WAV) need nothing"
        ) from error
    return av


def check_target(path: Path) -> None:
    """Check, before the work begins, that a clip can be written to ``path``.

    Raises:
        ProcessingError: PyAV is missing, the folder does not exist, or the suffix names no
            container for video.
    """
    if path.suffix.lower() not in SUFFIXES:
        raise ProcessingError(
            f"{path} does not end in {', '.join(SUFFIXES)}; the suffix says how video is stored"
        )
    if not path.resolve().parent.is_dir():
        raise ProcessingError(f"{path}: the folder {path.parent} does not exist; create it first")
    require_video()


def read_video(path: Path, *, most: int | None = None) -> Clip:
    """Read a clip.

    Args:
        path: any file that FFmpeg decodes.
        most: frames to read; None reads all.

    Raises:
        ProcessingError: PyAV is missing, or the file holds no readable video.
    """
    av = require_video()
    if not path.is_file():
        raise ProcessingError(f"video {path} does not exist")
    try:
        with av.open(str(path)) as container:
            streams = container.streams.video
            if not streams:
                raise ProcessingError(f"{path} holds no video")
            rate = streams[0].average_rate
            decoded = islice(container.decode(streams[0]), most)
            frames = [frame.to_ndarray(format="rgb24") for frame in decoded]
    except av.FFmpegError as error:
        raise ProcessingError(f"{path} cannot be decoded: {error}") from error
    if not frames:
        raise ProcessingError(f"{path} holds no frame")
    return Clip(np.stack(frames), None if rate is None else float(rate))


def write_video(
    path: Path,
    frames: np.ndarray,
    fps: float,
    *,
    sound: np.ndarray | None = None,
    sample_rate: int = 48_000,
) -> None:
    """Write a clip as H.264 (or MPEG-4 where FFmpeg lacks it), with sound as AAC.

    Args:
        path: file that ends in .mp4, .mov or .mkv; it is replaced.
        frames: uint8 [T, H, W, 3], RGB. An odd last row or column is repeated, since the codecs
            store colours for squares of two.
        fps: frames per second.
        sound: float [2, samples] in [-1, 1].
        sample_rate: of the sound.

    Raises:
        ProcessingError: PyAV is missing, or the arrays have another shape.
    """
    check_target(path)
    av = require_video()
    frames = _check_frames(frames)
    sound = None if sound is None else _check_sound(sound)
    height, width = frames.shape[1:3]
    frames = np.pad(frames, ((0, 0), (0, height % 2), (0, width % 2), (0, 0)), mode="edge")
    try:
        with av.open(str(path), "w") as container:
            stream = container.add_stream(_codec(av), rate=Fraction(fps).limit_denominator(1001))
            stream.height, stream.width = frames.shape[1:3]
            stream.pix_fmt = "yuv420p"
            if stream.codec_context.name == "libx264":
                stream.options = {"crf": "16"}
            audio = None
            if sound is not None:
                audio = container.add_stream("aac", rate=sample_rate, layout="stereo")
                audio.bit_rate = _AUDIO_BITS
            for frame in frames:
                picture = av.VideoFrame.from_ndarray(np.ascontiguousarray(frame), format="rgb24")
                container.mux(stream.encode(picture))
            container.mux(stream.encode())
            if audio is not None and sound is not None:
                _write_sound(av, container, audio, sound, sample_rate)
    except av.FFmpegError as error:
        raise ProcessingError(f"{path} cannot be written: {error}") from error


def write_wav(path: Path, sound: np.ndarray, sample_rate: int = 48_000) -> None:
    """Write sound as 16-bit WAV.

    Args:
        path: the file; it is replaced.
        sound: float [2, samples] in [-1, 1]; values outside are clipped.
        sample_rate: samples per second.

    Raises:
        ProcessingError: The array has another shape.
    """
    values = np.clip(_check_sound(sound), -1.0, 1.0)
    with wave.open(str(path), "wb") as file:
        file.setnchannels(len(values))
        file.setsampwidth(2)
        file.setframerate(sample_rate)
        file.writeframes((values.T * 32767).round().astype("<i2").tobytes())


def _codec(av: Any) -> str:
    return next(name for name in _CODECS if name in av.codecs_available)


def _write_sound(av: Any, container: Any, stream: Any, sound: np.ndarray, rate: int) -> None:
    block = stream.codec_context.frame_size or 1024
    for start in range(0, sound.shape[1], block):
        part = np.ascontiguousarray(sound[:, start : start + block], dtype=np.float32)
        frame = av.AudioFrame.from_ndarray(part, format="fltp", layout="stereo")
        frame.sample_rate, frame.pts = rate, start
        frame.time_base = Fraction(1, rate)
        container.mux(stream.encode(frame))
    container.mux(stream.encode())


def _check_frames(frames: np.ndarray) -> np.ndarray:
    if frames.dtype != np.uint8 or frames.ndim != 4 or frames.shape[-1] != 3 or not frames.size:
        raise ProcessingError(f"frames are {frames.dtype} {frames.shape}, not uint8 [T, H, W, 3]")
    return frames


def _check_sound(sound: np.ndarray) -> np.ndarray:
    if sound.ndim != 2 or sound.shape[0] != 2 or sound.dtype.kind != "f":
        raise ProcessingError(f"sound is {sound.dtype} {sound.shape}, not float [2, samples]")
    return np.nan_to_num(sound)
