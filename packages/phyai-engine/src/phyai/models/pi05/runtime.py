"""The GPU runtime of π0.5 and π0: recorded graphs, replayed for every request."""

import threading
from collections.abc import Iterable
from contextlib import nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor

from phyai.guidance import Guidance
from phyai.models.pi05.lane import Lane
from phyai.models.pi05.model import PI05Model
from phyai.models.pi05.savings import Savings
from phyai.models.pi05.staging import PROMPT_BUCKETS, prompt_bucket
from phyai.processing.inputs import ModelInputs

MOST_BATCH = 32


@dataclass
class Ticket:
    """A batch that was started.

    Attributes:
        actions: fp32 [B, chunk, max_action_dim] on the device, valid once the event is done.
        finished: recorded behind the actions; None on the CPU.
    """

    actions: Tensor
    finished: torch.cuda.Event | None

    def result(self) -> Tensor:
        """Makes the current stream wait for the actions and returns them; the host goes on."""
        if self.finished is not None:
            torch.cuda.current_stream(self.actions.device).wait_event(self.finished)
        return self.actions


class PI05Runtime:
    """Answers batches by replaying CUDA graphs.

    Graphs are recorded when a number of views, a bucket of prompt tokens or a number of steps is
    first seen, or beforehand by `warm_up`. A replay copies its inputs to the device and launches
    three graphs; the host waits only until the inputs of the lane's last batch are copied.

    Args:
        model: on a CUDA device, with all savings.
        lanes: batches in flight, each with buffers and a stream of its own. With two, the language
            model of one batch runs beside the Euler loop of the one before.
        reuse: compute only views that differ from the last batch's on the same lane, and no prefix
            where images and prompts are equal.

    Raises:
        ValueError: for a model without its savings, or fewer than one lane.
    """

    def __init__(self, model: PI05Model, *, lanes: int = 1, reuse: bool = False) -> None:
        if model.savings != Savings.all():
            raise ValueError(
                f"the runtime needs every saving, the model has {model.savings}; "
                "call model.sample_actions instead"
            )
        if lanes < 1:
            raise ValueError(f"lanes is {lanes}; it must be at least 1")
        self.model = model
        self.reuse = reuse
        self.lanes: int = lanes
        self._lanes: list[dict[int, Lane]] = [{} for _ in range(lanes)]
        on_gpu = model.device.type == "cuda"
        self._streams = [torch.cuda.Stream(model.device) if on_gpu else None for _ in range(lanes)]
        self._pools = [torch.cuda.graph_pool_handle() if on_gpu else None for _ in range(lanes)]
        self._next = 0
        self._lock = threading.Lock()

    def sample_actions(
        self,
        inputs: ModelInputs,
        *,
        noise: Tensor | None = None,
        seed: int | None = None,
        num_steps: int | None = None,
        guidance: Guidance | None = None,
    ) -> Tensor:
        """Does what `PI05Model.sample_actions` does."""
        ticket = self.submit(inputs, noise=noise, seed=seed, num_steps=num_steps, guidance=guidance)
        return ticket.result()

    @torch.inference_mode()
    def submit(
        self,
        inputs: ModelInputs,
        *,
        noise: Tensor | None = None,
        seed: int | None = None,
        num_steps: int | None = None,
        guidance: Guidance | None = None,
    ) -> Ticket:
        """Starts a batch on the next lane and returns at once.

        Args:
            inputs: images, prompt and (π0) state of up to `MOST_BATCH` requests.
            noise: starting point [B, chunk, max_action_dim]; drawn if None.
            seed: of the drawn noise.
            num_steps: Euler steps; the checkpoint's number if None.
            guidance: of chunks that continue earlier ones.

        Raises:
            ValueError: for a batch that is too large, bad noise, or a prompt that is too long.
        """
        model, batch = self.model, inputs.tokens.shape[0]
        if not 1 <= batch <= MOST_BATCH:
            raise ValueError(f"the batch has {batch} requests; 1 to {MOST_BATCH} are possible")
        steps = model.config.num_steps if num_steps is None else num_steps
        if steps < 1:
            raise ValueError(f"num_steps is {steps}; it must be at least 1")
        start = model.starting_point(batch, noise, seed)
        with self._lock:
            index = self._next
            self._next = (index + 1) % len(self._lanes)
            stream = self._streams[index]
            lane = self._lane(index, batch)
            staged = lane.stage(inputs)
            if stream is None:
                lane.encode(staged)
                actions = lane.denoise(start, inputs.state, steps, guidance)
                return Ticket(actions.clone(), None)
            stream.wait_stream(torch.cuda.current_stream(model.device))
            with torch.cuda.stream(stream):
                lane.encode(staged)
                actions = lane.denoise(start, inputs.state, steps, guidance).clone()
                actions.record_stream(torch.cuda.current_stream(model.device))
                finished = torch.cuda.Event()
                finished.record()
            return Ticket(actions, finished)

    @torch.inference_mode()
    def warm_up(
        self,
        *,
        batches: Iterable[int] = (1,),
        views: Iterable[int] | None = None,
        tokens: Iterable[int] | None = None,
        steps: Iterable[int] | None = None,
    ) -> int:
        """Records graphs before the first request.

        Args:
            batches: batch sizes.
            views: images of a request; every number up to the checkpoint's cameras if None.
            tokens: prompt tokens of a request; every bucket if None.
            steps: numbers of Euler steps; the checkpoint's if None.

        Returns:
            The number of graphs that exist now.
        """
        config = self.model.config
        views = range(1, len(config.cameras) + 1) if views is None else [*views]
        tokens = PROMPT_BUCKETS if tokens is None else [*tokens]
        steps = (config.num_steps,) if steps is None else [*steps]
        with self._lock:
            for index, stream in enumerate(self._streams):
                for batch in batches:
                    lane = self._lane(index, batch)
                    buckets = {
                        prompt_bucket(
                            batch * min(count, config.tokenizer_max_length),
                            batch,
                            config.tokenizer_max_length,
                        )
                        for count in tokens
                    }
                    with nullcontext() if stream is None else torch.cuda.stream(stream):
                        lane.record([batch * count for count in views], sorted(buckets), [*steps])
        return self.graphs()

    def graphs(self) -> int:
        """Returns the number of recorded graphs."""
        return sum(lane.recorded() for lanes in self._lanes for lane in lanes.values())

    def lane(self, batch: int) -> Lane:
        """Returns the buffers and graphs that a batch of this size used on the first lane.

        Raises:
            KeyError: if there was none.
        """
        return self._lanes[0][batch]

    def _lane(self, index: int, batch: int) -> Lane:
        lanes = self._lanes[index]
        if batch not in lanes:
            lanes[batch] = Lane(self.model, batch, pool=self._pools[index], reuse=self.reuse)
        return lanes[batch]
