"""From a request of Cosmos3 to files and a report."""

import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from phyai.cli import cosmos3_options as own
from phyai.cli import engines
from phyai.cli.cosmos3_files import (
    check_clip_target,
    check_picture_target,
    write_actions,
    write_clip,
    write_picture,
)
from phyai.cli.errors import CliError
from phyai.cli.options import require_folder
from phyai.cli.output import (
    display_path,
    one_line,
    print_actions,
    print_json,
    print_line,
    print_pairs,
    status_line,
    stdout_to_stderr,
)

if TYPE_CHECKING:
    from phyai.engine import Engine
    from phyai.models.cosmos3.repository import Repository


@dataclass(frozen=True)
class Targets:
    """Files that a command writes, and how it reports.

    Attributes:
        clip: Video file or folder of pictures.
        picture: Picture file.
        sound: WAV file.
        actions: NPZ file.
        rows: Rows of the action table.
        json: Whether to print one JSON document.
    """

    clip: Path | None = None
    picture: Path | None = None
    sound: Path | None = None
    actions: Path | None = None
    rows: int = 8
    json: bool = False

    def check(self) -> None:
        """Fail before the work starts when one of them could not be written at its end.

        Raises:
            CliError, ProcessingError: A folder, a suffix or a library is missing.
        """
        if self.clip is not None:
            check_clip_target(self.clip)
        if self.picture is not None:
            check_picture_target(self.picture)
        for file in (self.sound, self.actions):
            require_folder(file)

    def write(self, result: Any) -> dict[str, Path]:
        """Write what a result has; return the files by what they hold."""
        written: dict[str, Path] = {}
        if self.clip is not None:
            write_clip(self.clip, result)
            written["video"] = self.clip
        if self.picture is not None:
            write_picture(self.picture, result.image)
            written["image"] = self.picture
        if self.sound is not None:
            from phyai.processing.video import write_wav

            write_wav(self.sound.expanduser(), result.sound, result.sample_rate)
            written["sound"] = self.sound
        if self.actions is not None:
            write_actions(self.actions, result)
            written["actions"] = self.actions
        return written


@dataclass(frozen=True)
class Sampler:
    """What the command line says about sampling; None leaves the default of the mode."""

    steps: own.Steps = None
    guidance: own.Guidance = None
    shift: own.Shift = None
    schedule: own.Schedule = None
    interval: own.Interval = None
    normalize_cfg: own.NormalizeCfg = None

    def settle(self, repository: "Repository", kind: Any) -> Any:
        """Return the sampling of a mode with these changes.

        Raises:
            CliError: A value is out of range.
        """
        changes: dict[str, Any] = asdict(self)
        try:
            if self.interval is not None:
                low, high = (float(word) for word in self.interval.split(","))
                changes["interval"] = (low, high)
        except ValueError:
            raise CliError(
                f"--interval is {self.interval!r}", 'give two numbers, e.g. "960,1001"'
            ) from None
        try:
            return repository.sampling(kind, **changes)
        except ValueError as error:
            raise CliError(f"sampling: {error}") from None


@dataclass(frozen=True)
class Job:
    """A command about to run.

    Attributes:
        kind: Class of the request.
        sampler: Changes to its sampling.
        fields: Its other fields.
        targets: Files to write.
        engine: What to load.
    """

    kind: Any
    sampler: Sampler
    targets: Targets
    engine: engines.EngineRequest
    fields: Mapping[str, Any] = field(default_factory=dict)

    def run(self) -> None:
        """Load, answer, write and report.

        Raises:
            CliError, ProcessingError, CheckpointError: As the parts find them.
        """
        self.targets.check()
        sampling = self.sampler.settle(self._repository(), self.kind)
        request = self.kind(sampling=sampling, **self.fields)
        started = time.perf_counter()
        engine = engines.build_engine(self.engine)
        load_ms = (time.perf_counter() - started) * 1e3
        try:
            with stdout_to_stderr(), status_line("Computing"):
                result = engine.run(request)
        finally:
            engine.close()
        written = self.targets.write(result)
        timing = {"load": load_ms, **result.timing_ms}
        if self.targets.json:
            print_json(_document(self, result, sampling, timing, written, engine))
        else:
            _print(self, result, sampling, timing, written)

    def _repository(self) -> "Repository":
        from phyai.models.cosmos3.repository import Repository

        folder = self.engine.checkpoint
        if not folder.is_dir():
            what = "is not a folder" if folder.exists() else "does not exist"
            raise CliError(
                f"checkpoint {folder} {what}",
                "give a Cosmos3 repository; python -m phyai.models.cosmos3.random_checkpoint "
                "writes a tiny one of random weights",
            )
        return Repository.read(folder)


def _document(
    job: Job,
    result: Any,
    sampling: Any,
    timing: Mapping[str, float],
    written: Mapping[str, Path],
    engine: "Engine",
) -> dict[str, Any]:
    document: dict[str, Any] = {
        "request": job.kind.__name__,
        "prompt": result.prompt,
        "seed": result.seed,
        "sampling": asdict(sampling),
        "timing_ms": timing,
        "files": dict(written),
        "engine": engine.describe(),
    }
    for name in ("frames", "image", "sound"):
        value = getattr(result, name, None)
        if value is not None:
            document[f"{name}_shape"] = value.shape
    if hasattr(result, "fps"):
        document["fps"] = result.fps
    if hasattr(result, "actions"):
        document |= {"actions": result.actions, "shape": result.actions.shape}
    return document


def _print(
    job: Job,
    result: Any,
    sampling: Any,
    timing: Mapping[str, float],
    written: Mapping[str, Path],
) -> None:
    found: list[tuple[str, object]] = [("prompt", one_line(result.prompt))]
    guided = f"guidance {sampling.guidance:g}" if sampling.guidance != 1 else "no guidance"
    work = f"{_count(sampling.steps, 'step')}, {guided}, {_count(sampling.forwards, 'forward')}"
    found.append(("sampler", f"{work}, seed {result.seed}"))
    frames = getattr(result, "frames", None)
    if frames is not None:
        count, height, width = frames.shape[:3]
        found.append(
            ("video", f"{_count(count, 'frame')} of {height}x{width} at {result.fps:g} FPS")
        )
    sound = getattr(result, "sound", None)
    if sound is not None:
        seconds = sound.shape[1] / result.sample_rate
        found.append(("sound", f"{seconds:.2f} s, stereo at {result.sample_rate} Hz"))
    image = getattr(result, "image", None)
    if image is not None:
        found.append(("image", f"{image.shape[0]}x{image.shape[1]}"))
    print_pairs(found)
    actions = getattr(result, "actions", None)
    if actions is not None:
        print_line()
        print_actions(actions, job.targets.rows)
    print_line()
    print_pairs([("timing", ", ".join(f"{n} {value:.1f} ms" for n, value in timing.items()))])
    print_pairs([(f"{n:<6}", display_path(path.expanduser())) for n, path in written.items()])


def _count(number: int, what: str) -> str:
    return f"{number} {what}" if number == 1 else f"{number} {what}s"
