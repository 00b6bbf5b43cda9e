"""Usage telemetry of what this project stands on: off in each of our processes, unless an environment variable says otherwise.

docs/security.md says who would be told what, and how to turn it on.
"""

import os

TELEMETRY_OFF = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_DISABLE_TELEMETRY": "1",
}
"""What Ray, vLLM and the hub's client read, and what keeps them silent."""


def switch_off() -> None:
    """Set what is not set. It comes before all other imports: the hub's client looks once, when it is imported."""
    for name, value in TELEMETRY_OFF.items():
        os.environ.setdefault(name, value)
