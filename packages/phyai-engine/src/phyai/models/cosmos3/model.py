"""The Cosmos3 transformer: one pass over the text, then velocities of all media."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from phyai.layers import Embedding, Linear
from phyai.models.cosmos3.blocks import Placement
from phyai.models.cosmos3.branches import BoundBranches, BranchGroup
from phyai.models.cosmos3.config import Cosmos3Config
from phyai.models.cosmos3.generation import GenerationTower
from phyai.models.cosmos3.masks import Masks
from phyai.models.cosmos3.media import (
    ActionHeads,
    SoundHeads,
    TimeEmbedding,
    head,
    patchify,
    unpatchify,
)
from phyai.models.cosmos3.parallel import Parallel
from phyai.models.cosmos3.positions import Rotations
from phyai.models.cosmos3.recent import Recent
from phyai.models.cosmos3.state import Conditions, Layout, Modalities
from phyai.models.cosmos3.understanding import UnderstandingTower

_LAYOUTS = 8


class Cosmos3Transformer(nn.Module):
    """Two towers of one depth: text is read once, media attend to its keys and values.

    Weights, activations, keys and values are in ``params_dtype``. Positions, rotations, the time
    embedding, the action heads, and states and velocities are fp32 whatever it is.

    Args:
        config: sizes and constants.
        params_dtype: fp32, bf16 or fp16.
        device: where the model lives; ``meta`` to count parameters.
        domains: ids of the embodiments to serve; all if None.
        parallel: this process's place among those that serve one request.

    Raises:
        ValueError: for an embodiment that the model does not have, or a degree of tensor
            parallelism that does not divide heads, feed-forward width and vocabulary.
    """

    def __init__(
        self,
        config: Cosmos3Config,
        *,
        params_dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
        domains: Sequence[int] | None = None,
        parallel: Parallel | None = None,
    ) -> None:
        super().__init__()
        self.config = config
        self.params_dtype = params_dtype
        self.device: torch.device = torch.device(device)
        self.parallel: Parallel = Parallel() if parallel is None else parallel
        self.domains: tuple[int, ...] = _served(domains, config)
        place = Placement(params_dtype, self.device, self.parallel.tp)
        self.embed_tokens: Embedding = Embedding(
            config.vocab_size,
            config.hidden_size,
            key="embed_tokens.weight",
            params_dtype=params_dtype,
            device=device,
            tp=place.tp,
        )
        self.understanding: UnderstandingTower = UnderstandingTower(config, place)
        self.generation: GenerationTower = GenerationTower(config, place)
        self.time: TimeEmbedding = TimeEmbedding(config, self.device)
        self.proj_in: Linear = head("proj_in", config.patch_latent_dim, config.hidden_size, place)
        self.proj_out: Linear = head("proj_out", config.hidden_size, config.patch_latent_dim, place)
        self.action: ActionHeads | None = (
            ActionHeads(config, self.domains, self.device) if config.action_gen else None
        )
        self.sound: SoundHeads | None = SoundHeads(config, place) if config.sound_gen else None
        self._rotations = Rotations(config, self.device)
        self._masks: Recent[Layout, Masks] = Recent(_LAYOUTS)
        self._times: dict[int, Tensor] = {}
        self._bound: BoundBranches | None = None

    @torch.no_grad()
    def prefill(self, token_ids: Tensor) -> Conditions:
        """Reads a text once.

        Args:
            token_ids: integer [S], on any device.

        Returns:
            Its keys and values of every layer, of this rank's heads.

        Raises:
            ValueError: for an empty text or ids of another shape.
        """
        if token_ids.ndim != 1 or not token_ids.numel():
            raise ValueError(
                f"token_ids have shape {tuple(token_ids.shape)}; expected [S] with at least one id"
            )
        x = self.embed_tokens(token_ids.to(self.device))
        return Conditions(*self.understanding(x, self._rotations.text(token_ids.shape[0])))

    @torch.no_grad()
    def velocities(
        self,
        state: Modalities,
        timestep: int,
        branches: Sequence[Conditions],
        layout: Layout,
    ) -> list[Modalities]:
        """Returns the flow's velocity at ``state`` under each text.

        Args:
            state: fp32 values of every modality of the layout.
            timestep: the scheduler's, 0 to 1000.
            branches: one or two texts.
            layout: of the media.

        Returns:
            One fp32 velocity per branch, zero at clean positions and unused action channels.

        Raises:
            ValueError: for a state that does not fit the layout, more than two branches, or an
                embodiment that is not served.
        """
        return self.velocities_of(self.bind(branches, layout), len(branches), state, timestep)

    def bind(self, branches: Sequence[Conditions], layout: Layout) -> BoundBranches:
        """Returns ``branches`` in the room that ``layout`` needs; the last room is kept.

        With as many branches as are computed beside each other, each rank binds its own only.

        Raises:
            ValueError: for no branch, more than two, or texts that another model has read.
        """
        if len(branches) not in (1, 2):
            raise ValueError(f"{len(branches)} branches; allowed: 1 or 2")
        kv_heads = self.generation.layers[0].qkv_proj.kv_heads
        layers, head_dim = self.config.num_hidden_layers, self.config.head_dim
        for one in branches:
            if one.keys.shape != (layers, one.length, kv_heads, head_dim):
                raise ValueError(
                    f"a branch has keys of shape {tuple(one.keys.shape)}; this model needs "
                    f"({layers}, tokens, {kv_heads}, {head_dim}): prefill the text with it"
                )
        mine = self._mine(branches)
        bound = self._bound
        if bound is not None and bound.holds(mine, layout):
            return bound
        lengths = tuple(one.length for one in mine)
        if bound is not None and bound.layout == layout and bound.lengths == lengths:
            bound.fill(mine)
            return bound
        self._bound = bound = None
        self._bound = self.room(mine, layout)
        return self._bound

    def room(self, branches: Sequence[Conditions], layout: Layout) -> BoundBranches:
        """Returns new room for ``branches`` and what ``layout`` needs, which the caller keeps."""
        return BoundBranches(layout, branches, self.config, self._rotations)

    def _mine(self, branches: Sequence[Conditions]) -> Sequence[Conditions]:
        place = self.parallel
        shared = place.branches > 1 and len(branches) == place.branches
        return [branches[place.branch]] if shared else branches

    @torch.no_grad()
    def velocities_of(
        self, bound: BoundBranches, count: int, state: Modalities, timestep: int
    ) -> list[Modalities]:
        """Returns what `velocities` does, for the first ``count`` branches that are bound.

        Nothing waits for the device, and after the first call with a layout and a timestep
        nothing is copied from the host: such a call can be captured in a CUDA graph.
        """
        place, layout = self.parallel, bound.layout
        shared = place.branches > 1 and count == place.branches
        masks = self.masks(layout)
        tokens = self._tokens(state, self._time(timestep), layout, masks)
        found: list[Modalities] = []
        for group in bound.parts(1 if shared else count):
            found += self._run(tokens, group, layout, masks)
        return place.exchange(found[0]) if shared else found

    def _run(
        self, tokens: Tensor, group: BranchGroup, layout: Layout, masks: Masks
    ) -> list[Modalities]:
        """Runs the generation tower on the same tokens under each text of ``group``."""
        rows = self.generation(tokens.repeat(len(group.lengths), 1), group)
        return [masks.apply(self._velocities(own, layout)) for own in rows.split(group.tokens)]

    def _tokens(self, state: Modalities, time: Tensor, layout: Layout, masks: Masks) -> Tensor:
        """Embeds all media [tokens, hidden]; what is noisy gets the time vector."""
        self._check(state, layout)
        patches = patchify(state.video, self.config.latent_patch_size)
        parts = [self.proj_in(patches.to(self.params_dtype))]
        if layout.action is not None and self.action is not None and state.action is not None:
            rows = self.action.tokens(state.action, layout.action.domain_id)
            parts.append(rows.to(self.params_dtype))
        if layout.sound_frames and self.sound is not None and state.sound is not None:
            parts.append(self.sound.tokens(state.sound, self.params_dtype))
        return torch.addcmul(torch.cat(parts), masks.noisy_tokens, time)

    def _velocities(self, rows: Tensor, layout: Layout) -> Modalities:
        """Maps the tower's output [tokens, hidden] of one branch to fp32 velocities."""
        config = self.config
        frames, height, width = layout.grid(config.latent_patch_size)
        actions = 0 if layout.action is None else layout.action.rows
        parts = rows.split((frames * height * width, actions, layout.sound_frames))
        shape = (config.latent_channel, layout.frames, layout.height, layout.width)
        patches = self.proj_out(parts[0]).float()
        video = unpatchify(patches, shape, config.latent_patch_size)
        action = sound = None
        if layout.action is not None and self.action is not None:
            action = self.action.velocities(parts[1], layout.action.domain_id)
        if layout.sound_frames and self.sound is not None:
            sound = self.sound.velocities(parts[2])
        return Modalities(video, action, sound)

    def _check(self, state: Modalities, layout: Layout) -> None:
        config = self.config
        heads = {"video": True, "action": config.action_gen, "sound": config.sound_gen}
        shapes = layout.shapes(config.latent_channel, config.action_dim, config.sound_dim)
        for name, needed in shapes.items():
            if needed is not None and not heads[name]:
                raise ValueError(f"the layout has {name}, for which this model has no head")
            found = getattr(state, name)
            if (None if found is None else tuple(found.shape)) != needed:
                raise ValueError(
                    f"state.{name} is {'absent' if found is None else tuple(found.shape)}; the "
                    f"layout needs {'none' if needed is None else needed}"
                )

    def masks(self, layout: Layout) -> Masks:
        """Returns which positions of ``layout`` are denoised; those used last are kept."""

        def make() -> Masks:
            return Masks.build(layout, self.config, dtype=self.params_dtype, device=self.device)

        return self._masks.get(layout, make)

    def _time(self, timestep: int) -> Tensor:
        """Returns the time vector [1, hidden] in the model's dtype; constant, so it is kept."""
        if not 0 <= timestep <= 1000:
            raise ValueError(f"timestep is {timestep}; allowed: 0 to 1000")
        if timestep not in self._times:
            self._times[timestep] = self.time(timestep).to(self.params_dtype)
        return self._times[timestep]


def _served(domains: Sequence[int] | None, config: Cosmos3Config) -> tuple[int, ...]:
    count = config.num_embodiment_domains if config.action_gen else 0
    chosen = tuple(range(count)) if domains is None else tuple(dict.fromkeys(domains))
    wrong = [domain for domain in chosen if not 0 <= domain < count]
    if wrong:
        raise ValueError(
            f"domains has {wrong}; allowed: "
            + (f"0 to {count - 1}" if count else "none, this model has no action head")
        )
    return chosen
