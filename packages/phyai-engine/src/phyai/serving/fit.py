"""Whether a policy may take the place of one that clients already know."""

from collections.abc import Mapping
from typing import Any

from phyai.serving.replica import ReplicaError

# A client that is connected has read these; a policy that differs in them would surprise it.
_FIXED = ("action_dim", "action_horizon", "image_keys", "state_dim", "state_keys")


def check_fit(fresh: Mapping[str, Any], served: Mapping[str, Any]) -> None:
    """Refuse metadata of a policy that differ from those of the served one in what clients use.

    Raises:
        ReplicaError: With the first entry that differs.
    """
    for key in _FIXED:
        if fresh.get(key) != served.get(key):
            raise ReplicaError(
                f"the new policy has {key} {fresh.get(key)!r}, the served one "
                f"{served.get(key)!r}; clients rely on it, so start another server"
            )
