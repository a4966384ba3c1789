import logging

import numpy as np
import pytest

from phyai.processing import NormMode, PolicyProcessor, ProcessingError


def load(folder, shape, **options):
    return PolicyProcessor.from_checkpoint(folder, shape, **options).spec


def drop_state_files(checkpoint):
    for name in ("normalizer_processor", "unnormalizer_processor"):
        del checkpoint.step(name)["state_file"]
    return checkpoint.write()


def test_missing_statistics_are_refused_unless_allowed(lerobot, build, caplog):
    folder = drop_state_files(lerobot())
    with pytest.raises(ProcessingError, match=r"no statistics for the state .mode QUANTILES"):
        load(folder, build.Shape())
    with caplog.at_level(logging.WARNING):
        spec = load(folder, build.Shape(), allow_identity_norm=True)
    assert spec.state_norm.mode is spec.action_norm.mode is NormMode.IDENTITY
    assert "the state is not normalised" in caplog.text
    assert "the action is not normalised" in caplog.text


@pytest.mark.parametrize("key", ["observation.state.mean", "action.std"])
def test_infinite_placeholders_are_refused_even_when_identity_is_allowed(key, lerobot, build):
    checkpoint = lerobot(mode="MEAN_STD")
    stats = {"observation.state": build.state_stats(), "action": build.action_stats()}
    feature, name = key.rsplit(".", 1)
    stats[feature][name] = np.full(stats[feature][name].shape, np.inf)
    for step in ("normalizer_processor", "unnormalizer_processor"):
        build.write_state_file(checkpoint.folder / checkpoint.step(step)["state_file"], stats)
    with pytest.raises(ProcessingError, match=f"{name} is inf in column 0"):
        load(checkpoint.folder, build.Shape(), allow_identity_norm=True)


@pytest.mark.parametrize("kind", ["json", "openpi", "safetensors"])
def test_given_statistics_replace_those_of_the_checkpoint(kind, lerobot, build, tmp_path):
    state = {name: values + 5 for name, values in build.state_stats().items()}
    action = {name: values + 5 for name, values in build.action_stats().items()}
    if kind == "safetensors":
        path = tmp_path / "mine.safetensors"
        build.write_state_file(path, {"observation.state": state, "action": action})
    else:
        lists = [{k: v.tolist() for k, v in stats.items()} for stats in (state, action)]
        content = dict(zip(("observation.state", "action"), lists, strict=True))
        if kind == "openpi":
            content = {"norm_stats": dict(zip(("state", "actions"), lists, strict=True))}
        path = build.write_json(tmp_path / "mine.json", content)
    for folder in (lerobot().folder, drop_state_files(lerobot())):
        spec = load(folder, build.Shape(), stats=path)
        assert np.allclose(spec.state_norm.first, state["q01"])
        assert np.allclose(spec.action_norm.second, action["q99"])
        assert spec.action_norm.source == str(path)


def test_given_statistics_without_the_action(lerobot, build, tmp_path):
    path = build.write_json(tmp_path / "s.json", {"state": {"q01": [0] * 5, "q99": [1] * 5}})
    with pytest.raises(ProcessingError, match=r"for the action .* looked in .*s.json"):
        load(lerobot().folder, build.Shape(), stats=path)


def test_lerobot_without_processor_files_takes_modes_from_the_config(tmp_path, build):
    build.write_tokenizer(tmp_path / "tokenizer.json")
    mapping = {"VISUAL": "IDENTITY", "STATE": "MIN_MAX", "ACTION": "MEAN_STD"}
    config = {"type": "pi05", "normalization_mapping": mapping}
    build.write_json(tmp_path / "config.json", config)
    stats = {
        "observation.state": {k: v.tolist() for k, v in build.state_stats().items()},
        "action": {k: v.tolist() for k, v in build.action_stats().items()},
    }
    path = build.write_json(tmp_path / "meta" / "stats.json", stats)
    spec = load(tmp_path, build.Shape(), stats=path)
    assert (spec.state_norm.mode, spec.action_norm.mode) == (NormMode.MIN_MAX, NormMode.MEAN_STD)
    build.write_json(tmp_path / "config.json", {"type": "pi0"})
    spec = load(tmp_path, build.Shape(family="pi0"), stats=path)
    assert spec.state_norm.mode is spec.action_norm.mode is NormMode.MEAN_STD
    with pytest.raises(ProcessingError, match=r"looked in .*policy_preprocessor.json"):
        load(tmp_path, build.Shape())
    mapping["STATE"] = "NONE"
    build.write_json(tmp_path / "config.json", config)
    with pytest.raises(ProcessingError, match=r"normalization_mapping.STATE is 'NONE'; allowed"):
        load(tmp_path, build.Shape(), stats=path)


def test_openpi_without_statistics_reports_the_search_order(tmp_path, build):
    build.write_tokenizer(tmp_path / "tokenizer.json")
    with pytest.raises(ProcessingError) as caught:
        load(tmp_path, build.Shape(), preset="openpi/pi05_droid")
    message = str(caught.value)
    places = [f"{tmp_path}/norm_stats.json", f"{tmp_path}/../norm_stats.json"]
    places.append(f"{tmp_path}/assets/*/norm_stats.json")
    positions = [message.index(place) for place in places]
    assert positions == sorted(positions)


@pytest.mark.parametrize("action_dim", [5, 31])
def test_statistics_narrower_than_the_robots_action(action_dim, lerobot, build):
    message = f"cover 4 columns but the policy returns {action_dim}"
    with pytest.raises(ProcessingError, match=message):
        load(lerobot().folder, build.Shape(action_dim=action_dim))


def test_padded_action_width_passes_through_with_a_warning(lerobot, build, caplog):
    with caplog.at_level(logging.WARNING):
        spec = load(lerobot().folder, build.Shape(action_dim=32))
    assert "cover 4 columns but the policy returns 32" in caplog.text
    assert spec.action_dim == 32


def test_preset_of_another_family(openpi, build):
    with pytest.raises(ProcessingError, match="is for pi05 but the checkpoint is pi0"):
        load(openpi(14, 14), build.Shape(family="pi0"), preset="openpi/pi05_aloha")


def test_unknown_family(tmp_path, build):
    with pytest.raises(ProcessingError, match="'smolvla' has no processing; allowed: pi05, pi0"):
        load(tmp_path, build.Shape(family="smolvla"), preset="raw")


def test_unknown_preset(tmp_path, build):
    with pytest.raises(ProcessingError, match="unknown preset 'openpi'"):
        load(tmp_path, build.Shape(), preset="openpi")


def test_missing_folder(tmp_path, build):
    with pytest.raises(ProcessingError, match=r"gone does not exist"):
        load(tmp_path / "gone", build.Shape())


def test_robot_wider_than_the_model(openpi, build):
    shape = build.Shape(action_dim=8, max_action_dim=8)
    with pytest.raises(ProcessingError, match="action has 14 columns but the model takes 1 to 8"):
        load(openpi(14, 14), shape)


def test_more_cameras_than_the_checkpoint(openpi, build):
    with pytest.raises(ProcessingError, match=r"has 3 cameras .* but the checkpoint has 1"):
        load(openpi(14, 14), build.Shape(cameras=("base_0_rgb",)))


@pytest.mark.parametrize("slots", [64, 199])
def test_prompt_slots_of_the_files_must_fit_the_policy(slots, lerobot, build):
    with pytest.raises(ProcessingError, match=f"max_length is 200 but the policy has {slots}"):
        load(lerobot().folder, build.Shape(tokenizer_max_length=slots))


def test_fewer_prompt_slots_than_the_policy_has(lerobot, build):
    checkpoint = lerobot()
    checkpoint.step("tokenizer_processor")["config"]["max_length"] = 64
    assert load(checkpoint.write(), build.Shape()).max_length == 64


def test_files_without_a_prompt_step(lerobot, build):
    checkpoint = lerobot()
    checkpoint.pre.remove(checkpoint.step("pi05_prepare_state_tokenizer_processor_step"))
    with pytest.raises(ProcessingError, match="no step that writes the prompt"):
        load(checkpoint.write(), build.Shape())


def test_tokenizer_override_and_absence(lerobot, build, tmp_path):
    folder = lerobot().folder
    (folder / "tokenizer.json").rename(folder / "other.json")
    with pytest.raises(ProcessingError, match="no tokenizer found"):
        load(folder, build.Shape())
    spec = load(folder, build.Shape(), tokenizer=folder / "other.json")
    assert spec.tokenizer.source == folder / "other.json"


def test_sentencepiece_checkpoint(lerobot, build):
    folder = lerobot().folder
    (folder / "tokenizer.json").unlink()
    build.write_sentencepiece(folder / "paligemma_tokenizer.model")
    assert load(folder, build.Shape()).tokenizer.bos_id == 2


def test_openpi_formulas_take_the_presets_epsilon_and_the_robots_asset(openpi, build):
    folder = openpi(8, 8, "assets/droid")
    other = {"q01": [0.0] * 8, "q99": [1.0] * 8}
    content = {"norm_stats": {"state": other, "actions": other}}
    build.write_json(folder / "assets" / "arx" / "norm_stats.json", content)
    spec = load(folder, build.Shape(), preset="openpi/pi05_droid")
    assert spec.state_norm.eps == spec.action_norm.eps == 1e-6
    assert spec.action_norm.source == str(folder / "assets" / "droid" / "norm_stats.json")
