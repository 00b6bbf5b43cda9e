"""Ray's `LLMServer` with the job's model and engine. Importing this imports vLLM."""

import json
import logging
import os
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from http import HTTPStatus
from typing import Any

from pydantic import BaseModel, TypeAdapter, ValidationError
from ray.serve.llm import LLMConfig
from ray.serve.llm.deployment import LLMServer
from ray.serve.llm.openai_api_models import ChatCompletionRequest, CompletionRequest, EmbeddingRequest

from pipelines.config import Device, ServeConfig
from pipelines.model import model_folder
from pipelines.serving.asking import CHAT, EMBEDDINGS, TEXT, Ask
from pipelines.serving.replicas import as_error

logger = logging.getLogger(__name__)

_REQUESTS: dict[str, tuple[Any, str]] = {
    CHAT: (ChatCompletionRequest, "chat"),
    TEXT: (CompletionRequest, "completions"),
    EMBEDDINGS: (EmbeddingRequest, "embeddings"),
}
_EVENT = "data: "
_BACKGROUND = 1  # above 0: vLLM takes the lowest first


class VllmServer:
    """One engine of vLLM, asked with plain values."""

    def __init__(self, server: Any):
        self._server = server

    @classmethod
    async def started(cls, config: ServeConfig, revision: str | None, device: Device) -> "VllmServer":
        """Load the model."""
        server = LLMServer.sync_init(_llm_config(config, revision, device))
        await server.start()
        return cls(server)

    async def answer(self, ask: Ask, *, request_id: str, key: str) -> AsyncGenerator[Sequence[str], None]:
        """Yield JSON texts: one answer, the pieces of a stream, or an error."""
        kind, method = _REQUESTS[ask.endpoint]
        try:
            own_id = {} if ask.endpoint == EMBEDDINGS else {"request_id": request_id}
            priority = {"priority": _BACKGROUND} if ask.is_background and ask.endpoint != EMBEDDINGS else {}
            request = TypeAdapter(kind).validate_python({**ask.body, **own_id, **priority})  # the one for embeddings is several
            async with aclosing(await getattr(self._server, method)(request)) as said:
                async for one in said:
                    yield [_text(text) for text in (one if isinstance(one, list) else [one])]
        except ValidationError as error:
            first = error.errors()[0]
            where = ".".join(map(str, first["loc"]))
            yield [as_error(f"{where}: {first['msg']}" if where else first["msg"], HTTPStatus.BAD_REQUEST)]
        except Exception as error:  # noqa: BLE001 - unpickling vLLM's own kinds would import vLLM in the ingress
            yield [await self._fault(error)]

    async def check_health(self) -> None:
        """End the process where the engine is dead, so that Serve starts another at once.

        The error itself must not get out: the controller would import vLLM to read it, and stood still for 36 s.
        """
        try:
            await self._server.check_health()
        except Exception:
            logger.exception("the engine is dead; this replica ends")
            os._exit(1)

    async def _fault(self, error: Exception) -> str:
        try:
            await self._server.check_health()
        except Exception:  # noqa: BLE001 - whatever it is, the engine is dead
            return as_error("the engine has died, and is replaced; come again later", HTTPStatus.SERVICE_UNAVAILABLE)
        return as_error(f"{type(error).__name__}: {error}", HTTPStatus.INTERNAL_SERVER_ERROR)


def _text(said: Any) -> str:
    if isinstance(said, BaseModel):
        return said.model_dump_json()
    return str(said).removeprefix(_EVENT).strip()


def _llm_config(config: ServeConfig, revision: str | None, device: Device) -> Any:
    model = config.model
    optional = {
        "revision": revision,
        "max_model_len": model.max_model_len,
        "reasoning_parser": model.reasoning_parser,
        "tool_call_parser": model.tool_call_parser,
        "chat_template": config.prompt.chat_template,
    }
    kwargs = {
        "dtype": model.dtype,
        "trust_remote_code": model.trust_remote_code,
        "enable_auto_tool_choice": model.tool_call_parser is not None,
        "generation_config": "vllm",  # the model's own defaults are not the job's
        "override_generation_config": {"max_new_tokens": config.sampling.max_tokens},
        "scheduling_policy": "priority",  # live requests before rows of batches
        "enable_per_request_metrics": True,
        "enable_prompt_tokens_details": True,
        "use_tqdm_on_load": False,
        "enable_mfu_metrics": True,
        **({"enforce_eager": True} if device == "cpu" else {}),
        **{name: value for name, value in optional.items() if value is not None},
        **config.engine_kwargs,
    }
    return LLMConfig(
        model_loading_config={"model_id": model.name, "model_source": model_folder(model)},
        engine_kwargs=json.loads(json.dumps(kwargs)),
        **(
            {"accelerator_config": {"kind": "cpu"}}
            if device == "cpu"
            else {"accelerator_type": config.cluster.accelerator_type}
        ),
    )
