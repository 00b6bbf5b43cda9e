"""How the model of a batch job is served live."""

from ipaddress import ip_address
from typing import Annotated

from pydantic import Field, NonNegativeFloat, PositiveFloat, PositiveInt

from pipelines.config.strict import Strict, Text


class QuotaConfig(Strict):
    """What one API key may ask for; a key's own line in the keys file can say otherwise."""

    requests_per_minute: PositiveInt | None
    """The most in a minute; null sets no limit, as for the others."""
    tokens_per_minute: PositiveInt | None
    """Of prompts and answers together."""
    requests_at_once: PositiveInt | None
    """Requests that have no answer yet."""


class ServeSettings(Strict):
    """The endpoint. Its replicas are the job's workers: `cluster.workers` of them, up to `cluster.max_workers` under load."""

    host: Text
    """The address to listen at. Any but this machine's own needs API keys."""
    port: Annotated[int, Field(ge=0, le=65535)]
    keys_file: Text | None
    """The file with the hashes of API keys; null takes the keys in the environment variable FOURNEE_API_KEYS."""
    folder: Text
    """Where uploaded files, batches and usage are kept; local or on object storage."""
    max_running: PositiveInt
    """Requests that one replica is handed at a time."""
    target_running: PositiveInt
    """Requests of one replica above which another one is started, where `cluster.max_workers` allows it."""
    max_queued: PositiveInt
    """Requests that may wait for a replica; one more is told to come again later."""
    retry_after_s: PositiveInt
    """When a refused request is told to come again."""
    timeout_s: PositiveFloat
    """How long a request may take."""
    max_body_bytes: PositiveInt
    max_file_bytes: PositiveInt
    """The largest file that may be uploaded for a batch."""
    max_answer_tokens: PositiveInt | None
    """The most tokens that one request may ask for, all of its answers together; null leaves that to the model."""
    quota: QuotaConfig
    usage_interval_s: PositiveFloat
    """How often the usage of keys is written down."""
    idle_s: NonNegativeFloat
    """How long there must have been room in the replicas before rows of batches are sent to them."""
    log_prompts: bool
    """Write prompts into the access log."""

    @property
    def is_public(self) -> bool:
        """Whether other machines can reach it."""
        try:
            return not ip_address(self.host.strip("[]")).is_loopback
        except ValueError:
            return self.host != "localhost"

    @property
    def url(self) -> str:
        """Where this machine reaches it."""
        host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(self.host.strip("[]"), self.host.strip("[]"))
        return f"http://[{host}]:{self.port}" if ":" in host else f"http://{host}:{self.port}"
