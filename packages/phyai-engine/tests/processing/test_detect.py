import pytest

from phyai.processing.detect import detect_preset
from phyai.processing.errors import ProcessingError
from phyai.processing.presets import PRESETS


@pytest.mark.parametrize("index", [2, 3])
def test_lerobot(index, lerobot):
    detected = detect_preset(lerobot(index).folder)
    assert detected.preset.name == "lerobot"
    assert "policy_preprocessor.json exists" in detected.reason
    assert "'lerobot-0.4'" in detected.reason


def test_old_lerobot(lerobot):
    checkpoint = lerobot()
    step = checkpoint.step("pi05_prepare_state_tokenizer_processor_step")
    step["config"] = {"max_state_dim": 32}
    detected = detect_preset(checkpoint.write())
    assert detected.preset.name == "lerobot-0.4"
    assert "max_state_dim" in detected.reason


def test_lerobot_config_alone(tmp_path, build):
    build.write_json(tmp_path / "config.json", {"type": "pi05"})
    detected = detect_preset(tmp_path)
    assert detected.preset.name == "lerobot"
    assert "type 'pi05'" in detected.reason


@pytest.mark.parametrize(
    ("asset", "name"),
    [
        ("trossen", "openpi/pi05_aloha"),
        ("droid", "openpi/pi05_droid"),
        ("libero", "openpi/pi05_libero"),
        ("physical-intelligence/libero", "openpi/pi05_libero"),
    ],
)
def test_openpi_asset(asset, name, openpi):
    detected = detect_preset(openpi(8, 8, f"assets/{asset}"))
    assert detected.preset.name == name
    assert f"statistics of {asset!r}" in detected.reason


@pytest.mark.parametrize("asset", [None, "physical-intelligence/libero", "arx"])
def test_folder_name(asset, tmp_path, build):
    folder = tmp_path / "my_pi05_libero_torch"
    folder.mkdir()
    if asset:
        build.write_json(folder / "assets" / asset / "norm_stats.json", {})
    detected = detect_preset(folder)
    assert detected.preset.name == "openpi/pi05_libero"
    assert "folder is named 'my_pi05_libero_torch'" in detected.reason


@pytest.mark.parametrize("asset", [None, "droid", "arx"])
def test_a_folder_can_be_named_after_pi0(asset, tmp_path, build):
    folder = tmp_path / "pi0_droid"
    folder.mkdir()
    if asset:
        build.write_json(folder / "assets" / asset / "norm_stats.json", {})
    assert detect_preset(folder).preset.name == "openpi/pi0_droid"


def test_folder_name_against_the_assets(tmp_path, build):
    folder = tmp_path / "pi05_libero"
    build.write_json(folder / "assets/droid/norm_stats.json", {})
    assert detect_preset(folder).preset.name == "openpi/pi05_droid"


def test_several_robots_give_hints(tmp_path, build):
    for asset in ("droid", "trossen", "arx"):
        build.write_json(tmp_path / "assets" / asset / "norm_stats.json", {})
    build.write_json(tmp_path / "config.json", {"action_horizon": 15})
    with pytest.raises(ProcessingError) as caught:
        detect_preset(tmp_path)
    message = str(caught.value)
    for part in ("'droid'", "'trossen'", "'arx'", "action_horizon 15 is that of 'openpi/pi05_dro"):
        assert part in message
    for name in PRESETS:
        assert name in message


def test_an_unknown_horizon_is_still_told(tmp_path, build):
    build.write_json(tmp_path / "config.json", {"action_horizon": 50})
    with pytest.raises(ProcessingError, match=r"\(action_horizon 50\)"):
        detect_preset(tmp_path)


def test_nothing_to_go_by(tmp_path):
    with pytest.raises(ProcessingError, match=r"no policy_preprocessor.json, no config.json with"):
        detect_preset(tmp_path)


@pytest.mark.parametrize(
    ("config", "message"),
    [({"type": 3}, "type must be a string"), ({"action_horizon": "10"}, "must be an integer")],
)
def test_strict_config(config, message, tmp_path, build):
    build.write_json(tmp_path / "config.json", config)
    with pytest.raises(ProcessingError, match=message):
        detect_preset(tmp_path)
