"""π0.5 and π0: one prefix pass, then a loop of action-expert steps."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from phyai.guidance import Guidance
from phyai.layers import AdaRMSNorm, Embedding, Linear, RotaryEmbedding
from phyai.models.pi05 import keys
from phyai.models.pi05.config import PI05Config
from phyai.models.pi05.decoder import Decoder
from phyai.models.pi05.heads import ActionTime, TimeCondition, head, time_embedding
from phyai.models.pi05.modulation import StepModulation
from phyai.models.pi05.prefix import PrefixLayout, pack_rows, plan_prefix
from phyai.models.pi05.savings import Savings
from phyai.models.pi05.stream import Place
from phyai.models.pi05.suffix import plan_suffix, starting_point
from phyai.models.pi05.velocity import normed_velocity, velocity_site
from phyai.models.pi05.vision import VisionTower
from phyai.processing.inputs import ModelInputs
from phyai.runtime.paged import PagedKVCache, PagedPlan
from phyai.runtime.segments import SegmentPlan


class PI05Model(nn.Module):
    """A vision-language-action policy that integrates a flow from noise to an action chunk.

    Weights, activations and the key/value cache use ``params_dtype``; the patch embedding, time and
    action heads, rotary angles and the integrated actions stay fp32, and so do norm parameters
    where the chosen kernel reads them.

    Args:
        config: sizes and defaults.
        params_dtype: fp32, bf16 or fp16.
        device: where the model lives.
        savings: exact simplifications to use.
    """

    def __init__(
        self,
        config: PI05Config,
        *,
        params_dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
        savings: Savings | None = None,
    ) -> None:
        super().__init__()
        self.config = config
        self.params_dtype = params_dtype
        self.device: torch.device = torch.device(device)
        self.savings: Savings = Savings.all() if savings is None else savings
        language, expert = config.language, config.expert
        self.vision: VisionTower = VisionTower(
            config.vision, language.width, params_dtype=params_dtype, device=device
        )
        self.embed_tokens: Embedding = Embedding(
            language.vocab,
            language.width,
            key=keys.EMBEDDING[0],
            aliases=keys.EMBEDDING[1:],
            params_dtype=params_dtype,
            device=device,
        )
        self.language: Decoder = Decoder(
            language,
            prefix=keys.LANGUAGE,
            role="language",
            attention_role="prefix",
            adaptive=False,
            keys_only=self.savings.lean_last_layer,
            params_dtype=params_dtype,
            device=device,
        )
        self.expert: Decoder = Decoder(
            expert,
            prefix=keys.EXPERT,
            role="expert",
            attention_role="expert",
            adaptive=config.family == "pi05",
            params_dtype=params_dtype,
            device=device,
        )
        actions = config.max_action_dim
        self.action_in_proj: Linear = head(actions, expert.width, "action_in_proj", device)
        self.action_out_proj: Linear = head(expert.width, actions, "action_out_proj", device)
        self.time: TimeCondition | ActionTime
        self.state_proj: Linear | None = None
        if config.family == "pi05":
            self.time = TimeCondition(expert.width, device=device)
        else:
            self.time = ActionTime(expert.width, device=device)
            self.state_proj = head(config.max_state_dim, expert.width, "state_proj", device)
        self.prefix_rope: RotaryEmbedding = self._rope(language.heads)
        self.key_rope: RotaryEmbedding = self._rope(language.kv_heads)
        self.expert_rope: RotaryEmbedding = self._rope(expert.heads)
        self._modulations: dict[int, list[StepModulation]] = {}
        self._velocity_site = velocity_site(expert.width, actions)

    def _rope(self, heads: int) -> RotaryEmbedding:
        config = self.config
        return RotaryEmbedding(
            config.language.head_dim,
            heads,
            config.language.kv_heads,
            max_positions=config.longest_prefix + config.suffix_len,
            device=self.device,
        )

    def embed_prompt(self, ids: Tensor) -> Tensor:
        """Maps token ids [T] to vectors [T, width], scaled by √width in the embedding's dtype."""
        vectors = self.embed_tokens(ids)
        return vectors * torch.tensor(self.config.language.width**0.5, dtype=vectors.dtype).item()

    def embed_prefix(self, inputs: ModelInputs, layout: PrefixLayout) -> Tensor:
        """Returns the packed prefix rows [total, width]."""
        chosen = torch.stack([inputs.images[request, camera] for request, camera in layout.views])
        features = self.vision(chosen.to(self.device))
        rows = layout.prompt_rows
        vectors = self.embed_prompt(inputs.tokens.cpu()[rows].to(self.device))
        return pack_rows(layout, features, vectors.split(rows.sum(1).tolist()))

    def check_prompt(self, inputs: ModelInputs) -> None:
        """Refuses a prompt with more slots than the model has positions for."""
        most = self.config.tokenizer_max_length
        if inputs.tokens.shape[1] > most:
            raise ValueError(
                f"the prompt has {inputs.tokens.shape[1]} slots, the checkpoint allows {most}"
            )

    def encode_prefix(self, inputs: ModelInputs) -> tuple[PagedKVCache, PrefixLayout]:
        """Runs the vision tower and the language model; keeps their keys and values.

        Returns:
            The cache, with room for every request's action tokens behind the prefix, and the
            layout that says which of its slots may be seen.

        Raises:
            ValueError: if a prompt has more slots than the model has positions for.
        """
        config = self.config
        self.check_prompt(inputs)
        layout = plan_prefix(
            inputs,
            config.vision.tokens,
            drop_absent=self.savings.drop_absent_cameras,
            pack_prompt=self.savings.pack_prompt,
        )
        cache = PagedKVCache.allocate(
            layers=config.language.layers,
            slots=layout.total + len(layout.lengths) * config.suffix_len,
            kv_heads=config.language.kv_heads,
            head_dim=config.language.head_dim,
            dtype=self.params_dtype,
            device=self.device,
        )
        plan = PagedPlan.from_slots(layout.lengths, layout.visible, self.device)
        positions = layout.positions.to(self.device)
        x = self.embed_prefix(inputs, layout)
        self.fill_cache(x, positions, cache, plan)
        return cache, layout

    def fill_cache(
        self, x: Tensor, positions: Tensor, cache: PagedKVCache, plan: PagedPlan | SegmentPlan
    ) -> None:
        """Runs the language model on prefix rows ``x`` [T, width] and keeps keys and values."""
        stream = self.language(x, Place(positions, self.prefix_rope, cache, 0, plan))
        if self.language.tail is None:
            self.language.final_norm(stream)
        else:
            self.language.tail(stream.residual, stream.update, positions, self.key_rope, cache, 0)

    def time_vector(self, time: Tensor) -> Tensor:
        """Returns the fp32 embedding [B, expert width] of times [B]."""
        config = self.config
        return time_embedding(time, config.expert.width, config.min_period, config.max_period)

    def modulate(self, time: Tensor) -> StepModulation:
        """Returns what the expert's norms (π0.5) or its action tokens (π0) need at ``time`` [B]."""
        embedding = self.time_vector(time)
        if not isinstance(self.time, TimeCondition):
            return StepModulation(embedding, (None,) * len(self.expert.layers), None)
        layers, final = self.expert.modulations(self.time(embedding))
        return StepModulation(embedding, tuple(layers), final)

    def suffix_tokens(self, actions: Tensor, state: Tensor | None, step: StepModulation) -> Tensor:
        """Embeds noisy actions [B, chunk, A], and π0's state, as rows [B * suffix, width]."""
        tokens = self.action_in_proj(actions)
        if isinstance(self.time, ActionTime):
            assert self.state_proj is not None
            if state is None:
                raise ValueError("π0 needs the robot's state; the inputs have none")
            tokens = self.time(tokens, step.embedding)
            tokens = torch.cat([self.state_proj(state)[:, None], tokens], dim=1)
        return tokens.flatten(0, 1).to(self.params_dtype)

    def velocity(
        self, actions: Tensor, state: Tensor | None, step: StepModulation, place: Place
    ) -> Tensor:
        """Returns the flow's velocity [B, chunk, A] in fp32 at the noisy ``actions``."""
        x = self.suffix_tokens(actions, state, step)
        stream = self.expert(x, place, step.layers, step.final, step.constants)
        norm = self.expert.norm
        if isinstance(norm, AdaRMSNorm) and stream.update is None:
            assert step.final is not None, "an adaptive norm needs a modulation"
            found = normed_velocity(
                self._velocity_site, norm, self.action_out_proj, stream.residual, step.final
            )
            return found.view(actions.shape)
        x = self.expert.final_norm(stream, step.final).view(actions.shape[0], -1, x.shape[1])
        return self.action_out_proj(x[:, -self.config.chunk_size :].float())

    def step_modulations(self, num_steps: int | None = None) -> list[StepModulation]:
        """Returns what each Euler step needs from its time; one entry per step.

        Args:
            num_steps: the checkpoint's number if None.

        Raises:
            ValueError: for fewer than one step.
        """
        num_steps = self.config.num_steps if num_steps is None else num_steps
        if num_steps < 1:
            raise ValueError(f"num_steps is {num_steps}; it must be at least 1")

        def compute(index: int) -> StepModulation:
            time = torch.tensor([1.0 - index / num_steps], device=self.device)
            return self.modulate(time)

        if not self.savings.precompute_modulation:
            return [compute(index) for index in range(num_steps)]
        if num_steps not in self._modulations:
            self._modulations[num_steps] = [compute(index) for index in range(num_steps)]
        return self._modulations[num_steps]

    def integrate(
        self,
        actions: Tensor,
        state: Tensor | None,
        steps: Sequence[StepModulation],
        place: Place,
        guidance: Guidance | None = None,
    ) -> Tensor:
        """Follows the flow from ``actions`` [B, chunk, A] through all ``steps``."""
        for index, step in enumerate(steps):
            velocity = self.velocity(actions, state, step, place)
            if guidance is not None:
                time = 1.0 - index / len(steps)
                velocity = guidance.correct(velocity, actions, time)
            actions = actions.sub(velocity, alpha=1.0 / len(steps))
        return actions

    @torch.inference_mode()
    def sample_actions(
        self,
        inputs: ModelInputs,
        *,
        noise: Tensor | None = None,
        seed: int | None = None,
        num_steps: int | None = None,
        guidance: Guidance | None = None,
    ) -> Tensor:
        """Integrates the flow from noise at t = 1 to actions at t = 0 with Euler steps.

        Args:
            inputs: images, prompt and (π0) state of a batch.
            noise: starting point [B, chunk, max_action_dim]; drawn if None.
            seed: of the drawn noise; None draws from fresh entropy.
            num_steps: Euler steps; the checkpoint's number if None.
            guidance: actions of the chunk before that the new one shall continue.

        Returns:
            Normalised actions [B, chunk, max_action_dim] in fp32.

        Raises:
            ValueError: for a wrong noise shape, both noise and seed, or fewer than one step.
        """
        steps = self.step_modulations(num_steps)
        actions = self.starting_point(inputs.tokens.shape[0], noise, seed).to(self.device)
        state = None if inputs.state is None else inputs.state.to(self.device)
        cache, layout = self.encode_prefix(inputs)
        plan, positions = plan_suffix(self.config, layout, self.device)
        place = Place(positions, self.expert_rope, cache, layout.total, plan)
        guidance = None if guidance is None else guidance.to(self.device)
        return self.integrate(actions, state, steps, place, guidance)

    def starting_point(self, batch: int, noise: Tensor | None, seed: int | None) -> Tensor:
        """Returns ``noise``, or draws it on the CPU: fp32 [batch, chunk, max_action_dim].

        Raises:
            ValueError: for a wrong shape, or both noise and seed.
        """
        shape = (batch, self.config.chunk_size, self.config.max_action_dim)
        return starting_point(shape, noise, seed)
