"""CUDA graphs: a computation of fixed shapes, recorded once and replayed with new inputs."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from phyai.dispatch.call import kernel_mode_scope
from phyai.dispatch.types import KernelMode


class CapturedCall:
    """A function that reads and writes buffers of its own, recorded as one CUDA graph.

    Before it is recorded, the function runs once eagerly and once in capture mode, on a side
    stream: rows are then chosen and prepared, their kernels compiled, attention planned and tuned
    choices measured. While it is recorded only rows that may be captured are chosen.

    The function must launch the same kernels whatever the buffers hold, and may not read them on
    the host. Callers write the buffers that it reads before a replay, and read the recorded output
    after it, both on the stream of the replay. What else it reads (weights, caches, plans) must
    stay in place; it is kept alive by the function.

    Args:
        function: returns one tensor.
        device: CUDA device.
        pool: memory that graphs share which never run at the same time; a fresh one if None.
        eager: whether to run it eagerly first; a call that differs little from a recorded one and
            has nothing to measure needs no such run.
    """

    @torch.inference_mode()
    def __init__(
        self,
        function: Callable[[], Tensor],
        device: torch.device,
        pool: Any = None,
        *,
        eager: bool = True,
    ) -> None:
        self._function = function
        modes = (KernelMode.EAGER, KernelMode.CAPTURE) if eager else (KernelMode.CAPTURE,)
        for mode in modes:
            with kernel_mode_scope(mode):
                _run_on_side_stream(function, device)
        with kernel_mode_scope(KernelMode.CAPTURE):
            self._output, self._replay = _record(function, device, pool)

    def __call__(self) -> Tensor:
        """Replays the graph on the current stream and returns its output buffer."""
        self._replay()
        return self._output


class CapturedLoop:
    """A function of tensors, recorded as one CUDA graph when it is built; see `CapturedCall`.

    Inputs are copied into buffers of the graph and the result out of it. Calls must not overlap:
    they share these buffers.

    Args:
        function: maps the inputs to one tensor.
        inputs: examples; later inputs have their shapes and dtypes.

    Raises:
        ValueError: if the inputs are not all on one CUDA device.
    """

    @torch.inference_mode()
    def __init__(self, function: Callable[..., Tensor], inputs: Sequence[Tensor]) -> None:
        device = _cuda_device(inputs)
        buffers = self._inputs = tuple(tensor.clone() for tensor in inputs)
        self._call = CapturedCall(lambda: function(*buffers), device)

    @torch.inference_mode()
    def __call__(self, *inputs: Tensor) -> Tensor:
        """Returns the function's result for ``inputs``, in a tensor of its own.

        Raises:
            ValueError: if the inputs differ in number, shape or dtype from the recorded ones.
        """
        seen = [(tuple(tensor.shape), tensor.dtype) for tensor in inputs]
        recorded = [(tuple(tensor.shape), tensor.dtype) for tensor in self._inputs]
        if seen != recorded:
            raise ValueError(
                f"the graph was recorded for inputs {_listed(recorded)}, got {_listed(seen)}; "
                "record another graph for other shapes"
            )
        for buffer, tensor in zip(self._inputs, inputs, strict=True):
            buffer.copy_(tensor)
        return self._call().clone()


def _listed(kinds: Sequence[tuple[tuple[int, ...], torch.dtype]]) -> str:
    return ", ".join(f"{dtype} {list(shape)}" for shape, dtype in kinds) or "none"


def _cuda_device(inputs: Sequence[Tensor]) -> torch.device:
    devices = {tensor.device for tensor in inputs}
    if len(devices) == 1 and (device := devices.pop()).type == "cuda":
        return device
    found = ", ".join(sorted({str(tensor.device) for tensor in inputs})) or "no input"
    raise ValueError(
        f"a CUDA graph needs inputs on one CUDA device, got {found}; call the function itself on "
        "other devices"
    )


def _run_on_side_stream(function: Callable[[], Tensor], device: torch.device) -> None:
    current, side = torch.cuda.current_stream(device), torch.cuda.Stream(device)
    side.wait_stream(current)
    with torch.cuda.stream(side):
        function()
    current.wait_stream(side)


def _record(
    function: Callable[[], Tensor], device: torch.device, pool: Any
) -> tuple[Tensor, Callable[[], None]]:
    graph = torch.cuda.CUDAGraph()
    # Other threads may go on using the device.
    with (
        torch.cuda.device(device),
        torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"),
    ):
        output = function()
    return output, graph.replay
