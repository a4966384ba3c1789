"""Random tasks, states, pictures and configs: a batch of a known form, or a ProcessingError."""

import copy
import json

import numpy as np
import pytest
import torch

from phyai.processing import Observation, PolicyProcessor, ProcessingError, load_stats

CAMERAS = ("base_0_rgb", "left_wrist_0_rgb", "right_wrist_0_rgb", "observation.images.base_0_rgb")
WORDS = [
    "pick", "_up", "the\n", "<bos>", "<eos>", "  ", "State:", ";\nAction: ", "\u2028", "é", "ﬁ",
    "🤖", "\x00", "-1 255", "x" * 400, "\t", "",
]  # fmt: skip
VALUES = [
    None, True, 0, -1, 2**70, 1.5, float("nan"), float("inf"), "", "QUANTILES", "MIN_MAX", "x", [],
    {}, [None], [[1.0]], {"a": 1}, "../x", [1.0, 2.0],
]  # fmt: skip


def make_task(draw):
    return "".join(draw.choice(WORDS) for _ in range(draw.randrange(6)))


def make_state(draw, width):
    if draw.random() < 0.1:
        return draw.choice([None, np.float32(3), "text", [1.0] * width, np.zeros((2, width))])
    if draw.random() < 0.2:
        width += draw.choice([-1, 1, 7, -width])
    scale = draw.choice([1e-30, 1, 1e6, 1e38])
    state = np.array([draw.gauss(0, 1) * scale for _ in range(width)])
    if width and draw.random() < 0.1:
        state[draw.randrange(width)] = draw.choice([np.nan, np.inf, -np.inf])
    with np.errstate(over="ignore", invalid="ignore"):
        return state.astype(draw.choice([np.float32, np.float64, np.float16, np.int64, object]))


def make_picture(draw):
    sides = [draw.choice([1, 2, 7, 31, 224, 480]) for _ in range(2)]
    layout = draw.choice(["last", "last", "first", "batch", "gray", "flat", "four", "empty"])
    shape = {
        "last": (*sides, 3),
        "first": (3, *sides),
        "batch": (1, *sides, 3),
        "gray": (*sides, 1),
        "flat": tuple(sides),
        "four": (*sides, 4),
        "empty": (0, sides[0], 3),
    }[layout]
    kind = draw.choice(["u1", "u1", "f4", "f8", "i4", "huge", "nan"])
    noise = np.random.default_rng(draw.randrange(2**32)).random(shape)
    if kind == "u1":
        return (noise * 255).astype(np.uint8)
    if kind in ("huge", "nan"):
        return np.full(shape, 1e30 if kind == "huge" else np.nan, np.float32)
    return (noise * (1 if kind[0] == "f" else 255)).astype(kind)


def make_observation(draw, width=5):
    """A good observation, of which every second one has an odd part."""
    odd = draw.choice(["", "", "", "", "picture", "state", "camera", "task"])
    images = {}
    for name in draw.sample(CAMERAS[:3], draw.randrange(1, 4)):
        size = [draw.choice([1, 7, 224, 300]) for _ in range(2)]
        noise = np.random.default_rng(draw.randrange(2**32))
        images[name] = noise.integers(0, 256, (*size, 3), dtype=np.uint8)
    if odd == "picture":
        images[draw.choice([*images])] = make_picture(draw)
    if odd == "camera":
        images[draw.choice([CAMERAS[3], "unknown", "", 3])] = make_picture(draw)
    state = make_state(draw, width) if odd == "state" else np.array(draw.choices([-2.5, 0, 3], k=5))
    task = draw.choice([None, 3, b"go", "a\ud800"]) if odd == "task" else make_task(draw)
    return Observation(images, state, task)


@pytest.fixture
def processors(lerobot, build):
    textual = PolicyProcessor.from_checkpoint(lerobot().folder, build.Shape())
    checkpoint = lerobot(mode="MEAN_STD")
    step = checkpoint.step("pi05_prepare_state_tokenizer_processor_step")
    step["registry_name"] = "pi0_new_line_processor"
    checkpoint.step("tokenizer_processor")["config"]["max_length"] = 48
    shape = build.Shape("pi0", tokenizer_max_length=48)
    return [textual, PolicyProcessor.from_checkpoint(checkpoint.write(), shape)]


def test_observations(processors, fuzz):
    def check(draw):
        processor = draw.choice(processors)
        observations = [make_observation(draw) for _ in range(draw.randrange(1, 3))]
        try:
            inputs = processor.preprocess(observations)
        except ProcessingError:
            return False
        spec, batch = processor.spec, len(observations)
        assert inputs.images.shape == (batch, 3, 3, *spec.shape.image_resolution)
        assert inputs.images.dtype == torch.float32
        assert inputs.tokens.shape == inputs.token_mask.shape == (batch, spec.max_length)
        assert inputs.tokens.min() >= 0
        assert inputs.tokens.max() < spec.tokenizer.vocab_size
        assert (inputs.tokens[~inputs.token_mask] == 0).all()
        assert inputs.images.isfinite().all()
        assert (inputs.images[~inputs.image_mask] == -1).all()
        assert inputs.state is None or inputs.state.isfinite().all()
        actions = torch.zeros(batch, 3, spec.shape.max_action_dim)
        assert np.isfinite(processor.postprocess(actions, observations)).all()
        return True

    fuzz("observations", check, 100, (0.1, 0.9))


def places(tree):
    """Every mapping and list of a tree that is not empty."""
    found = []
    if isinstance(tree, dict | list):
        found = [tree] if tree else []
        for item in tree.values() if isinstance(tree, dict) else tree:
            found += places(item)
    return found


def mutate(tree, draw):
    found = places(tree)
    if not found:
        return
    place = draw.choice(found)
    key = draw.choice([*place] if isinstance(place, dict) else range(len(place)))
    action = draw.choice(["delete", "replace", "insert"])
    if action == "delete":
        del place[key]
    elif action == "replace" or isinstance(place, list):
        place[key] = copy.deepcopy(draw.choice(VALUES))
    else:
        place[draw.choice(["mean", "config", "steps", "x", "enabled"])] = copy.deepcopy(
            draw.choice(VALUES)
        )


def test_configs(lerobot, build, fuzz):
    checkpoint = lerobot()
    names = ["policy_preprocessor.json", "policy_postprocessor.json"]
    texts = {name: (checkpoint.folder / name).read_text() for name in names}

    def check(draw):
        name = draw.choice(names)
        tree = json.loads(texts[name])
        for _ in range(draw.randrange(1, 3)):
            mutate(tree, draw)
        (checkpoint.folder / name).write_text(json.dumps(tree))
        try:
            processor = PolicyProcessor.from_checkpoint(checkpoint.folder, build.Shape())
            processor.describe()
        except ProcessingError:
            return False
        finally:
            (checkpoint.folder / name).write_text(texts[name])
        return True

    fuzz("configs", check, 100, (0.1, 0.9))


def test_statistics(tmp_path, build, fuzz):
    path = tmp_path / "stats.json"
    good = {
        feature: {name: column.tolist() for name, column in stats.items()}
        for feature, stats in (("state", build.state_stats()), ("actions", build.action_stats()))
    }

    def check(draw):
        tree = {"norm_stats": copy.deepcopy(good)}
        for _ in range(draw.randrange(1, 4)):
            mutate(tree, draw)
        path.write_text(json.dumps(tree))
        if draw.random() < 0.2:
            raw = bytearray(path.read_bytes())
            raw[draw.randrange(len(raw))] = draw.randrange(256)
            path.write_bytes(raw)
        try:
            found = load_stats(path)
        except ProcessingError as error:
            message = str(error)
        else:
            assert all(v.dtype == np.float64 for f in found.values() for v in f.values.values())
            return True
        assert message.startswith(str(path))
        return False

    fuzz("statistics", check, 100, (0.1, 0.9))
