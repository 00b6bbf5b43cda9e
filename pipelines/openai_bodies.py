"""Write requests as OpenAI's API takes them, with vLLM's additions: what `openai_requests` reads, the other way round."""

import json
from typing import Any

from pipelines.config import SamplingConfig

_FORMS = {"json_schema": "json", "regex": "regex", "choice": "choice", "grammar": "grammar"}
"""The names of vLLM's `structured_outputs`."""
_WRITTEN_APART = {*_FORMS, "logprobs"}


def parameters_body(sampling: SamplingConfig, *, is_chat: bool) -> dict[str, Any]:
    """All sampling parameters as keys of a body; null ones are left out."""
    body: dict[str, Any] = json.loads(sampling.model_dump_json(exclude=_WRITTEN_APART, exclude_none=True))
    forms = {name: getattr(sampling, own) for own, name in _FORMS.items() if getattr(sampling, own) is not None}
    if forms:
        body["structured_outputs"] = {name: list(form) if isinstance(form, tuple) else form for name, form in forms.items()}
    if sampling.logprobs is not None:
        body |= {"logprobs": True, "top_logprobs": sampling.logprobs} if is_chat else {"logprobs": sampling.logprobs}
    return body
