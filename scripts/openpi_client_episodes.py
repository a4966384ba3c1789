"""Drive a policy server with the real openpi-client and a simulator on the other end of a pipe.

Runs in an environment of its own, which holds openpi-client and NumPy below 2 and nothing of this
repository. One request per line comes from standard input as JSON: ``{"file": NAME, "task": TEXT,
"seed": N}``, where the npz file holds the arrays of the observation. The answer is a line with the
actions. The first line, before any request, holds the server's metadata and NumPy's version.
"""

import json
import sys

import numpy as np
from openpi_client.websocket_client_policy import (  # pyright: ignore[reportMissingImports]
    WebsocketClientPolicy,
)


def main() -> None:
    """Answer requests until the input ends."""
    policy = WebsocketClientPolicy("127.0.0.1", int(sys.argv[1]))
    print(json.dumps({"metadata": policy.get_server_metadata(), "numpy": np.__version__}))
    sys.stdout.flush()
    for line in sys.stdin:
        asked = json.loads(line)
        arrays = np.load(asked["file"])
        observation = {
            "images": {"base": arrays["base"], "wrist": arrays["wrist"]},
            "observation/state": arrays["state"],
            "prompt": asked["task"],
            "__options__": {"seed": asked["seed"]},
        }
        print(json.dumps({"actions": policy.infer(observation)["actions"].tolist()}))
        sys.stdout.flush()


if __name__ == "__main__":
    main()
