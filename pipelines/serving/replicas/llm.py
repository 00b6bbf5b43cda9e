"""Ray's `LLMServer` with the job's model and engine. Importing this imports vLLM."""

import json
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from http import HTTPStatus
from typing import Any

from pydantic import BaseModel, ValidationError
from ray.serve.llm import LLMConfig
from ray.serve.llm.deployment import LLMServer
from ray.serve.llm.openai_api_models import ChatCompletionRequest, CompletionRequest, EmbeddingRequest

from pipelines.config import Device, ServeConfig, VllmEngineConfig
from pipelines.model import model_folder
from pipelines.serving.asking import CHAT, EMBEDDINGS, TEXT, Ask
from pipelines.serving.replicas import as_error

_REQUESTS: dict[str, tuple[Any, str]] = {
    CHAT: (ChatCompletionRequest, "chat"),
    TEXT: (CompletionRequest, "completions"),
    EMBEDDINGS: (EmbeddingRequest, "embeddings"),
}
_EVENT = "data: "


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
            request = kind.model_validate({**ask.body, **own_id})
            async with aclosing(await getattr(self._server, method)(request)) as said:
                async for one in said:
                    yield [_text(text) for text in (one if isinstance(one, list) else [one])]
        except ValidationError as error:
            first = error.errors()[0]
            where = ".".join(map(str, first["loc"]))
            yield [as_error(f"{where}: {first['msg']}" if where else first["msg"], HTTPStatus.BAD_REQUEST)]
        except Exception as error:  # noqa: BLE001 - unpickling vLLM's own kinds would import vLLM in the ingress
            yield [as_error(f"{type(error).__name__}: {error}", await self._status())]

    async def check_health(self) -> None:
        """Raises where the engine is dead."""
        await self._server.check_health()

    async def _status(self) -> int:
        try:
            await self._server.check_health()
        except Exception:  # noqa: BLE001 - whatever it is, the engine is dead
            return HTTPStatus.SERVICE_UNAVAILABLE
        return HTTPStatus.INTERNAL_SERVER_ERROR


def _text(said: Any) -> str:
    if isinstance(said, BaseModel):
        return said.model_dump_json()
    return str(said).removeprefix(_EVENT).strip()


def _llm_config(config: ServeConfig, revision: str | None, device: Device) -> Any:
    engine, model = config.engine, config.model
    assert isinstance(engine, VllmEngineConfig)
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
        "enable_per_request_metrics": True,
        "enable_prompt_tokens_details": True,
        "use_tqdm_on_load": False,
        "enable_mfu_metrics": True,
        **({"enforce_eager": True} if device == "cpu" else {}),
        **{name: value for name, value in optional.items() if value is not None},
        **engine.kwargs,
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
