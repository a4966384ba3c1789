"""``python -m lerobot_policy_phyai FOLDER``: write a policy folder for a running server."""
# pyright: reportMissingImports=false

import argparse
from pathlib import Path

from lerobot_policy_phyai.configuration_phyai import PhyaiConfig, features_of
from lerobot_policy_phyai.modeling_phyai import PhyaiPolicy
from lerobot_policy_phyai.processor_phyai import make_phyai_pre_post_processors
from phyai.client import PolicyClient


def main() -> None:
    """Ask a server what it serves and write what LeRobot needs."""
    parser = argparse.ArgumentParser(prog="python -m lerobot_policy_phyai")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--api-key-file", default="")
    args = parser.parse_args()
    key = Path(args.api_key_file).read_text().strip() if args.api_key_file else None
    with PolicyClient(args.host, args.port, api_key=key) as client:
        metadata = client.metadata
    inputs, outputs = features_of(metadata)
    horizon = metadata["action_horizon"]
    config = PhyaiConfig(
        host=args.host,
        port=args.port,
        api_key_file=args.api_key_file,
        chunk_size=horizon,
        n_action_steps=metadata.get("execute", horizon),
        input_features=inputs,
        output_features=outputs,
        device="cpu",
        push_to_hub=False,
    )
    PhyaiPolicy(config).save_pretrained(args.folder)
    for processor in make_phyai_pre_post_processors(config):
        processor.save_pretrained(args.folder)
    print(f"{args.folder}: {len(config.image_features)} cameras, chunks of {horizon} actions")


if __name__ == "__main__":
    main()
