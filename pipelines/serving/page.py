"""The page at the endpoint's root: the model, its limits, and a form to try a prompt; it says nothing of anybody's requests."""

import json
from html import escape
from pathlib import Path
from string import Template

from pipelines.config import QuotaConfig, ServeConfig
from pipelines.serving.keys import Keys

_PAGE = Path(__file__).with_name("page.html")
POLICY = (
    "default-src 'none'; img-src data:; connect-src 'self'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; "
    "form-action 'none'"
)
"""What a browser lets the page do: talk to this server, and nothing else."""


def page_of(config: ServeConfig, keys: Keys) -> str:
    """Fill the page in."""
    limits = "".join(f"<dt>{escape(name)}</dt><dd>{escape(value)}</dd>" for name, value in _limits(config).items())
    most = config.serve.max_answer_tokens
    return Template(_PAGE.read_text(encoding="utf-8")).substitute(
        model=escape(config.model.name),
        model_json=json.dumps(config.model.name).replace("<", "\\u003c"),
        limits=limits,
        key_note="" if keys.are_needed else "(not needed: none is set)",
        max_tokens=config.sampling.max_tokens if most is None else min(most, config.sampling.max_tokens),
    )


def _limits(config: ServeConfig) -> dict[str, str]:
    """The limits that there are, in words."""
    serve = config.serve
    quota = {name: getattr(serve.quota, name) for name in QuotaConfig.model_fields}
    found = {
        "prompt and answer": config.model.max_model_len and f"{config.model.max_model_len:,} tokens",
        "answer": serve.max_answer_tokens and f"{serve.max_answer_tokens:,} tokens",
        "request": f"{serve.max_body_bytes:,} bytes, {serve.timeout_s:g} s",
        "each key": ", ".join(f"{limit:,} {name.replace('_', ' ')}" for name, limit in quota.items() if limit is not None),
    }
    return {name: text for name, text in found.items() if text}
