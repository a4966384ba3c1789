"""`phyai run pi05` with a fake engine: what reaches the engine and what is printed."""

import sys

import numpy as np
import pytest
from PIL import Image

from phyai.cli import engines
from phyai.cli.errors import CliError


@pytest.fixture
def run(phyai, fake_engine, picture, tmp_path):
    def call(*extra: object):
        return phyai(
            *("run", "pi05", "--checkpoint", tmp_path, "--image", f"base_0_rgb={picture}"),
            *("--task", "pick up", "--state", "0.5,-1,2"),
            *extra,
        )

    return call


def numbers(line: str) -> list[float]:
    return [float(word) for word in line.split()]


def test_the_observation_reaches_the_engine(run, fake_engine, picture):
    assert run("--seed", 3, "--steps", 5).code == 0
    (observation, options), *rest = fake_engine[0].calls
    assert rest == []
    assert options == {"seed": 3, "num_steps": 5}
    assert observation.task == "pick up"
    np.testing.assert_array_equal(observation.state, np.float32([0.5, -1, 2]))
    assert list(observation.images) == ["base_0_rgb"]
    np.testing.assert_array_equal(observation.images["base_0_rgb"], np.asarray(Image.open(picture)))


def test_several_cameras_and_no_state(phyai, fake_engine, picture, tmp_path):
    result = phyai(
        *("run", "pi05", "--checkpoint", tmp_path, "--task", "go"),
        *("--image", f"a={picture}", "--image", f"observation.images.b={picture}"),
    )
    assert result.code == 0
    observation, options = fake_engine[0].calls[0]
    assert list(observation.images) == ["a", "observation.images.b"]
    assert observation.state is None
    assert options == {"seed": 0, "num_steps": None}


def test_every_option_reaches_the_engine_request(run, fake_engine, tmp_path):
    files = {name: tmp_path / name for name in ("policy.yaml", "stats.json", "tok.model")}
    result = run(
        *("--device", "cuda:1", "--dtype", "bf16", "--preset", "lerobot"),
        *("--kernel-config", files["policy.yaml"], "--stats", files["stats.json"]),
        *("--tokenizer", files["tok.model"], "--allow-identity-norm", "--no-savings"),
    )
    assert result.code == 0
    assert fake_engine[0].request == engines.EngineRequest(
        checkpoint=tmp_path,
        device="cuda:1",
        dtype=engines.Precision.BF16,
        kernel_config=files["policy.yaml"],
        preset="lerobot",
        stats=files["stats.json"],
        tokenizer=files["tok.model"],
        allow_identity_norm=True,
        savings=False,
    )


def test_the_defaults_leave_the_choice_to_the_engine(run, fake_engine, tmp_path):
    run()
    assert fake_engine[0].request == engines.EngineRequest(checkpoint=tmp_path)


def test_the_table_shows_the_first_rows_and_every_dimension(run):
    result = run("--seed", 2, "--rows", 3)
    lines = result.out.splitlines()
    header = lines.index(next(line for line in lines if line.startswith("step")))
    assert lines[header].split() == ["step", *(f"a{i}" for i in range(7))]
    for step in range(3):
        expected = [step, *(step * 7 + dim + 2 for dim in range(7))]
        assert numbers(lines[header + 2 + step]) == expected
    assert lines[header + 5] == "... 10 more steps (--rows 13 shows all)"
    assert "preset   lerobot" in result.out
    assert "prompt   Task: x;\\nAction: " in result.out
    assert "preprocess 1.2 ms, total 12.5 ms" in result.out
    assert "load " in result.out
    assert "a library that prints" not in result.out


def test_all_rows_need_no_remark(run):
    assert "more steps" not in run("--rows", 50).out


def test_json_holds_everything_and_nothing_else(run):
    result = run("--seed", 1, "--json")
    assert result.code == 0
    document = result.json
    np.testing.assert_array_equal(
        document["actions"], np.arange(13 * 7, dtype=np.float32).reshape(13, 7) + 1
    )
    assert document["shape"] == [13, 7]
    assert document["prompt"] == "Task: x;\nAction: "
    assert document["preset"] == "lerobot"
    assert document["seed"] == 1
    assert document["weight_bytes"] == 4096
    assert document["timing_ms"]["total"] == 12.5
    assert document["timing_ms"]["load"] >= 0
    assert document["out"] is None


def test_out_saves_what_the_engine_returned(run, tmp_path):
    target = tmp_path / "chunk.data"
    result = run("--out", target, "--seed", 4)
    assert f"saved   {target}" in result.out
    with np.load(target, allow_pickle=False) as saved:
        assert sorted(saved) == ["actions", "normalized", "prompt", "seed"]
        assert saved["actions"].shape == (13, 7)
        assert saved["actions"].dtype == np.float32
        assert saved["actions"][0, 0] == 4
        assert saved["normalized"].shape == (13, 32)
        assert str(saved["prompt"]) == "Task: x;\nAction: "
        assert int(saved["seed"]) == 4


@pytest.mark.parametrize("suffix", ["png", "svg"])
def test_plot_writes_a_picture(run, tmp_path, suffix):
    target = tmp_path / f"actions.{suffix}"
    result = run("--plot", target)
    assert result.code == 0
    assert f"plot    {target}" in result.out
    if suffix == "png":
        with Image.open(target) as image:
            assert image.width > 600
    else:
        assert target.read_text().count("action ") >= 7


def test_plot_without_matplotlib_says_how_to_get_it(run, fake_engine, tmp_path, without_matplotlib):
    result = run("--plot", tmp_path / "a.png")
    assert result.code == 1
    assert "needs matplotlib" in result.err
    assert 'hint: pip install "phyai-engine[plot]"' in result.err
    assert fake_engine == []


def test_without_plot_matplotlib_is_not_needed(run, without_matplotlib):
    assert run().code == 0


def test_an_unknown_picture_format_is_an_error(run, tmp_path):
    result = run("--plot", tmp_path / "a.xyz")
    assert result.code == 1
    assert "a.xyz" in result.err
    assert "Traceback" not in result.err


@pytest.mark.parametrize("option", ["--out", "--plot"])
def test_a_missing_folder_fails_before_the_work(run, fake_engine, tmp_path, option):
    result = run(option, tmp_path / "no" / "file.png")
    assert result.code == 1
    assert "does not exist" in result.err
    assert fake_engine == []


@pytest.mark.parametrize(
    ("arguments", "option"),
    [
        (["--image", "nofile"], "--image"),
        (["--image", "a=x.png", "--image", "a=y.png"], "--image"),
        (["--image", "a=x.png", "--state", "1,two"], "--state"),
        (["--image", "a=x.png", "--state", "nan"], "--state"),
    ],
)
def test_malformed_options_are_usage_errors(phyai, fake_engine, tmp_path, arguments, option):
    result = phyai("run", "pi05", "--checkpoint", tmp_path, "--task", "go", *arguments)
    assert result.code == 2
    assert option in result.err
    assert fake_engine == []


def test_a_missing_picture_is_named_before_the_model_is_loaded(phyai, fake_engine, tmp_path):
    gone = tmp_path / "gone.jpg"
    result = phyai(
        *("run", "pi05", "--checkpoint", tmp_path, "--task", "go", "--image", f"a={gone}")
    )
    assert result.code == 1
    assert result.err.startswith(f"error: image {gone} does not exist\nhint: ")
    assert fake_engine == []


def test_processing_errors_pass_through(run, monkeypatch):
    from phyai.processing import ProcessingError

    def build(request):
        raise ProcessingError("unknown camera 'base'; did you mean 'base_0_rgb'?")

    monkeypatch.setattr(engines, "build_engine", build)
    result = run()
    assert result.code == 1
    assert result.err == "error: unknown camera 'base'; did you mean 'base_0_rgb'?\n"
    assert result.out == ""


def test_nothing_decorates_stderr_without_a_terminal(run):
    # The fake engine prints one line, which must not reach stdout.
    assert run("--json").err == "a library that prints\n"


def test_a_spinner_shows_on_a_terminal(run, monkeypatch):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    monkeypatch.setenv("TERM", "xterm")
    result = run("--json")
    assert result.json["seed"] == 0
    assert result.code == 0


@pytest.mark.parametrize("steps", [1, 13])
@pytest.mark.parametrize("dims", [1, 4, 7])
def test_plots_of_odd_sizes(tmp_path, steps, dims):
    from phyai.cli.plotting import plot_actions

    actions = np.random.default_rng(0).normal(size=(steps, dims)).astype(np.float32)
    plot_actions(actions, tmp_path / "a.svg", title="Task: $\\frac$ " * 9)
    assert (tmp_path / "a.svg").read_text().startswith("<?xml")


def test_cli_errors_of_the_engine_are_printed(run, monkeypatch):
    def build(request):
        raise CliError("no", "try")

    monkeypatch.setattr(engines, "build_engine", build)
    assert run().err == "error: no\nhint: try\n"
