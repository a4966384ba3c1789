import pytest
import torch

from phyai.dispatch.config import KernelConfig
from phyai.engine_config import (
    DeviceConfig,
    EngineConfig,
    ParallelConfig,
    RuntimeConfig,
    parse_dtype,
)


def test_environment_wins_over_code():
    base = EngineConfig(
        DeviceConfig("cuda", torch.float32), KernelConfig(profile="static"), RuntimeConfig(False)
    )
    env = {
        "PHYAI_DEVICE": "cpu",
        "PHYAI_PARAMS_DTYPE": "fp16",
        "PHYAI_FREEZE_KERNEL_CHOICES": "on",
        "PHYAI_KERNEL_PROFILE": "autotune",
        "PHYAI_TENSOR_PARALLEL": "4",
        "PHYAI_CFG_PARALLEL": "2",
    }
    config = EngineConfig.from_env(base, env)
    assert config.device == DeviceConfig("cpu", torch.float16)
    assert config.runtime.freeze_kernel_choices is True
    assert str(config.kernel.profile) == "autotune"
    assert config.parallel == ParallelConfig(cfg=2, tp=4)
    assert config.parallel.ranks == 8


def test_an_empty_environment_changes_nothing():
    base = EngineConfig(DeviceConfig("cpu", torch.float32), runtime=RuntimeConfig(True))
    assert EngineConfig.from_env(base, {}) == base


@pytest.mark.parametrize(
    ("env", "message"),
    [
        ({"PHYAI_PARAMS_DTYPE": "int8"}, "PHYAI_PARAMS_DTYPE is 'int8'; allowed: fp32"),
        ({"PHYAI_FREEZE_KERNEL_CHOICES": "maybe"}, "PHYAI_FREEZE_KERNEL_CHOICES is 'maybe'"),
        ({"PHYAI_ATTN_BACKEND": "fa2"}, "PHYAI_ATTN_BACKEND was removed"),
        ({"PHYAI_TENSOR_PARALLEL": "two"}, "PHYAI_TENSOR_PARALLEL is 'two'"),
        ({"PHYAI_TENSOR_PARALLEL": "0"}, "tp is 0; it must be at least 1"),
        ({"PHYAI_CFG_PARALLEL": "3"}, "cfg is 3; guidance has 1 or 2 branches"),
    ],
)
def test_a_bad_variable_is_named(env, message):
    with pytest.raises(ValueError, match=message):
        EngineConfig.from_env(None, env)


def test_device_errors_say_what_to_do():
    with pytest.raises(ValueError, match="'gpu' is not a torch device"):
        DeviceConfig("gpu").resolve()
    if not torch.cuda.is_available():
        with pytest.raises(ValueError, match="sees no GPU; use 'cpu'"):
            DeviceConfig("cuda").resolve()
    with pytest.raises(ValueError, match=r"params_dtype is torch\.int8"):
        DeviceConfig("cpu", torch.int8)


@pytest.mark.parametrize("name", ["BF16", "bfloat16"])
def test_dtype_names(name):
    assert parse_dtype(name) is torch.bfloat16
