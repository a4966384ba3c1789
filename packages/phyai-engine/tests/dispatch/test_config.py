import pytest

from phyai.dispatch import (
    KernelConfig,
    ModelContext,
    PolicyError,
    get_kernel_selector,
    initialize_kernel_system,
    reset_kernel_selector,
    resolve_policy,
)
from phyai.dispatch.config import REMOVED_VARIABLES, env_flag
from phyai.dispatch.types import Profile

QUANT = {"rules": [{"match": {"glob": "*"}, "weight": {"dtype": "int8"}}]}


@pytest.fixture
def policy_file(tmp_path):
    path = tmp_path / "policy.yaml"
    path.write_text("profile: autotune\nrules:\n  - {id: from-file, prefer: torch.rmsnorm}\n")
    return path


def rule_ids(policy):
    return [rule.id for rule in policy.rules]


def test_environment_wins_over_code(policy_file, monkeypatch):
    monkeypatch.setenv("PHYAI_KERNEL_CONFIG", str(policy_file))
    monkeypatch.setenv("PHYAI_KERNEL_PROFILE", "Static")
    inline = {"rules": [{"id": "inline", "prefer": "torch.rmsnorm"}]}
    for code in (
        KernelConfig(policy_config=inline),
        KernelConfig(config_path="/absent.yaml", profile="autotune"),
    ):
        selector = initialize_kernel_system(code, device="cpu")
        assert rule_ids(selector.policy) == ["from-file"]
        assert selector.policy.profile is Profile.STATIC


def test_inline_policy_and_file(policy_file, catalog):
    inline = KernelConfig(policy_config={"rules": [{"id": "inline", "prefer": "torch.rmsnorm"}]})
    assert rule_ids(resolve_policy(inline, catalog)) == ["inline"]
    policy = resolve_policy(KernelConfig(config_path=policy_file), catalog)
    assert rule_ids(policy) == ["from-file"]
    assert policy.profile is Profile.AUTOTUNE


def test_profile_override_keeps_the_quantization_plan(catalog):
    config = KernelConfig(profile="AUTOTUNE", policy_config={"quantization": QUANT})
    policy = resolve_policy(config, catalog)
    assert policy.profile is Profile.AUTOTUNE
    assert policy.quant_plan is not None
    assert policy.quant_plan.resolve("any.layer") is not None


def test_no_settings_give_the_empty_policy(catalog):
    assert resolve_policy(KernelConfig(), catalog).rules == ()


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"profile": "fast"}, ValueError, "profile is 'fast'; allowed: static, autotune"),
        ({"config_path": "a", "policy_config": {}}, ValueError, "exclude each other"),
        ({"benchmark": 3}, TypeError, "benchmark must be callable, got int"),
        ({"policy_config": [1]}, TypeError, "must be a mapping, got list"),
    ],
)
def test_bad_settings(options, error, message):
    with pytest.raises(error, match=message):
        KernelConfig(**options)


@pytest.mark.parametrize("name", sorted(REMOVED_VARIABLES))
def test_removed_variables_are_refused(name):
    with pytest.raises(ValueError, match=rf"{name} was removed: write a kernel policy"):
        KernelConfig.from_env({name: "flashinfer"})
    assert KernelConfig.from_env({name: ""}) == KernelConfig()


def test_bad_environment_profile_names_the_variable():
    with pytest.raises(ValueError, match="PHYAI_KERNEL_PROFILE is 'fast'"):
        KernelConfig.from_env({"PHYAI_KERNEL_PROFILE": "fast"})


def test_autotune_cache_from_environment():
    config = KernelConfig(autotune_cache="a").with_env({"PHYAI_KERNEL_AUTOTUNE_CACHE": "/b/c"})
    assert str(config.autotune_cache) == "/b/c"


@pytest.mark.parametrize(("word", "expected"), [("1", True), ("Yes", True), ("off", False)])
def test_flags(word, expected):
    assert env_flag("X", {"X": word}) is expected
    assert env_flag("Y", {}, default=True) is True


def test_bad_flag_names_the_variable():
    with pytest.raises(ValueError, match="X is 'maybe'; allowed: 1/true/yes/on"):
        env_flag("X", {"X": "maybe"})


def test_malformed_policy_of_the_environment(tmp_path, monkeypatch):
    path = tmp_path / "bad.yaml"
    path.write_text("\nprofile: off\n")
    monkeypatch.setenv("PHYAI_KERNEL_CONFIG", str(path))
    with pytest.raises(PolicyError, match=r"bad\.yaml:2: profile"):
        initialize_kernel_system(device="cpu")


def test_initialization_installs_the_selector():
    selector = initialize_kernel_system(
        KernelConfig(), device="nvidia:sm90", model=ModelContext("pi05")
    )
    assert get_kernel_selector() is selector
    assert (selector.device.arch, selector.model.family) == ("sm90", "pi05")
    reset_kernel_selector()
    assert get_kernel_selector() is not selector
