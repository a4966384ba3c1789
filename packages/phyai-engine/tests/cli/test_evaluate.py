"""`phyai eval reach` with a small environment in the place of the example."""

import dataclasses
import sys
import textwrap

import numpy as np
import pytest

from phyai.cli import engines
from phyai.cli.reach import find_examples

# An environment with the interface of the example: episodes with an even seed succeed in 3 steps.
REACH = {
    "__init__": "",
    "rollout": """
        import numpy as np

        def record(policy, seed):
            from phyai.processing import Observation

            return seed, policy(Observation({}, None, "go"), seed=seed * 1000)

        def draw_rollout(path, rollout):
            from matplotlib.figure import Figure

            seed, actions = rollout
            figure = Figure()
            figure.subplots().plot(actions)
            figure.suptitle(f"seed {seed}")
            figure.savefig(path)
    """,
    "evaluate": """
        from dataclasses import dataclass

        from phyai.processing import Observation

        @dataclass(frozen=True)
        class EpisodeResult:
            seed: int
            task: str
            success: bool
            steps: int
            distance: float

        @dataclass(frozen=True)
        class EvalResult:
            episodes: tuple

        def evaluate(policy, episodes, seed):
            assert episodes == 1
            for chunk in range(2):
                policy(Observation({}, None, "go"), seed=seed * 1000 + chunk)
            good = seed % 2 == 0
            return EvalResult((EpisodeResult(seed, "go", good, 3 if good else 4, 0.25),))
    """,
}


@dataclasses.dataclass(frozen=True)
class Chunk:
    actions: np.ndarray


class Policy:
    def __init__(self):
        self.seeds = []

    def infer(self, observation, *, seed):
        print("a library that prints")
        self.seeds.append(seed)
        return Chunk(np.full((6, 2), 0.1, np.float32))


@pytest.fixture
def repository(tmp_path, monkeypatch):
    folder = tmp_path / "repository" / "examples" / "pi05" / "reach"
    folder.mkdir(parents=True)
    for name, text in REACH.items():
        (folder / f"{name}.py").write_text(textwrap.dedent(text))
    monkeypatch.setattr(sys, "path", [*sys.path])
    for name in [name for name in sys.modules if name.split(".")[0] == "reach"]:
        monkeypatch.delitem(sys.modules, name)
    yield tmp_path / "repository"
    for name in [name for name in sys.modules if name.split(".")[0] == "reach"]:
        del sys.modules[name]


@pytest.fixture
def built(monkeypatch):
    requests = []

    def build(request):
        requests.append(request)
        return Policy()

    monkeypatch.setattr(engines, "build_engine", build)
    return requests


def test_the_summary_counts_episodes(phyai, repository, built):
    result = phyai("eval", "reach", "--examples", repository, "--episodes", 5, "--seed", 4)
    assert result.code == 0
    lines = result.out.splitlines()
    assert lines[0] == "success  60.0%  (3 of 5 episodes, seeds from 4)"
    assert lines[1] == "steps    3.0 on average when successful"
    assert lines[2].startswith("chunk    ")
    assert lines[3:] == [
        "missed   seed 5: go, 0.250 away",
        "missed   seed 7: go, 0.250 away",
    ]
    assert set(result.err.splitlines()) == {"a library that prints"}


def test_json_lists_every_episode(phyai, repository, built):
    result = phyai("eval", "reach", "--examples", repository, "--episodes", 3, "--json")
    document = result.json
    assert document["success_rate"] == pytest.approx(2 / 3)
    assert [episode["seed"] for episode in document["results"]] == [0, 1, 2]
    assert document["median_ms_per_chunk"] >= 0
    assert document["picture"] is None


def test_no_success_has_no_mean(phyai, repository, built):
    arguments = ("eval", "reach", "--examples", repository, "--episodes", 1, "--seed", 1)
    assert phyai(*arguments, "--json").json["mean_steps"] is None
    assert "steps    -" in phyai(*arguments).out


def test_many_misses_are_cut(phyai, repository, built):
    result = phyai("eval", "reach", "--examples", repository, "--episodes", 30)
    assert result.out.count("missed   seed") == 10
    assert "missed   5 more (--json lists all)" in result.out


def test_options_reach_the_engine(phyai, repository, built, tmp_path):
    policy = tmp_path / "p.yaml"
    phyai(
        *("eval", "reach", "--examples", repository, "--episodes", 1, "--checkpoint", tmp_path),
        *("--device", "cpu", "--dtype", "fp16", "--kernel-config", policy),
    )
    assert built == [
        engines.EngineRequest(
            checkpoint=tmp_path,
            device="cpu",
            dtype=engines.Precision.FP16,
            kernel_config=policy,
        )
    ]


def test_the_default_checkpoint_is_that_of_the_example(phyai, repository, built):
    phyai("eval", "reach", "--examples", repository, "--episodes", 1)
    assert built[0].checkpoint.is_relative_to(repository / "examples" / "pi05" / "reach")


def test_a_picture_of_the_first_episode_is_drawn(phyai, repository, built, tmp_path, monkeypatch):
    import matplotlib as mpl

    monkeypatch.setitem(mpl.rcParams, "svg.fonttype", "none")
    target = tmp_path / "episode.svg"
    result = phyai(
        *("eval", "reach", "--examples", repository, "--episodes", 2, "--seed", 6),
        *("--picture", target),
    )
    assert result.code == 0
    assert f"picture  {target}" in result.out
    assert ">seed 6<" in target.read_text()


def test_an_unknown_picture_format_is_an_error(phyai, repository, built, tmp_path):
    picture = tmp_path / "a.xyz"
    result = phyai(
        *("eval", "reach", "--examples", repository, "--episodes", 1, "--picture", picture)
    )
    assert result.code == 1
    assert result.err.splitlines()[-1] == "hint: use the suffix .png, .pdf or .svg"


def test_a_picture_without_matplotlib_fails_first(
    phyai, repository, built, tmp_path, without_matplotlib
):
    result = phyai("eval", "reach", "--examples", repository, "--picture", tmp_path / "a.png")
    assert result.code == 1
    assert 'hint: pip install "phyai-engine[plot]"' in result.err
    assert built == []


def test_a_picture_in_a_missing_folder_fails_first(phyai, repository, built, tmp_path):
    picture = tmp_path / "no" / "a.png"
    result = phyai("eval", "reach", "--examples", repository, "--picture", picture)
    assert result.code == 1
    assert "does not exist" in result.err
    assert built == []


def test_a_missing_library_of_the_environment_is_named(phyai, repository, built):
    path = repository / "examples" / "pi05" / "reach" / "evaluate.py"
    path.write_text("import no_such_library\n")
    result = phyai("eval", "reach", "--examples", repository)
    assert result.code == 1
    assert "the reach environment needs no_such_library" in result.err
    assert "hint: pip install no_such_library" in result.err


@pytest.mark.parametrize("below", ["", "examples", "examples/pi05", "examples/pi05/reach"])
def test_the_example_is_found_from_any_of_its_folders(repository, below):
    expected = (repository / "examples" / "pi05").resolve()
    assert find_examples(repository / below) == expected


def test_the_current_folder_comes_before_the_installed_one(repository, monkeypatch):
    monkeypatch.chdir(repository)
    assert find_examples(None) == (repository / "examples" / "pi05").resolve()


def test_a_wrong_examples_folder_is_named(phyai, built, tmp_path):
    result = phyai("eval", "reach", "--examples", tmp_path)
    assert result.code == 1
    assert str(tmp_path) in result.err
    assert built == []


def test_without_the_repository_the_hint_says_where_it_is(phyai, built, monkeypatch, tmp_path):
    from phyai.cli import reach

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(reach, "__file__", str(tmp_path / "reach.py"))
    result = phyai("eval", "reach")
    assert result.code == 1
    assert "the wheel does not contain it" in result.err
    assert "hint: clone the repository" in result.err


def test_zero_episodes_is_a_usage_error(phyai):
    assert phyai("eval", "reach", "--episodes", 0).code == 2
