"""Nothing that a peer sends may reach code that runs it."""

import ast
import pickle
from pathlib import Path

import pytest

import phyai.client
import phyai.serving
from phyai.client import PolicyClient

from .conftest import request

FORBIDDEN = {"pickle", "cPickle", "dill", "cloudpickle", "marshal", "shelve", "joblib"}
SOURCES = [
    file
    for package in (phyai.client, phyai.serving)
    for file in sorted(Path(package.__file__).parent.rglob("*.py"))
]


def imported(tree):
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (name.name.split(".")[0] for name in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module.split(".")[0]


@pytest.mark.parametrize("file", SOURCES, ids=lambda file: f"{file.parent.name}/{file.name}")
def test_no_module_of_a_wire_path_imports_what_unpickles(file):
    tree = ast.parse(file.read_text())
    assert not FORBIDDEN & set(imported(tree))
    calls = {
        node.func.id
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)
    }
    assert not {"eval", "exec", "__import__", "compile"} & calls


def test_a_forbidden_import_is_recognised():
    assert set(imported(ast.parse("import dill.source\nfrom pickle import loads"))) & FORBIDDEN


def test_serving_works_where_unpickling_is_forbidden(serve_fake, monkeypatch):
    def refuse(*arguments, **options):
        raise AssertionError("something was unpickled")

    with serve_fake() as server, PolicyClient(port=server.port) as client:
        monkeypatch.setattr(pickle, "loads", refuse)
        monkeypatch.setattr(pickle, "load", refuse)
        monkeypatch.setattr(pickle, "Unpickler", refuse)
        client.infer(request())
