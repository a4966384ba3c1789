"""scripts/scaling_page.py: page and picture show what several GPUs did, however many there were."""

import copy
import itertools
import json
import sys
import tomllib
from pathlib import Path
from types import ModuleType

import pytest

matplotlib = pytest.importorskip("matplotlib")

ROOT = Path(__file__).resolve().parent.parent
# A rehearsal on the CPU: gpu_check_multi.py --tiny --clients 8 --seconds 3 --one-seconds 2
# --kill-seconds 2.
EXAMPLE = Path(__file__).with_name("devices-2-tiny.json")
COSMOS3 = ("cosmos3_nano", "cosmos3_super")


@pytest.fixture
def scaling(monkeypatch) -> ModuleType:
    """scripts/scaling_page.py as a module."""
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    for name in ("scaling_page", "plot_results", "_plot_scaling", "_plot_style"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    import scaling_page

    monkeypatch.syspath_prepend(str(scaling_page.BENCHMARKS))
    return scaling_page


@pytest.fixture
def two():
    return json.loads(EXAMPLE.read_text(encoding="utf-8"))


def as_if_of(document, devices):
    """Return a document in the form of another number of devices."""
    found = copy.deepcopy(document) | {"devices": devices}
    for part in COSMOS3:
        old = found[part]
        old[f"cfg 2 x tp {devices // 2}"] = old.pop("branches")
        old[f"cfg 1 x tp {devices}"] = old.pop("layers")
    return found


def cells(text, *first):
    """Return the cells of the one row that begins so."""
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in text.splitlines()]
    (row,) = [row for row in rows if row[: len(first)] == [*first]]
    return row[len(first) :]


def test_the_stored_page_is_that_of_the_stored_results(scaling):
    found = scaling.files(scaling.stored(scaling.RESULTS))
    assert (ROOT / "docs" / scaling.PAGE).read_text(encoding="utf-8") == found[scaling.PAGE]
    assert (ROOT / "docs" / scaling.PICTURE).exists() is (scaling.PICTURE in found)


def test_the_stored_picture_is_that_of_the_stored_results(scaling, capsys):
    pins = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["uv"]
    if f"matplotlib=={matplotlib.__version__}" not in pins["constraint-dependencies"]:
        pytest.skip("the picture is that of the pinned matplotlib")
    assert scaling.main(["--check"]) == 0, capsys.readouterr().out


def test_without_results_the_page_claims_none_and_there_is_no_picture(scaling, tmp_path):
    docs = tmp_path / "docs"
    options = ["--results", str(tmp_path), "--docs", str(docs)]
    assert scaling.main(options) == 0
    assert [path.name for path in docs.rglob("*")] == ["scaling.md"]
    text = (docs / "scaling.md").read_text(encoding="utf-8")
    assert "No run of it is stored yet." in text
    assert "|" not in text
    assert "!" not in text


def test_results_are_found_and_what_is_stale_fails_the_check(scaling, two, tmp_path, capsys):
    options = ["--results", str(tmp_path), "--docs", str(tmp_path / "docs")]
    for devices in (8, 2):
        text = json.dumps(two if devices == 2 else as_if_of(two, devices))
        (tmp_path / f"devices-{devices}.json").write_text(text)
    assert [found["devices"] for found in scaling.stored(tmp_path)] == [2, 8]
    assert scaling.main([*options, "--check"]) == 1
    assert scaling.main(options) == 0
    assert scaling.main([*options, "--check"]) == 0
    capsys.readouterr()
    page, picture = (tmp_path / "docs" / name for name in (scaling.PAGE, scaling.PICTURE))
    page.write_text(page.read_text(encoding="utf-8").replace("SIGKILL", "SIGTERM"))
    assert scaling.main([*options, "--check"]) == 1
    assert "scaling.md" in (said := capsys.readouterr().out)
    assert "scaling.svg" not in said
    picture.write_text(picture.read_text(encoding="utf-8").replace("Super", "Large"))
    assert scaling.main([*options, "--check"]) == 1
    assert "scaling.svg" in capsys.readouterr().out


def test_the_page_has_every_result(scaling, two):
    nano, large = (two[part] for part in COSMOS3)
    nano["layers"] |= {"ms": [7.06, 5.04], "speedup": 1.5, "most_bytes": [2_000_000_000, 10**9]}
    nano["one_device"] |= {"ms": [9.06, 9.02], "most_bytes": [3_000_000_000] * 2}
    nano["one_device"]["difference_to_fp32"] = {"video": 0.0312, "action": 0.00449}
    nano["layers"]["difference"] = {"video": 0.0411, "action": 0.00512}
    nano["layers"]["difference_to_fp32"] = {"video": 0.0298, "action": 0.00401}
    text = scaling.page([two])
    rows = [line for line in text.splitlines() if line.startswith("| Nano | 2 | every layer")]
    assert rows == [
        "| Nano | 2 | every layer | 9.0 | 5.0 | 1.5 | 3.0 | 2.0, 1.0 |",
        "| Nano | 2 | every layer | video | 0.0411 | 0.0298 | 0.0312 |",
        "| Nano | 2 | every layer | action | 0.00512 | 0.00401 | 0.00449 |",
    ]
    assert f"| {large['branches']['speedup']} |" in text
    for name, replicas in (("one", "1"), ("many", "2")):
        (row,) = two["pi05"][name]["rows"]
        shown = cells(text, "2", replicas, "8")
        assert shown[1:4] == [f"{row[column]:.0f}" for column in ("p50 ms", "p90 ms", "p99 ms")]
        assert shown[4:6] == [f"{row[column]:.1f}" for column in ("chunks/s", "batch")]
        assert shown[6] == ("" if name == "one" else str(two["pi05"]["speedup"]))
    killed = two["pi05"]["many"]["killed"]
    requests, replies = str(killed["requests"]), str(killed["replies"])
    assert cells(text, "2", "8", requests, replies)[0] == str(killed["lost"])
    assert "Nano, Super, π0.5: 2 × cpu" in text
    assert f"commit {two['pi05']['environment']['commit']}, {two['pi05']['date']}." in text


def test_what_failed_or_has_no_memory_says_so(scaling, two):
    nano, large = (two[part] for part in COSMOS3)
    nano["error"] = "OverLimitError: not done after 100 s"
    del nano["layers"], nano["branches"]["difference_to_fp32"]
    large["one_device"] = {"reason": "weights of 126 GB; a GPU has 80 GB"}
    large["branches"] = {"error": "WorkerError: rank 1 has ended"}
    for key in ("difference", "difference_to_fp32", "speedup"):
        large["layers"].pop(key)
    two["pi05"] = {"error": "RuntimeError: the load ended"}
    text = scaling.page([two])
    assert "Nano on 2 GPUs was not measured to its end: OverLimitError: not done" in text
    assert "Super on 2 GPUs, one GPU, was not measured: weights of 126 GB" in text
    assert "Super on 2 GPUs, a branch each, was not measured: WorkerError: rank 1" in text
    assert "π0.5 on 2 GPUs was not measured to its end: RuntimeError" in text
    assert "| Nano | 2 | every layer" not in text
    (row,) = [line for line in text.splitlines() if line.startswith("| Super | 2 |")]
    assert row.startswith("| Super | 2 | every layer |  |")
    scaling.svg(scaling.scaling([two]))
    only = {key: two[key] for key in ("devices", "pi05")}
    assert "Cosmos3 on several" not in scaling.page([only])
    scaling.svg(scaling.scaling([only]))


@pytest.mark.parametrize("counts", [(2,), (2, 4, 8)], ids=str)
def test_the_picture_has_a_point_for_every_result(scaling, two, counts):
    documents = [copy.deepcopy(two) if n == 2 else as_if_of(two, n) for n in counts]
    keys = sys.modules["_plot_scaling"].grid_key
    for place, document in enumerate(documents, start=1):
        for part in COSMOS3:
            for share in ("branches", "layers"):
                entry = document[part][keys(document["devices"], share)]
                entry["speedup"] = place + (part == COSMOS3[0]) / 2
                entry["most_bytes"] = [int(4e9 / place), int(5e9 / place)]
            document[part]["one_device"]["most_bytes"] = [6_000_000_000] * 2
        document["pi05"]["speedup"] = 1.75 * place
    left, right = scaling.scaling(documents).axes
    ideal, *lines = left.get_lines()
    assert [*ideal.get_xdata()] == [*ideal.get_ydata()] == [1, *counts]
    assert len(lines) == 5
    replicas, *shared = lines
    assert [*replicas.get_ydata()] == [1, *(1.75 * place for place in range(1, len(counts) + 1))]
    nano = [1, *(place + 0.5 for place in range(1, len(counts) + 1))]
    assert [[*line.get_ydata()] for line in shared[:2]] == [nano, nano]
    for line in lines:
        assert [*line.get_xdata()] == [1, *counts]
    assert len(right.get_lines()) == 4
    for line in right.get_lines():
        assert [*line.get_ydata()] == pytest.approx(
            [6, *(5 / p for p in range(1, len(counts) + 1))]
        )
    texts = {text.get_text() for text in left.texts}
    assert f"π0.5, replicas: {1.75 * len(counts):.2f} ×" in texts
    assert {text.get_text() for text in right.texts} >= {f"Super, layers: {5 / len(counts):.0f} GB"}
    heights = sorted(text.xy[1] for text in left.texts)
    assert all(above - below > 0.07 for below, above in itertools.pairwise(heights))
    assert heights[-1] <= 1


def test_a_model_that_no_single_gpu_holds_begins_with_several(scaling, two):
    four = as_if_of(two, 4)
    for document in (two, four):
        document["cosmos3_super"]["one_device"] = {"reason": "too large"}
    series = sys.modules["_plot_scaling"].memory([two, four])
    points = {one.label: [count for count, _ in one.points] for one in series}
    assert points["Super, layers"] == [2, 4]
    assert points["Nano, layers"] == [1, 2, 4]
