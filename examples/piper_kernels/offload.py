"""Run a stack of layers whose weights stay on the host: two device buffers take turns.

    python examples/piper_kernels/offload.py --source pinned --format int8

While one layer runs from its buffer, the next weight is written into the other one on a second
stream: copied as it is from pinned memory or a memory-mapped file, or converted from packed GGUF
bytes. The buffers are allocated once and never replaced. On the CPU the same code runs without
streams.
"""

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from piper_kernels.gguf import GGUFQuantizationType
from piper_kernels.weights.convrot.int8 import ConvRotInt8Tensor
from piper_kernels.weights.convrot.nvfp4 import ConvRotNVFP4Tensor
from piper_kernels.weights.io import load_quantized, save_quantized

GROUP_SIZE = 64
SOURCES = ("pinned", "mmap", "gguf")
NVFP4_OPTIONS = {"compute_per_tensor_scale": True, "is_swizzled_scales": True}
FORMATS: dict[str, tuple[Any, dict[str, Any]]] = {
    "int8": (ConvRotInt8Tensor, {}),
    "nvfp4": (ConvRotNVFP4Tensor, NVFP4_OPTIONS),
}

type Refill = Callable[[int, int], None]


def pack_q8_0(dense: Tensor) -> Tensor:
    """Return the GGUF Q8_0 bytes ``[out, in / 32 * 34]`` of a dense weight ``[out, in]``."""
    blocks = dense.float().unflatten(-1, (-1, 32))
    scale = (blocks.abs().amax(-1, keepdim=True) / 127).to(torch.float16)
    codes = (blocks / scale.float().clamp(min=1e-8)).round().clamp(-127, 127).to(torch.int8)
    return torch.cat([scale.view(torch.uint8), codes.view(torch.uint8)], dim=-1).flatten(1)


def inner_tensors(weight: Any) -> list[Tensor]:
    """Return the tensors that hold a quantized weight."""
    return [getattr(weight, name) for name in weight.__tensor_flatten__()[0]]


@dataclass
class Pipeline:
    """Layers on the host and two weights on the device that they are written to.

    Attributes:
        layers: Number of layers.
        buffers: The two device weights.
        refill: ``refill(layer, slot)`` writes a layer's weight into a buffer.
    """

    layers: int
    buffers: tuple[Any, Any]
    refill: Refill

    def __post_init__(self) -> None:
        cuda = self.buffers[0].device.type == "cuda"
        self._copies = torch.cuda.Stream() if cuda else None
        self._filled = [torch.cuda.Event() for _ in range(2)] if cuda else []
        self._read = [torch.cuda.Event() for _ in range(2)] if cuda else []

    def run(self, x: Tensor, *, copy: bool = True, compute: bool = True) -> Tensor:
        """Return the output of all layers; either half can be left out to time the other."""
        if self._copies is not None:  # for what used the buffers before this call
            self._copies.wait_stream(torch.cuda.current_stream())
        self._fill(0, copy=copy)
        for layer in range(self.layers):
            slot = layer % 2
            if self._copies is not None:
                torch.cuda.current_stream().wait_event(self._filled[slot])
            if compute:
                hidden = functional.linear(x, self.buffers[slot])
                x = functional.rms_norm(x + hidden, x.shape[-1:])
            if self._copies is not None:
                self._read[slot].record()
            # Enqueued after the layer, so that a copy which blocks the host overlaps as well.
            if layer + 1 < self.layers:
                self._fill(layer + 1, copy=copy)
        return x

    def _fill(self, layer: int, *, copy: bool) -> None:
        slot = layer % 2
        if self._copies is None:
            if copy:
                self.refill(layer, slot)
            return
        if layer >= 2:
            self._copies.wait_event(self._read[slot])
        with torch.cuda.stream(self._copies):
            if copy:
                self.refill(layer, slot)
            self._filled[slot].record()


def build(
    dense: Sequence[Tensor], fmt: str, source: str, device: str, folder: Path
) -> tuple[Pipeline, list[Any]]:
    """Return a pipeline over dense weights ``[size, size]`` and the weights kept on the device.

    The resident weights are what the pipeline's result is compared with.
    """
    cls, options = FORMATS[fmt]
    if source == "gguf":
        return _build_gguf(dense, cls, options, device)
    weights = [cls.from_hp(w, group_size=GROUP_SIZE, **options) for w in dense]
    resident = [weight.to(device, copy=True) for weight in weights]
    if source == "mmap":
        path = folder / "weights.safetensors"
        save_quantized({str(index): weight for index, weight in enumerate(weights)}, path)
        loaded = load_quantized(path)
        weights = [loaded[str(index)] for index in range(len(dense))]
    elif device == "cuda":
        for weight in weights:
            for name in weight.__tensor_flatten__()[0]:
                setattr(weight, name, getattr(weight, name).pin_memory())
    buffers = (resident[0].clone(), resident[0].clone())

    def refill(layer: int, slot: int) -> None:
        buffers[slot].copy_(weights[layer], non_blocking=True)

    return Pipeline(len(weights), buffers, refill), resident


def _build_gguf(
    dense: Sequence[Tensor], cls: Any, options: dict[str, Any], device: str
) -> tuple[Pipeline, list[Any]]:
    host = [pack_q8_0(weight) for weight in dense]
    if device == "cuda":
        host = [packed.pin_memory() for packed in host]
    settings = {"quant_type": GGUFQuantizationType.Q8_0, "allow_cpu": device == "cpu"}
    resident = [
        cls.from_gguf(
            packed.to(device),
            group_size=GROUP_SIZE,
            logical_dtype=dense[0].dtype,
            **settings,
            **options,
        )
        for packed in host
    ]
    buffers = (resident[0].clone(), resident[0].clone())
    staging = [torch.empty_like(host[0], device=device) for _ in range(2)]
    if "compute_per_tensor_scale" in options:
        settings["compute_per_tensor_scale"] = True

    def refill(layer: int, slot: int) -> None:
        staging[slot].copy_(host[layer], non_blocking=True)
        buffers[slot].copy_from_gguf_(staging[slot], **settings)

    return Pipeline(len(host), buffers, refill), resident


def milliseconds(run: Callable[[], object], device: str, repeats: int) -> float:
    """Return the median time of a call; device time included."""
    times = []
    for _ in range(repeats + 1):
        if device == "cuda":
            torch.cuda.synchronize()
        start = time.perf_counter()
        run()
        if device == "cuda":
            torch.cuda.synchronize()
        times.append(1e3 * (time.perf_counter() - start))
    return statistics.median(times[1:])


def main() -> None:
    """Check the pipeline against weights that stay on the device, then time it."""
    parser = argparse.ArgumentParser(description="Run layers whose weights stay on the host.")
    parser.add_argument("--source", choices=SOURCES, default="pinned")
    parser.add_argument("--format", choices=tuple(FORMATS), default="int8")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--size", type=int, default=256)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args()
    torch.manual_seed(0)
    dense = [
        torch.randn(options.size, options.size).mul_(options.size**-0.5).bfloat16()
        for _ in range(options.layers)
    ]
    x = torch.randn(options.tokens, options.size).bfloat16().to(options.device)
    with tempfile.TemporaryDirectory() as folder, torch.no_grad():
        pipeline, resident = build(
            dense, options.format, options.source, options.device, Path(folder)
        )
        pointers = [t.data_ptr() for w in pipeline.buffers for t in inner_tensors(w)]
        expected = x
        for weight in resident:
            hidden = functional.linear(expected, weight)
            expected = functional.rms_norm(expected + hidden, x.shape[-1:])
        if not torch.equal(pipeline.run(x), expected):
            raise SystemExit("the pipeline differs from weights that stay on the device")
        if pointers != [t.data_ptr() for w in pipeline.buffers for t in inner_tensors(w)]:
            raise SystemExit("a buffer was replaced")
        stored = sum(t.nbytes for t in inner_tensors(resident[0]))
        print(f"{options.layers} layers of {stored / 2**20:.2f} MiB, {options.source} on the host")
        print("output equals resident weights; storage of both buffers unchanged")
        report(pipeline, x, options.device, options.repeats)


def report(pipeline: Pipeline, x: Tensor, device: str, repeats: int) -> None:
    """Print the times of both halves and of the pipeline, and how much of them overlaps."""
    parts = {
        "refill only": lambda: pipeline.run(x, compute=False),
        "compute only": lambda: pipeline.run(x, copy=False),
        "pipeline": lambda: pipeline.run(x),
    }
    times = {name: milliseconds(run, device, repeats) for name, run in parts.items()}
    for name, value in times.items():
        print(f"{name:>12}: {value:.3f} ms")
    if device != "cuda":
        print("no streams on this device: refills and layers take turns")
        return
    refill, compute, both = times.values()
    hidden = (refill + compute - both) / min(refill, compute)
    print(f"overlap: {100 * min(max(hidden, 0), 1):.0f} % of the shorter half is hidden")


if __name__ == "__main__":
    main()
