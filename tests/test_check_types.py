"""scripts/check_types.py, with Pyright and without."""

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture
def check_types() -> ModuleType:
    spec = importlib.util.spec_from_file_location("check_types", ROOT / "scripts/check_types.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def symbol(name, *, known=True, ambiguous=False, exported=True, says=()):
    return {
        "name": name,
        "isTypeKnown": known,
        "isTypeAmbiguous": ambiguous,
        "isExported": exported,
        "diagnostics": [{"message": message} for message in says],
    }


def document(*symbols, says=()):
    return {
        "typeCompleteness": {"packageName": "parts", "symbols": [*symbols]},
        "generalDiagnostics": [{"message": message} for message in says],
    }


def test_unknown_and_ambiguous_names_count_and_are_listed(check_types):
    found = check_types.Completeness.read(
        document(
            symbol("parts.a"),
            symbol("parts.b", known=False, says=["Type of x is unknown\n  and more", "again"]),
            symbol("parts.c", ambiguous=True),
            symbol("parts._d", known=False, exported=False),
        )
    )
    assert (found.package, found.known) == ("parts", 1)
    assert found.unstated == (
        "parts.b: Type of x is unknown",
        "parts.c: has a part whose type is not stated",
    )
    assert found.percent == pytest.approx(100 / 3)


def test_a_package_without_public_names_is_no_success(check_types):
    with pytest.raises(ValueError, match=r"no public symbol of parts: No py\.typed file found"):
        check_types.Completeness.read(document(says=["No py.typed file found"]))


@pytest.mark.parametrize(("least", "status"), [("50", 0), ("50.1", 1)])
def test_the_bar_decides(check_types, monkeypatch, capsys, least, status):
    found = check_types.Completeness("parts", 1, ("parts.b: unknown",))
    monkeypatch.setattr(check_types, "measure", lambda _: found)
    assert check_types.main(["--least", least, "parts"]) == status
    said = capsys.readouterr().out
    assert "parts: 50.0 % of 2 stated\n  parts.b: unknown\n" in said
    assert ("below 50.1 %: parts" in said) == bool(status)


def test_pyright_tells_a_stated_type_from_an_inferred_one(check_types, monkeypatch, tmp_path):
    folder = tmp_path / "parts"
    folder.mkdir()
    (folder / "py.typed").touch()
    (folder / "__init__.py").write_text(
        "def count(words: list[str]) -> int:\n    return len(words)\n\n\n"
        "def first(words):\n    return words[0]\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    found = check_types.measure("parts")
    assert found.known == 1
    (line,) = found.unstated
    assert line.startswith("parts.first: ")
