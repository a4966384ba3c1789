"""The workflows: what they run exists, publishing is guarded, and claimed versions are tested."""

import re
import tomllib
from pathlib import Path
from typing import Any

import pytest
from ruamel.yaml import YAML

ROOT = Path(__file__).resolve().parent.parent
WORKFLOWS = {path.name: path for path in sorted((ROOT / ".github/workflows").glob("*.yml"))}
WHEELS = ("piper-kernels", "phyai-quant", "phyai-engine")


def read(name: str) -> dict[str, Any]:
    return YAML(typ="safe").load(WORKFLOWS[name])


def steps_of(workflow: dict[str, Any]) -> list[dict[str, Any]]:
    return [step for job in workflow["jobs"].values() for step in job.get("steps", [])]


def publishes(workflow: dict[str, Any]) -> bool:
    return any("publish" in step.get("uses", "") for step in steps_of(workflow))


@pytest.mark.parametrize("name", WORKFLOWS)
def test_scripts_that_a_workflow_runs_exist(name):
    text = WORKFLOWS[name].read_text(encoding="utf-8")
    named = set(re.findall(r"(?<![\w/])(?:scripts|\.ci)/[\w.]+", text))
    assert [script for script in sorted(named) if not (ROOT / script).is_file()] == []


@pytest.mark.parametrize("name", WORKFLOWS)
def test_every_job_ends_and_may_only_read_by_default(name):
    workflow = read(name)
    assert workflow["permissions"] == {"contents": "read"}
    for job in workflow["jobs"].values():
        assert "uses" in job or job["timeout-minutes"] <= 60


def test_only_tags_publish_and_only_after_a_build():
    publishing = {name for name in WORKFLOWS if publishes(read(name))}
    assert publishing == {f"release-{wheel}.yml" for wheel in WHEELS}
    for name in publishing:
        workflow = read(name)
        wheel = name.removeprefix("release-").removesuffix(".yml")
        assert workflow["on"] == {"push": {"tags": [f"{wheel}-v*"]}}
        publish = workflow["jobs"]["publish"]
        assert publish["needs"] == "build"
        assert publish["environment"] == f"release-{wheel}"
        assert workflow["jobs"]["build"]["with"] == {"wheel": wheel}
        (download,) = [s for s in publish["steps"] if "download-artifact" in s["uses"]]
        assert download["with"]["name"] == f"dist-{wheel}"


def test_the_dry_run_of_a_release_checks_the_same_and_can_not_publish():
    workflow = read("build-wheel.yml")
    assert not publishes(workflow)
    assert "id-token" not in WORKFLOWS["build-wheel.yml"].read_text(encoding="utf-8")
    wheel = workflow["on"]["workflow_dispatch"]["inputs"]["wheel"]
    assert wheel["options"] == ["all", *WHEELS]
    assert workflow["on"]["workflow_call"]["inputs"].keys() == {"wheel"}
    commands = "\n".join(step.get("run", "") for step in steps_of(workflow))
    for command in ("scripts/test", "check_types.py", "twine check", "scripts/check_wheels"):
        assert command in commands


def test_a_release_compares_versions_before_anything_else():
    (job,) = read("build-wheel.yml")["jobs"].values()
    runs = [step["run"] for step in job["steps"] if "run" in step]
    assert "scripts/check_release.py" in runs[0]
    assert '--tag "$GITHUB_REF_NAME"' in runs[0]
    assert "matrix.wheel" in job["env"]["WHEEL"]


def test_a_release_uploads_only_what_was_built_twice_and_checked():
    (job,) = read("build-wheel.yml")["jobs"].values()
    order = [step.get("run", step.get("uses", "")) for step in job["steps"]]
    places = [
        next(number for number, step in enumerate(order) if part in step)
        for part in (
            "scripts/test",
            "uv build --package",
            "twine",
            "cmp ",
            "check_wheels",
            "upload",
        )
    ]
    assert places == sorted(places)
    assert job["steps"][-1]["with"]["path"] == "dist/"


def test_ci_covers_the_versions_that_the_wheels_claim():
    jobs = read("ci.yml")["jobs"]
    for job in (jobs["linux"], jobs["wheels"]):
        assert job["strategy"]["matrix"]["python"] == ["3.12", "3.13", "3.14"]
        assert job["continue-on-error"] == "${{ matrix.python == '3.14' }}"
    oldest = set()
    for wheel in WHEELS:
        path = ROOT / "packages" / wheel / "pyproject.toml"
        project = tomllib.loads(path.read_text(encoding="utf-8"))["project"]
        torch = [line for line in project["dependencies"] if re.match(r"torch\W", line)]
        oldest.add(torch[0].replace(">=", "==") + ".*")
        versions = {c.rpartition(" ")[2] for c in project["classifiers"] if "3 :: Only" not in c}
        assert {"3.12", "3.13"} <= versions
        assert "3.14" not in versions, "its CI entry may fail"
    assert jobs["wheels"]["strategy"]["matrix"]["torch"] == [*oldest, "torch"]


def test_ci_runs_tests_and_wheels_with_the_oldest_versions():
    job = read("ci.yml")["jobs"]["oldest"]
    assert job["env"]["UV_PYTHON"] == "3.12"
    runs = [step["run"] for step in job["steps"] if "run" in step]
    parts = (
        "scripts/oldest_requirements.py",
        "--requirement oldest.txt",
        "pytest",
        '--constraint "$RUNNER_TEMP/oldest.txt"',
    )
    places = [next(n for n, run in enumerate(runs) if part in run) for part in parts]
    assert places == sorted(places)
    (install,) = [s for s in job["steps"] if "--requirement" in s.get("run", "")]
    assert "runner.temp" in install["working-directory"], "the checkout's constraints are newer"


def test_ci_compiles_every_kernel_for_every_gpu_and_compares_the_table():
    job = read("ci.yml")["jobs"]["kernels"]
    assert job["env"]["PIPER_WRITE_KERNEL_TABLE"] == "1"
    commands = [step["run"] for step in job["steps"] if "run" in step]
    (tests,) = [word for word in " ".join(commands).split() if word.startswith("packages/")]
    assert (ROOT / tests).is_dir()
    assert commands[-1].startswith("git diff --exit-code ")
    assert (ROOT / commands[-1].split()[-1]).is_file()
