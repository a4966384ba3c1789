"""scripts/plot_results.py: the pictures show what the results hold, and the pages show them."""

import json
import re
import sys
import tomllib
from pathlib import Path
from types import ModuleType
from xml.etree import ElementTree

import pytest

matplotlib = pytest.importorskip("matplotlib")

ROOT = Path(__file__).resolve().parent.parent
PAGES = {
    "linear-performance.md": ["linear-roofline"],
    "attention-performance.md": ["attention-rate", "sparse-attention-rate"],
    "pi05-performance.md": ["pi05-stages"],
}
SVG = "{http://www.w3.org/2000/svg}"


@pytest.fixture
def plots(monkeypatch) -> ModuleType:
    """scripts/plot_results.py as a module."""
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    for name in ("plot_results", "_plot_style", "_plot_kernels", "_plot_pi05"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    import plot_results

    return plot_results


def results(plots, name):
    return json.loads((ROOT / plots.FIGURES[name][0]).read_text(encoding="utf-8"))


def series(figure):
    """Return all points of a figure that are drawn with markers, to compare with rows."""
    lines = [line for axes in figure.axes for line in axes.get_lines()]
    marked = [line for line in lines if line.get_marker() not in ("None", None, "")]
    return sorted((float(x), float(y)) for line in marked for x, y in line.get_xydata())


def assert_same(points, expected):
    assert len(points) == len(expected)
    for point, wanted in zip(points, sorted(expected), strict=True):
        assert point == pytest.approx(wanted)


def test_the_stored_pictures_show_the_stored_results(plots, capsys):
    pins = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["uv"]
    if f"matplotlib=={matplotlib.__version__}" not in pins["constraint-dependencies"]:
        pytest.skip("the pictures are those of the pinned matplotlib")
    assert plots.main(["--check"]) == 0, capsys.readouterr().out


def test_a_picture_of_other_results_fails_the_check(plots, tmp_path, capsys):
    assert plots.main(["--out", str(tmp_path)]) == 0
    assert plots.main(["--out", str(tmp_path), "--check"]) == 0
    path = tmp_path / "pi05-stages.svg"
    text = path.read_text(encoding="utf-8")
    changed = re.sub(r"\d+\.\d ms", "99.9 ms", text, count=1)
    assert changed != text
    path.write_text(changed, encoding="utf-8")
    assert plots.main(["--out", str(tmp_path), "--check"]) == 1
    said = capsys.readouterr().out
    assert "pi05-stages.svg" in said
    assert "linear-roofline" not in said


def test_rounding_alone_is_no_difference(plots):
    assert plots.same("<a x='1.004'/>", "<a x='1.009'/>")
    assert not plots.same("<a x='1.004'/>", "<a x='1.104'/>")
    assert not plots.same("<a x='1.004'/>", "<b x='1.004'/>")


def test_drawing_twice_gives_the_same_bytes_without_a_date(plots):
    first = plots.draw("pi05-stages")
    assert first == plots.draw("pi05-stages")
    assert "dc:date" not in first


@pytest.mark.parametrize("page", PAGES)
def test_pages_show_the_pictures(page):
    text = (ROOT / "docs" / page).read_text(encoding="utf-8")
    shown = re.findall(r"!\[[^\]]+\]\(images/performance/([\w-]+)\.svg\)", text)
    assert shown == PAGES[page]


def test_every_picture_has_a_page(plots):
    assert sorted(plots.FIGURES) == sorted(name for names in PAGES.values() for name in names)


@pytest.mark.parametrize("name", [name for names in PAGES.values() for name in names])
def test_a_picture_names_device_versions_and_commit(plots, name):
    texts = [*ElementTree.fromstring(plots.draw(name)).iter(f"{SVG}text")]
    said = " ".join("".join(text.itertext()) for text in texts)
    result = results(plots, name)
    place = result.get("environment", result)
    assert place["device"] in said
    assert f"commit {place['commit']}" in said
    for package in ("python", "torch", "triton"):
        assert f"{package} {place['versions'][package]}" in said.replace("  ", " ")


def test_the_roofline_has_a_point_for_every_linear(plots):
    result = results(plots, "linear-roofline")
    rows = [row for row in result["rows"] if row.get("tops")]
    drawn = series(plots.FIGURES["linear-roofline"][1](result))
    assert sorted(y for _, y in drawn) == pytest.approx(sorted(row["tops"] for row in rows))
    # 8192³ in INT8: 2 * 8192³ operations; 2 bytes in and out, 1 byte of weight for each of 8192².
    assert any(x == pytest.approx(2 * 8192 / 5) for x, _ in drawn)
    assert all(0.7 < x < 3e4 for x, _ in drawn), "none may lie outside of the axes"


def test_points_stay_below_the_ceilings(plots):
    """But for timing noise: what a linear reaches is less than its product and its traffic."""
    from _plot_kernels import ceilings, intensity

    rows = [row for row in results(plots, "linear-roofline")["rows"] if row.get("tops")]
    copy, products = ceilings(rows)
    for row in rows:
        assert row["tops"] < 1.05 * min(copy * intensity(row), max(products.values()))


def test_attention_has_a_point_for_every_dense_rate(plots):
    result = results(plots, "attention-rate")
    rows = [row for row in result["rows"] if row.get("tops") and "H32 " in row["case"]]
    drawn = series(plots.FIGURES["attention-rate"][1](result))
    assert_same(drawn, [(row["rows"], row["tops"]) for row in rows])


def test_sparse_attention_has_a_point_for_every_share(plots):
    result = results(plots, "sparse-attention-rate")
    rows = [row for row in result["rows"] if row["case"].startswith("H32 S32768 D128")]
    drawn = series(plots.FIGURES["sparse-attention-rate"][1](result))
    assert_same(drawn, [(row["keep"], row["tops"]) for row in rows])


def test_bars_are_the_medians_and_the_floors(plots):
    result = results(plots, "pi05-stages")
    (axes,) = plots.FIGURES["pi05-stages"][1](result).axes
    widths = {round(float(bar.get_width()), 6) for bar in axes.patches}
    for policy in result["policies"].values():
        for found in policy["results"]:
            for stage in ("vision", "prefix", "denoise"):
                one = found["setting"]["batch"] == 1
                assert (found["ms"][stage]["p50"] in widths) is one
                assert found["floor_ms"][stage] in widths or not one
    labels = [label.get_text() for label in axes.get_yticklabels()]
    for source in ("PhyAI blog", "SGLang", "Realtime-VLA", "OpenPI"):
        assert any(source in label for label in labels)


def test_a_run_without_results_of_one_policy_still_draws(plots):
    result = results(plots, "pi05-stages")
    result["policies"]["broken"] = {"error": "out of memory"}
    (axes,) = plots.FIGURES["pi05-stages"][1](result).axes
    assert not any("broken" in label.get_text() for label in axes.get_yticklabels())
