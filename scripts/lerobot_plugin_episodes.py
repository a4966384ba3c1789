"""Answer observations with the ``phyai`` policy inside LeRobot, one JSON line at a time.

Runs in LeRobot's environment, with the plugin installed. Arguments: a folder for the policy and the
port of a server. Each line of the input names an npz file with the arrays of an observation, and
its task; each line of the output holds the actions of a chunk.
"""
# pyright: reportMissingImports=false

import json
import runpy
import sys

import numpy as np
import torch
from lerobot import __version__
from lerobot.configs.policies import PreTrainedConfig
from lerobot.policies.factory import get_policy_class, make_pre_post_processors
from lerobot.utils.import_utils import register_third_party_plugins


def main() -> None:
    """Load the plugin as LeRobot does and answer until the input ends."""
    folder, port = sys.argv[1:]
    register_third_party_plugins()
    out, sys.stdout = sys.stdout, sys.stderr
    sys.argv = ["lerobot_policy_phyai", folder, "--port", port]
    runpy.run_module("lerobot_policy_phyai", run_name="__main__")
    config = PreTrainedConfig.from_pretrained(folder)
    policy = get_policy_class(config.type).from_pretrained(folder, config=config)
    prepare, finish = make_pre_post_processors(config, pretrained_path=folder)
    report = {"lerobot": __version__, "type": config.type, "rtc": policy.supports_rtc()}
    print(json.dumps(report), file=out, flush=True)
    left = None
    for line in sys.stdin:
        asked = json.loads(line)
        arrays = np.load(asked["file"])
        batch = {
            f"observation.images.{name}": torch.from_numpy(arrays[name]).permute(2, 0, 1) / 255
            for name in ("base", "wrist")
        }
        batch["observation.state"] = torch.from_numpy(arrays["state"])
        batch["task"] = asked["task"]
        ready = prepare(batch)
        if asked["rtc"]:
            chunk = policy.predict_action_chunk(
                ready, inference_delay=2, prev_chunk_left_over=left, execution_horizon=6
            )
            left = chunk[0, asked["execute"] :]
        else:
            policy.reset()
            steps = [policy.select_action(ready) for _ in range(config.n_action_steps)]
            chunk = torch.stack(steps, 1)
        actions = finish(chunk)[0]
        print(json.dumps({"actions": actions.tolist()}), file=out, flush=True)


if __name__ == "__main__":
    main()
