"""Run the device tests of the kernels on an RDNA4 device with an existing ROCm environment.

    ROCM_PYTHON scripts/run_rocm_regressions.py [--junitxml=FILE] [PYTEST ARGUMENT ...]

Do not provision that environment with ``uv sync``: the workspace resolves the CUDA build of
PyTorch. Device and versions are printed first. Fails, instead of skipping, where there is no such
device, where one of the operations has no kernel for it, or where no test runs. Paths replace the
suite, other arguments are added to it.
"""

import sys
from collections.abc import Iterable, Sequence

from _device_run import ROOT, Support, run_device_tests

RDNA4 = ("gfx1200", "gfx1201")
SUITE = tuple(
    f"packages/piper-kernels/tests/{folder}"
    for folder in (
        "_triton",
        "attention",
        "conv3d",
        "fusions",
        "linear/convrot/int8",
        "operators",
        "specializations",
        "stochastic_quantization",
        "weights/convrot",
    )
)


def rdna4_support() -> Support:
    """Return which operations run in kernels on the first device, or why not."""
    import torch

    from piper_kernels._triton.targets import accelerator_target
    from piper_kernels.attention._backends import AttentionRequest
    from piper_kernels.attention.piper_attention._backend import BACKENDS as DENSE
    from piper_kernels.attention.sparse_piper_attention._backend import BACKENDS as SPARSE
    from piper_kernels.conv3d.convrot.int8._backend import native_support
    from piper_kernels.fusions.convrot_int8_sparse_piper import _compile as projections
    from piper_kernels.linear.convrot.int8._selection import supports_matmul

    device = torch.device("cuda", 0)
    target = accelerator_target(device)
    assert target is not None  # for the type checker: the device was found before
    found = {"INT8 linear": supports_matmul(target), "INT8 Conv3D": native_support(device)}
    for head_dim in (64, 128):
        for causal in (False, True):
            # The last backend is the portable one.
            name = f"dense attention D{head_dim}{' causal' if causal else ''}"
            request = AttentionRequest(target, head_dim, causal)
            found[name] = any_support(backend.support(request) for backend in DENSE[:-1])
        answers = (backend.support(device, head_dim) for backend in SPARSE[:-1])
        found[f"sparse attention D{head_dim}"] = any_support(answers)
        name = f"sparse projections and output D{head_dim}"
        found[name] = projections.supports_target(device, head_dim)
    return found


def any_support(answers: Iterable[tuple[bool, str]]) -> tuple[bool, str]:
    """Return that one of several backends is usable, or the reasons of all."""
    reasons = []
    for usable, reason in answers:
        if usable:
            return True, ""
        reasons.append(reason)
    return False, "; ".join(reasons)


def main(arguments: Sequence[str]) -> int:
    """Run the suite, or the paths among the arguments; return the exit status."""
    paths = [a for a in arguments if not a.startswith("-") and (ROOT / a.split("::")[0]).exists()]
    suite = [] if paths else list(SUITE)
    return run_device_tests(
        [*suite, *arguments], vendor="amd", architectures=RDNA4, support=rdna4_support
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
