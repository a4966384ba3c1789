"""Kernel dispatch: which implementation serves a call, under which policy, and why.

A layer owns a `CallSite`. At a call it states facts: device, dtypes, shapes, the weight's physical
format. The `Selector` checks the condition of every row of the catalog, applies the `Policy`,
prepares one row and remembers it. `explain` answers from the same conditions.
"""

from phyai.dispatch.api import (
    backend_preference,
    explain,
    freeze_kernel_choices,
    param_dtypes,
    select,
    unfreeze_kernel_choices,
)
from phyai.dispatch.bench_inputs import BenchInputs, live_inputs
from phyai.dispatch.bootstrap import (
    get_kernel_selector,
    initialize_kernel_system,
    kernel_selector_scope,
    reset_kernel_selector,
    resolve_policy,
    set_kernel_selector,
)
from phyai.dispatch.call import CallSite, current_mode, kernel_mode_scope, live_call_sites
from phyai.dispatch.catalog import (
    Catalog,
    UnknownKernelError,
    UnknownOperationError,
    build_catalog,
)
from phyai.dispatch.config import KernelConfig
from phyai.dispatch.device import probe_device
from phyai.dispatch.errors import FrozenChoiceError, NoKernelError, PolicyError
from phyai.dispatch.policy import Policy
from phyai.dispatch.policy_load import load_policy, policy_from_mapping
from phyai.dispatch.selection import Selection
from phyai.dispatch.selector import Selector
from phyai.dispatch.trace import CandidateTrace, RuleTrace, SelectionTrace
from phyai.dispatch.types import DeviceProfile, KernelMode, KernelQuery, ModelContext

__all__ = [
    "BenchInputs",
    "CallSite",
    "CandidateTrace",
    "Catalog",
    "DeviceProfile",
    "FrozenChoiceError",
    "KernelConfig",
    "KernelMode",
    "KernelQuery",
    "ModelContext",
    "NoKernelError",
    "Policy",
    "PolicyError",
    "RuleTrace",
    "Selection",
    "SelectionTrace",
    "Selector",
    "UnknownKernelError",
    "UnknownOperationError",
    "backend_preference",
    "build_catalog",
    "current_mode",
    "explain",
    "freeze_kernel_choices",
    "get_kernel_selector",
    "initialize_kernel_system",
    "kernel_mode_scope",
    "kernel_selector_scope",
    "live_call_sites",
    "live_inputs",
    "load_policy",
    "param_dtypes",
    "policy_from_mapping",
    "probe_device",
    "reset_kernel_selector",
    "resolve_policy",
    "select",
    "set_kernel_selector",
    "unfreeze_kernel_choices",
]
