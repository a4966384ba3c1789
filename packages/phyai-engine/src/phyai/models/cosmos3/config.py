"""The transformer's sizes and constants, by the names of the checkpoint's ``config.json``."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from phyai.checkpoints import CheckpointError
from phyai.checkpoints.json_file import read_json_object

Variant = Literal["qwen", "edge"]

_DESCRIPTIVE = frozenset(
    {
        "_class_name",
        "_diffusers_version",
        "_name_or_path",
        "architectures",
        "attention_dropout",
        "backbone_type",
        "compression_config",
        "dtype",
        "freeze_und",
        "max_position_embeddings",
        "model_type",
        "qk_norm",
        "quantization_config",
        "tie_word_embeddings",
        "torch_dtype",
        "transformers_version",
        "use_moe",
    }
)
"""Keys that name or describe the checkpoint and change nothing in the computation."""

_FIXED: Mapping[str, Any] = {
    "attention_bias": False,
    "joint_attn_implementation": "two_way",
    "position_embedding_type": "unified_3d_mrope",
    "qk_norm_for_diffusion": True,
    "temporal_compression_factor_sound": 1,
    "unified_3d_mrope_reset_spatial_ids": True,
    "video_temporal_causal": False,
}
"""Keys of which every published checkpoint has the one value that is computed here."""

_MOST = 1 << 20


@dataclass(frozen=True)
class Cosmos3Config:
    """Sizes and constants of both towers and of the heads.

    Defaults are those of Nano. Fields have the checkpoint's names, except ``mrope_section``, which
    a checkpoint has in ``rope_scaling`` or as ``rope_axes_dim``.

    Attributes:
        hidden_act: ``silu`` (three matrices, gated) or ``relu2`` (two matrices).
        mrope_section: rotary slots of the time, row and column axis; they add up to
            ``head_dim / 2``.
        qk_norm_for_text: the understanding tower normalises its queries and keys.
        use_und_k_norm_for_gen: the generation tower sees understanding keys after one more norm.
        action_dim: width of an action row, 0 without an action head.
        sound_dim: channels of a sound latent, 0 without a sound head.
        base_fps: pixel frames per second that one unit of temporal position stands for.
        enable_fps_modulation: temporal positions are seconds, not frame numbers.
        timestep_scale: factor on the scheduler's timestep before the time embedding.
        unified_3d_mrope_temporal_modality_margin: temporal distance of text and media.

    Raises:
        CheckpointError: for sizes that do not fit each other.
    """

    num_hidden_layers: int = 36
    hidden_size: int = 4096
    intermediate_size: int = 12288
    num_attention_heads: int = 32
    num_key_value_heads: int = 8
    head_dim: int = 128
    hidden_act: Literal["silu", "relu2"] = "silu"
    rms_norm_eps: float = 1e-6
    rope_theta: float = 5e6
    mrope_section: tuple[int, int, int] = (24, 20, 20)
    vocab_size: int = 151936
    qk_norm_for_text: bool = True
    use_und_k_norm_for_gen: bool = False
    action_gen: bool = True
    action_dim: int = 64
    num_embodiment_domains: int = 32
    sound_gen: bool = True
    sound_dim: int = 64
    sound_latent_fps: float = 25.0
    latent_channel: int = 48
    latent_patch_size: int = 2
    patch_latent_dim: int = 192
    base_fps: float = 24.0
    enable_fps_modulation: bool = True
    timestep_scale: float = 0.001
    unified_3d_mrope_temporal_modality_margin: int = 15000

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if field.type in ("int", "float"):
                smallest = 0 if field.name in ("action_dim", "sound_dim") else 1
                _check_number(field.name, value, field.type, smallest)
            elif field.type == "bool" and not isinstance(value, bool):
                raise CheckpointError(f"config.json: {field.name} is {value!r}; expected a bool")
        self._check_fit()

    def _check_fit(self) -> None:
        if self.hidden_act not in ("silu", "relu2"):
            raise CheckpointError(
                f"config.json: hidden_act is {self.hidden_act!r}; allowed: silu, relu2"
            )
        if self.num_attention_heads % self.num_key_value_heads:
            raise CheckpointError(
                f"config.json: {self.num_attention_heads} query heads are not a multiple of "
                f"{self.num_key_value_heads} key heads"
            )
        if self.head_dim % 2 or sum(self.mrope_section) != self.head_dim // 2:
            raise CheckpointError(
                f"config.json: mrope_section is {list(self.mrope_section)}; it must add up to half "
                f"of head_dim, which is {self.head_dim}"
            )
        if self.patch_latent_dim != self.latent_channel * self.latent_patch_size**2:
            raise CheckpointError(
                f"config.json: patch_latent_dim is {self.patch_latent_dim}; "
                f"{self.latent_channel} channels in patches of side {self.latent_patch_size} need "
                f"{self.latent_channel * self.latent_patch_size**2}"
            )
        for head in ("action", "sound"):
            if getattr(self, f"{head}_gen") != bool(getattr(self, f"{head}_dim")):
                raise CheckpointError(
                    f"config.json: {head}_gen is {getattr(self, f'{head}_gen')} but {head}_dim is "
                    f"{getattr(self, f'{head}_dim')}"
                )

    @property
    def gated(self) -> bool:
        """Whether the feed-forward blocks have a gate."""
        return self.hidden_act == "silu"

    @classmethod
    def from_json(cls, source: str | Path | Mapping[str, Any]) -> Cosmos3Config:
        """Reads ``transformer/config.json``, its folder, or its parsed contents.

        Raises:
            CheckpointError: for a missing or malformed file, an unknown key, a value of the wrong
                type, or one that this implementation does not compute.
        """
        if not isinstance(source, Mapping):
            path = Path(source)
            source = read_json_object(path / "config.json" if path.is_dir() else path)
        fields = {field.name for field in dataclasses.fields(cls)}
        chosen: dict[str, Any] = {"action_gen": False, "sound_gen": False}
        chosen |= {"action_dim": None, "sound_dim": None}
        for key, value in source.items():
            if key in fields and key != "mrope_section":
                chosen[key] = value
            elif key in _FIXED:
                _check_fixed(key, value)
            elif key == "max_action_dim":
                chosen["action_dim"] = value
            elif key not in ("rope_scaling", "rope_axes_dim") and key not in _DESCRIPTIVE:
                raise CheckpointError(
                    f"config.json: unknown key {key!r} with value {value!r}; this version may not "
                    "compute the model that it describes"
                )
        for head in ("action", "sound"):
            served = chosen[f"{head}_gen"] is True
            chosen[f"{head}_dim"] = (chosen[f"{head}_dim"] or 0) if served else 0
        if "sound_latent_fps" in chosen and chosen["sound_latent_fps"] is None:
            del chosen["sound_latent_fps"]
        return cls(mrope_section=_sections(source, cls), **chosen)

    @classmethod
    def nano(cls) -> Cosmos3Config:
        """Nano and Nano-Policy-DROID, 15.2 G parameters."""
        return cls()

    @classmethod
    def super_(cls) -> Cosmos3Config:
        """Super, 64.0 G parameters."""
        return cls(
            num_hidden_layers=64, hidden_size=5120, intermediate_size=25600, num_attention_heads=64
        )

    @classmethod
    def edge(cls) -> Cosmos3Config:
        """Edge and Edge-Policy-DROID, 3.4 G parameters."""
        return cls(
            num_hidden_layers=28,
            hidden_size=2048,
            intermediate_size=9216,
            num_attention_heads=16,
            hidden_act="relu2",
            rms_norm_eps=1e-5,
            rope_theta=1e8,
            vocab_size=131072,
            qk_norm_for_text=False,
            use_und_k_norm_for_gen=True,
            sound_gen=False,
            sound_dim=0,
        )

    @classmethod
    def tiny(cls, variant: Variant = "qwen", **changes: Any) -> Cosmos3Config:
        """Three layers of width 64, with the architecture of Nano (``qwen``) or of Edge."""
        sizes: dict[str, Any] = {
            "num_hidden_layers": 3,
            "hidden_size": 64,
            "intermediate_size": 96,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 16,
            "mrope_section": (4, 2, 2),
            "vocab_size": 64,
            "action_dim": 8,
            "num_embodiment_domains": 4,
            "latent_channel": 4,
            "patch_latent_dim": 16,
        }
        if variant == "qwen":
            return dataclasses.replace(cls.nano(), **{**sizes, "sound_dim": 5, **changes})
        return dataclasses.replace(cls.edge(), **{**sizes, "rope_theta": 5e6, **changes})

    def as_json(self) -> dict[str, Any]:
        """Returns the contents of a ``config.json`` that `from_json` reads back."""
        fields = dataclasses.asdict(self)
        fields["rope_axes_dim"] = list(fields.pop("mrope_section"))
        return {"_class_name": "Cosmos3OmniTransformer", **fields}


def _sections(raw: Mapping[str, Any], cls: type[Cosmos3Config]) -> tuple[int, int, int]:
    scaling = raw.get("rope_scaling") or {}
    if not isinstance(scaling, Mapping):
        raise CheckpointError(f"config.json: rope_scaling is {scaling!r}; expected an object")
    if scaling.get("mrope_interleaved", True) is not True:
        raise CheckpointError(
            "config.json: rope_scaling.mrope_interleaved is not true; only interleaved sections "
            "are computed"
        )
    kind = scaling.get("rope_type", scaling.get("type"))
    if kind not in (None, "default", "mrope"):
        raise CheckpointError(
            f"config.json: rope_scaling.rope_type is {kind!r}; only default and mrope are computed"
        )
    sections = raw.get("rope_axes_dim") or scaling.get("mrope_section") or cls.mrope_section
    if (
        not isinstance(sections, list | tuple)
        or len(sections) != 3
        or not all(isinstance(size, int) and size >= 0 for size in sections)
    ):
        raise CheckpointError(
            f"config.json: the rotary sections are {sections!r}; expected three counts"
        )
    return sections[0], sections[1], sections[2]


def _check_fixed(key: str, value: Any) -> None:
    if value is not None and value != _FIXED[key]:
        raise CheckpointError(
            f"config.json: {key} is {value!r}; only {_FIXED[key]!r} is computed here"
        )


def _check_number(name: str, value: Any, kind: str, smallest: int) -> None:
    allowed = int if kind == "int" else int | float
    wrong = isinstance(value, bool) or not isinstance(value, allowed)
    if wrong or not math.isfinite(value) or not 0 <= value < 1e12:
        raise CheckpointError(f"config.json: {name} is {value!r}; expected a positive {kind}")
    if kind == "int" and not smallest <= value <= _MOST:
        raise CheckpointError(f"config.json: {name} is {value}; allowed: {smallest} to {_MOST}")
    if kind == "float" and value == 0:
        raise CheckpointError(f"config.json: {name} is 0; expected a positive number")
