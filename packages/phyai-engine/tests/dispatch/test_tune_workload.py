"""What a measurement is valid for."""

from types import SimpleNamespace

import pytest
import torch

from phyai.dispatch import KernelQuery, probe_device
from phyai.dispatch.tune_workload import (
    Workload,
    bucket,
    device_identity,
    driver_version,
    versions,
)

CPU = probe_device("cpu")


def workload(catalog, version="v1", device=CPU, op="gemm", **query):
    query = {"dims": {"M": 50, "N": 8, "K": 16}, "dtype": "bf16", **query}
    return Workload.of(version, catalog.entry(op).facts(KernelQuery.build(op, **query)), device)


@pytest.mark.parametrize(
    ("size", "expected"), [(0, 0), (1, 1), (2, 2), (3, 4), (33, 64), (64, 64), (65, 128)]
)
def test_row_counts_share_the_next_power_of_two(size, expected):
    assert bucket(size) == expected


def test_only_row_counts_are_put_in_buckets(catalog):
    first = workload(catalog, dims={"M": 33, "N": 8, "K": 16})
    assert first.digest == workload(catalog, dims={"M": 64, "N": 8, "K": 16}).digest
    assert first.digest != workload(catalog, dims={"M": 65, "N": 8, "K": 16}).digest
    assert first.digest != workload(catalog, dims={"M": 33, "N": 7, "K": 16}).digest
    assert first.digest != workload(catalog, dims={"M": 33, "N": 8, "K": 15}).digest
    dims = {"tokens": 33, "kv_tokens": 40, "heads": 3, "kv_heads": 3, "head_dim": 64}
    facts = workload(catalog, op="attention", dims=dims).content["facts"]
    assert (facts["shape.tokens"], facts["shape.kv_tokens"], facts["shape.heads"]) == (64, 64, 3)


def test_mode_layer_and_library_probes_do_not_matter_but_facts_do(catalog):
    attrs = {"layout": "paged", "causal": False}
    dims = {"tokens": 4, "heads": 2, "kv_heads": 1, "head_dim": 8}

    def paged(**query):
        query = {"attrs": {**attrs, "layer_id": 0}, "dims": dims, **query}
        return workload(catalog, op="attention_paged", **query).digest

    assert paged() == paged(mode="capture")
    assert paged() == paged(attrs={**attrs, "layer_id": 1})
    assert paged() != paged(role="expert")
    assert paged() != paged(dtype="fp16")
    assert paged() != paged(attrs={**attrs, "causal": True})
    facts = catalog.entry("gemm").facts(KernelQuery.build("gemm", dtype="bf16"))
    before = Workload.of("v1", facts, CPU).digest
    facts.get("lib.triton")
    assert Workload.of("v1", facts, CPU).digest == before


def test_catalog_device_and_versions_matter(catalog, monkeypatch):
    from phyai.dispatch import tune_workload

    first = workload(catalog)
    assert first.digest != workload(catalog, version="v2").digest
    assert first.digest != workload(catalog, device=probe_device("nvidia:sm90")).digest
    monkeypatch.setattr(tune_workload, "versions", lambda: {"torch": "99"})
    assert first.digest != workload(catalog).digest
    assert {"torch", "phyai-engine", "phyai-quant"} <= set(versions())


class Cuda:
    """The parts of torch.cuda that identify a GPU."""

    def __init__(self, monkeypatch, name="GPU", cuda="13.0"):
        properties = SimpleNamespace(name=name, multi_processor_count=132)
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: properties)
        monkeypatch.setattr(torch.version, "cuda", cuda)
        device_identity.cache_clear()


def test_a_gpu_is_known_by_name_size_driver_and_cuda(catalog, monkeypatch):
    from phyai.dispatch import tune_workload

    device = probe_device("nvidia:sm90")
    monkeypatch.setattr(tune_workload, "driver_version", lambda: "580.1")
    try:
        Cuda(monkeypatch)
        assert device_identity(device) == {
            "name": "GPU",
            "multiprocessors": 132,
            "driver": "580.1",
            "cuda": "13.0",
            "hip": torch.version.hip,
        }
        digests = {workload(catalog, device=device).digest}
        for change in ({"name": "other"}, {"cuda": "12.8"}):
            Cuda(monkeypatch, **change)
            digests.add(workload(catalog, device=device).digest)
        monkeypatch.setattr(tune_workload, "driver_version", lambda: "590.2")
        Cuda(monkeypatch)
        digests.add(workload(catalog, device=device).digest)
        assert len(digests) == 4
    finally:
        device_identity.cache_clear()


def test_a_cpu_is_known_by_machine_and_threads():
    assert device_identity(CPU)["threads"] == torch.get_num_threads()
    assert device_identity(None) == {"name": "", "arch": None}


def test_driver_versions(tmp_path):
    file = tmp_path / "version"
    text = "NVRM version: NVIDIA UNIX x86_64 Kernel Module  {}  Tue Jul 1 2026\nGCC version: 12.2"
    file.write_text(text.format("580.82.07"))
    assert driver_version(file) == "580.82.07"
    file.write_text(text.replace("x86_64 Kernel", "Open Kernel").format("for x86_64  580.82.07"))
    assert driver_version(file) == "580.82.07"
    unknown = driver_version(tmp_path / "absent")
    assert unknown is None or unknown.startswith("cuda ")
