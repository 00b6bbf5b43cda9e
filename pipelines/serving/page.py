"""The page at the endpoint's root."""

from pipelines.config import ServeConfig
from pipelines.serving.keys import Keys


def page_of(config: ServeConfig, keys: Keys) -> str:
    """The page."""
    return f"<!doctype html><title>{config.model.name}</title>"
