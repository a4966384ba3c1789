"""The operators that project from windows of an attention, against whole attentions."""

import pytest
import torch

from piper_kernels.fusions.attention import convrot_int8, output, pipeline, windows
from piper_kernels.fusions.convrot_int8_sparse_piper import _output_ops  # noqa: F401  # registers

ops = torch.ops.piper_kernels
GIVEN = ops.convrot_int8_sparse_piper_attention_output
PROJECTED = ops.convrot_int8_sparse_piper_projected_query_attention_output


@pytest.fixture
def operators(attention_operators):
    return attention_operators


def arguments(parts, *, given, coarse="", **changes):
    """Return the arguments of an operator; gates are given, projected or projected late."""
    found = parts["keys"] | parts["output"] | (parts["queries"] if given else parts["query"])
    if coarse:
        found |= {"block_mean": parts["block_mean"], **parts["coarse"]}
        if coarse == "given":
            rows = ops.convrot_int8_linear_prepared(
                *parts["gates"].values(), None, parts["x"].dtype
            )
            found["coarse_gate"] = rows.unflatten(-1, (-1, 64))
        else:
            found |= parts["gates"]
    return found | changes


@pytest.mark.parametrize("coarse", ["", "given", "projected"])
@pytest.mark.parametrize("given", [True, False])
@pytest.mark.parametrize(("routing", "lengths"), [(0, None), (1, (64, 17, 51, 1))])
def test_windows_do_not_change_the_result(operators, coarse, given, routing, lengths):
    rows = 193 if lengths is None else 256
    parts = operators.projected(batch=2, rows=rows, routing=routing, lengths=lengths)
    expected = operators.chain(parts, coarse=bool(coarse))
    valid = torch.arange(rows)
    if lengths is not None:
        valid = torch.cat([torch.arange(n) + 64 * i for i, n in enumerate(lengths)])
    for rows_of_window in (64, 128, 8192):
        for routed in (None, 1):
            changes = {"query_chunk_rows": rows_of_window}
            if routed is not None:
                changes["sparse_query_blocks"] = parts["keys"]["sparse_query_blocks"] = routed
                expected_here = operators.chain(parts, coarse=bool(coarse))
            else:
                expected_here = expected
            actual = operators.call(
                GIVEN if given else PROJECTED,
                arguments(parts, given=given, coarse=coarse, **changes),
            )
            assert torch.equal(actual[:, valid], expected_here[:, valid])
        del parts["keys"]["sparse_query_blocks"]


def test_floating_inputs_are_prepared_by_windows(operators):
    parts = operators.projected(rows=200)
    scale = torch.tensor(0.02)
    late = {"input_group_size": 64, "query_input_qdata": parts["x"], "query_chunk_rows": 64}
    late["query_input_scale"] = None
    expected = operators.chain(parts, coarse=False)
    actual = operators.call(PROJECTED, arguments(parts, given=False, **late))
    assert torch.equal(actual, expected)
    qdata, row_scale = ops.convrot_int8_prepare_input(parts["x"], 64, None, scale)
    early = {"query_input_qdata": qdata, "query_input_scale": row_scale}
    expected = operators.call(PROJECTED, arguments(parts, given=False, **early))
    late["query_input_scale"] = scale
    actual = operators.call(PROJECTED, arguments(parts, given=False, **late))
    assert torch.equal(actual, expected)


@pytest.mark.parametrize("operator", [GIVEN, PROJECTED])
def test_opcheck(operators, operator):
    parts = operators.projected(rows=130)
    found = arguments(parts, given=operator is GIVEN, coarse="projected", query_chunk_rows=64)
    torch.library.opcheck(operator.default, *operators.bind(operator, found))


BAD = {
    "query_chunk_rows": (lambda _: 96, "positive multiple of 64, got 96"),
    "weight_qdata": (lambda w: w[:, :64].contiguous(), "128 input features"),
    "bias": (lambda b: b[:-1], "bias must have shape"),
    "group_size": (lambda _: 256, "not divisible by group size"),
    "key": (lambda k: k.float(), "key must be torch.int8"),
    "value": (lambda v: v.mT.contiguous(), "value must be"),
    "value_mean": (lambda m: m.half(), "value_mean must be"),
    "head_keep_ratio_units": (lambda _: [1000], "multiple of equal key"),
    "sparse_key_blocks": (lambda _: 9, r"sparse_key_blocks must be in \[1, 3\]"),
    "logical_sequence_length": (lambda _: 300, "do not fill"),
    "block_mean": (lambda m: m[:, :, :1], "block_mean must be float32"),
    "coarse_scale": (lambda _: -1.0, "finite and positive"),
    "coarse_key_blocks": (lambda _: 1, "coarse_key_blocks must be"),
    "gate_input_qdata": (lambda q: q[:, :64].contiguous(), "prepared input needs"),
    "gate_weight_qdata": (lambda w: w[:64].contiguous(), "heads"),
    "cos": (lambda c: c[:100].contiguous(), "one row for each of 193"),
    "query_input_qdata": (lambda q: q.float(), "input_group_size"),
    "softmax_scale": (lambda _: 0.0, "finite and positive"),
}


@pytest.mark.parametrize("name", BAD)
def test_errors_name_what_does_not_fit(operators, name):
    parts = operators.projected()
    found = arguments(parts, given=False, coarse="projected")
    change, message = BAD[name]
    found[name] = change(found.get(name))
    with pytest.raises(ValueError, match=message):
        operators.call(PROJECTED, found)
    fake = torch._subclasses.FakeTensorMode()
    meta = {k: fake.from_tensor(v) if isinstance(v, torch.Tensor) else v for k, v in found.items()}
    with fake, pytest.raises(ValueError, match=message):
        operators.call(PROJECTED, meta)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"block_mean": None}, "need block_mean"),
        ({"coarse_scale": None}, "needs coarse_scale"),
        ({"coarse_gate": torch.zeros(1, 193, 2, 64)}, "excludes a projected gate"),
    ],
)
def test_a_coarse_branch_is_complete(operators, changes, message):
    found = arguments(operators.projected(), given=False, coarse="projected", **changes)
    with pytest.raises(ValueError, match=message):
        operators.call(PROJECTED, found)


def test_prepared_queries_are_checked(operators):
    found = arguments(operators.projected(), given=True)
    with pytest.raises(ValueError, match="query_summary must be"):
        operators.call(GIVEN, found | {"query_summary": found["query_summary"][:, :, 1:]})
    with pytest.raises(ValueError, match="query_chunk_rows must be a positive multiple of 64"):
        operators.call(GIVEN, found | {"query_chunk_rows": 65})


@pytest.mark.parametrize(
    ("rows", "most", "multiple", "expected"),
    [
        (8192, 8192, 64, [8192]),
        (8193, 8192, 64, [4160, 4033]),
        (65536, 8192, 64, [8192] * 8),
        (65537, 8192, 128, [7296] * 8 + [7169]),
        (65, 64, 64, [64, 1]),
        (1, 8192, 128, [1]),
        (0, 8192, 128, []),
    ],
)
def test_windows_are_equal_and_few(rows, most, multiple, expected):
    found = windows.balanced_windows(rows, most, multiple)
    assert [w.stop - w.start for w in found] == expected
    assert all(w.start % multiple == 0 for w in found)


def test_whole_waves_are_preferred_only_where_they_save_one():
    sizes = lambda found: [w.stop - w.start for w in found]  # noqa: E731
    # 20 tiles of 128 rows in windows of 10 tiles: a wave of 9 tiles needs 4 waves, or 3.
    assert sizes(windows.wave_windows(2560, 1280, 128, 9 * 128)) == [1152, 1152, 256]
    assert sizes(windows.wave_windows(2560, 1280, 128, 10 * 128)) == [1280, 1280]
    assert sizes(windows.wave_windows(2560, 1280, 128, 0)) == [1280, 1280]
    assert sizes(windows.wave_windows(2560, 1280, 128, 4096)) == [1280, 1280]


def test_memory_beside_the_result_is_that_of_two_windows(operators, monkeypatch):
    """What the operator allocates itself does not grow with the sequence."""
    used = []
    for rows in (512, 1024):
        parts = operators.projected(rows=rows)
        seen = {}
        run = output.WindowedOutput.run

        def recorded(self, attend, target, touched, seen=seen, run=run):
            result = run(self, attend, target, touched)
            seen["rooms"] = [*self._attention, *self._gates]
            seen["linear"] = self.linear
            return result

        monkeypatch.setattr(output.WindowedOutput, "run", recorded)
        found = arguments(parts, given=False, coarse="projected", query_chunk_rows=128)
        operators.call(PROJECTED, found)
        monkeypatch.undo()
        assert isinstance(seen["linear"], convrot_int8.Int8OutputLinear)
        used.append(sum(t.nbytes for t in (*seen["rooms"], *seen["linear"]._workspace)))
    # One window of attention and of gates on a CPU, and codes and scales of one.
    assert used == [128 * (2 * 128 * 2 + 128 + 4)] * 2


class FakeStream:
    """Records what waits for what."""

    log: list

    def __init__(self, name, log):
        self.name, self.log = name, log

    def wait_stream(self, other):
        self.log.append((self.name, "waits for all of", other.name))

    def wait_event(self, event):
        self.log.append((self.name, "waits for", event.at))


def test_streams_wait_for_each_other(monkeypatch):
    """A slot is written again only when the next stage has read it."""
    log, made, active = [], [], ["current"]
    current = FakeStream("current", log)

    def stream(_device):
        made.append(FakeStream(f"side {len(made)}", log))
        return made[-1]

    class Event:
        def record(self, where):
            self.at = (where.name, len([x for x in log if x[0] == where.name and x[1] == "runs"]))

    class Context:
        def __init__(self, where):
            self.where = where

        def __enter__(self):
            active.append(self.where.name)

        def __exit__(self, *_):
            active.pop()

    monkeypatch.setattr(torch.cuda, "current_stream", lambda _device: current)
    monkeypatch.setattr(torch.cuda, "Stream", stream)
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "stream", Context)

    def stage(name):
        def run(window, slot):
            log.append((active[-1], "runs", name, window.start, slot))

        return run

    parts = [slice(i, i + 1) for i in range(4)]
    pipeline.run_stages(parts, [stage("attend"), stage("project")], 0, torch.device("cuda"), [])
    runs = [entry[2:] for entry in log if entry[1] == "runs"]
    assert runs == [(name, i, i % 2) for i in range(4) for name in ("attend", "project")]
    assert {entry[0] for entry in log if entry[1:3] == ("runs", "project")} == {"side 0"}
    # The third window overwrites the slot of the first: after its projection.
    third = log.index(("current", "runs", "attend", 2, 0))
    assert log[third - 1] == ("current", "waits for", ("side 0", 1))
    for i in range(4):
        project = log.index(("side 0", "runs", "project", i, i % 2))
        assert ("side 0", "waits for", ("current", i + 1)) in log[:project]
    assert log[-1] == ("current", "waits for all of", "side 0")
    log.clear()
    pipeline.run_stages(parts[:1], [stage("attend"), stage("project")], 0, torch.device("cuda"), [])
    assert [entry[1] for entry in log] == ["runs", "runs"]


@pytest.mark.parametrize(("count", "stages"), [(7, 2), (8, 3)])
def test_gates_run_ahead_from_eight_windows_on(operators, monkeypatch, count, stages):
    seen = []
    monkeypatch.setattr(
        output, "run_stages", lambda found, given, main, *_: seen.append((len(given), main))
    )
    parts = operators.projected(rows=64 * count)
    found = arguments(parts, given=False, coarse="projected", query_chunk_rows=64)
    operators.call(PROJECTED, found)
    assert seen == [(stages, stages - 2)]
