"""Where scripts of kernel checks run: arguments of the fixture ``run_kernel_checks``."""

import pytest

WHERE = [
    pytest.param((), id="interpreter"),
    pytest.param(("cuda",), id="cuda", marks=pytest.mark.gpu),
]
