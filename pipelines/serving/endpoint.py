"""What the processes of an endpoint must know, checked before any of them starts."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from pipelines.config import EchoEngineConfig, ServeConfig
from pipelines.errors import ConfigError
from pipelines.model import model_digest, pinned_revision
from pipelines.prompt_tokens import tokens_for
from pipelines.serving.keys import Keys
from pipelines.serving.page import page_of
from pipelines.storage import Folder


@dataclass(frozen=True, slots=True)
class Endpoint:
    """An endpoint, as its settings and its surroundings make it."""

    config: ServeConfig
    keys: Keys
    folder: Folder
    """Where files, batches and usage are kept; named by its absolute path in other processes."""
    model_digest: str
    special_tokens: Sequence[str]
    """The tokenizer's own, where `prompt.special_tokens` does something about them."""
    page: str

    @property
    def revision(self) -> str | None:
        """The hub commit to load, where the model comes from the hub."""
        return pinned_revision(self.model_digest)


def endpoint_of(config: ServeConfig, environment: Mapping[str, str]) -> Endpoint:
    """Gather it; raises ConfigError for keys that are missing or wrong, and for settings that only a batch can follow."""
    keys = Keys(config.serve, environment)
    if config.prompt.too_long != "fail":
        raise ConfigError(
            f"prompt.too_long={config.prompt.too_long} cuts rows of a batch; live, prompts that are too long are refused: "
            "set prompt.too_long=fail"
        )
    return Endpoint(
        config=config,
        keys=keys,
        folder=Folder(config.serve.folder, config.output.patience_s),
        model_digest="echo" if isinstance(config.engine, EchoEngineConfig) else model_digest(config.model),
        # Reading the tokenizer takes seconds, which only a policy that does something is worth.
        special_tokens=tokens_for(config).special_tokens if config.prompt.special_tokens in ("escape", "fail") else (),
        page=page_of(config, keys),
    )
