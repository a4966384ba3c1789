"""``phyai inspect`` of a Cosmos3 repository: its parts and how its policy is asked."""

from collections import Counter
from dataclasses import asdict
from pathlib import Path
from typing import Any

from phyai.cli.output import print_line, print_pairs

_STEMS = ("diffusion_pytorch_model", "model")


def summary(folder: Path) -> dict[str, Any]:
    """Return sizes, parts and the policy's contract; loads no weights.

    Raises:
        ProcessingError, CheckpointError: A part is missing or cannot be read.
    """
    from phyai.models.cosmos3.domains import find_domain
    from phyai.models.cosmos3.repository import PARTS, SOUND, Repository
    from phyai.models.cosmos3.text import Cosmos3Tokenizer

    repository = Repository.read(folder)
    contract = repository.contract
    parts = [name for name in (*PARTS, SOUND) if (folder / name).is_dir()]
    tokenizer = Cosmos3Tokenizer.from_folder(folder / "text_tokenizer")
    return {
        "checkpoint": folder,
        "family": "cosmos3",
        "variant": repository.variant,
        "parts": {name: _weights(folder / name) for name in parts if name != "text_tokenizer"},
        "sizes": asdict(repository.config),
        "sound": repository.sound,
        "tokenizer": {"ids": tokenizer.vocab_size, "eos": tokenizer.eos_id},
        "policy": {
            "declared": repository.policy,
            "actions": contract.chunk,
            "columns": contract.raw_dim,
            "fps": contract.fps,
            "domain": contract.domain,
            "domain_id": find_domain(contract.domain).id,
            "space": str(contract.space),
            "tier": contract.tier,
            "prompt": "JSON" if contract.json_prompt else "sentences",
            "sampling": asdict(contract.sampling),
        },
    }


def _weights(folder: Path) -> dict[str, Any]:
    from phyai.checkpoints import CheckpointReader

    stem = next((name for name in _STEMS if any(folder.glob(f"{name}*.safetensors*"))), _STEMS[0])
    reader = CheckpointReader(folder, stem=stem)
    return {
        "tensors": len(reader.shapes),
        "dtypes": dict(Counter(reader.dtypes.values())),
        "bytes_on_disk": reader.bytes_on_disk(),
    }


def print_summary(found: dict[str, Any]) -> None:
    """Print what `summary` returned."""
    sizes, policy, sampling = found["sizes"], found["policy"], found["policy"]["sampling"]
    heads = f"{sizes['num_attention_heads']} heads, {sizes['num_key_value_heads']} of keys"
    guided = f"guidance {sampling['guidance']:g}"
    if sampling["interval"] is not None:
        low, high = sampling["interval"]
        guided += f" for timesteps of {low:g} to {high:g}"
    print_pairs(
        [
            ("checkpoint", found["checkpoint"]),
            ("family", f"cosmos3, {found['variant']}"),
            *((name, _part(part)) for name, part in found["parts"].items()),
            ("towers", f"2 x {sizes['num_hidden_layers']} layers of {sizes['hidden_size']}"),
            ("attention", f"{heads}, {sizes['head_dim']} features each"),
            ("mlp", f"{sizes['intermediate_size']}, {sizes['hidden_act']}"),
            ("video", f"{sizes['latent_channel']} latent channels"),
            (
                "actions",
                f"{sizes['action_dim']} columns, {sizes['num_embodiment_domains']} domains",
            ),
            ("sound", f"{sizes['sound_dim']} latent channels" if found["sound"] else "none"),
            ("tokenizer", f"{found['tokenizer']['ids']} ids, eos {found['tokenizer']['eos']}"),
        ]
    )
    print_line()
    print_line("policy" if policy["declared"] else "policy, which checkpoint.json does not declare")
    print_pairs(
        [
            ("  actions", f"{policy['actions']} of {policy['columns']} columns: {policy['space']}"),
            ("  domain", f"{policy['domain']}, id {policy['domain_id']}"),
            ("  rate", f"{policy['fps']:g} a second"),
            ("  canvas", f"tier {policy['tier']}"),
            ("  prompt", policy["prompt"]),
            ("  sampler", f"{sampling['steps']} steps, {guided}, shift {sampling['shift']:g}"),
        ]
    )


def _part(part: dict[str, Any]) -> str:
    dtypes = ", ".join(f"{count} x {name}" for name, count in part["dtypes"].items())
    return f"{part['tensors']} tensors ({dtypes}), {part['bytes_on_disk'] / 2**20:.1f} MiB"
