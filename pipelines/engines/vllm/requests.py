"""From our requests to vLLM's: rendered, tokenised, cut where the settings allow it, with verified parameters."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from pipelines.config import FORMS, PromptConfig, SamplingConfig
from pipelines.errors import ConfigError, ErrorKind, RowError
from pipelines.rows import Request
from pipelines.truncate import truncate

if TYPE_CHECKING:
    from vllm import PoolingParams, SamplingParams
    from vllm.renderers import ChatParams
    from vllm.v1.engine.llm_engine import LLMEngine

Prompt = str | list[dict[str, Any]]
Parse = Callable[[str, Sequence[int]], tuple[str | None, str, str | None]]
"""From an answer's text and tokens to its reasoning, its content and its tool calls as JSON text."""


@dataclass(frozen=True, slots=True)
class Prepared:
    """A request as vLLM takes it."""

    key: str
    rendered: Any
    params: "SamplingParams | PoolingParams"
    num_truncated_tokens: int
    parse: Parse | None
    """Splits reasoning and tool calls from an answer."""


class Requests:
    """Makes requests ready, in one thread. Raises ConfigError where vLLM refuses the run's own parameters."""

    def __init__(self, engine: "LLMEngine", prompt: PromptConfig, sampling: SamplingConfig, parser: Any | None):
        self._engine = engine
        self._model = engine.vllm_config.model_config
        self._prompt = prompt
        self._parser = parser
        self.embeds: bool = self._model.runner_type == "pooling"
        if prompt.too_long != "fail" and not getattr(engine.get_tokenizer(), "is_fast", False):
            raise ConfigError(f"prompt.too_long={prompt.too_long} needs a fast tokenizer, which this model lacks; set fail")
        # Counting the tokens is ours: vLLM's renderer would stop at its limit, where we cut or name the number.
        renderer = engine.renderer
        self._text_params = replace(renderer.default_cmpl_tok_params, max_total_tokens=None)
        self._chat_params = replace(renderer.default_chat_tok_params, max_total_tokens=None)
        self._sampling = sampling
        try:
            self._run_params = self._params_of(sampling)
        except RowError as error:
            raise ConfigError(f"vLLM refuses sampling.*: {error.message}") from None
        if prompt.kind == "chat":
            self._check_template()

    def _check_template(self) -> None:
        """Refuse a model without a chat template, or with a broken one, once and not for every row."""
        try:
            self._render(Request("probe", [{"role": "user", "content": "Hello!"}], self._sampling))
        except RowError as error:
            raise ConfigError(
                f"{error.message}; set prompt=raw to hand the model the text as it is, or name a prompt.chat_template_file"
            ) from None

    def prepare(self, request: Request) -> Prepared:
        """Apply the chat template, tokenise and verify; raises RowError."""
        if request.embeds and not self.embeds:
            raise RowError(
                ErrorKind.INVALID_REQUEST,
                "the row asks for an embedding, and this model answers; engine.kwargs.runner=pooling loads one that embeds",
            )
        params = self._run_params if request.sampling is self._sampling else self._params_of(request.sampling)
        parse = None
        if self._parser is not None and not isinstance(request.prompt, str) and not self.embeds:
            skip_special_tokens, parse = self._parser.for_request(request)
            if not skip_special_tokens:
                params = params.clone()
                params.skip_special_tokens = False
        rendered, num_truncated_tokens = self._fit(request)
        return Prepared(request.key, rendered, params, num_truncated_tokens, parse)

    def _fit(self, request: Request) -> tuple[Any, int]:
        """Render the prompt, cut to the limit where the settings say so; returns how many tokens were cut, too."""
        rendered = self._render(request)
        num_tokens = len(rendered["prompt_token_ids"])
        if num_tokens == 0:
            raise RowError(ErrorKind.EMPTY_PROMPT, "the prompt has no tokens")
        limit, setting = self._limit(request.sampling)
        if num_tokens <= limit:
            return rendered, 0
        if self._prompt.too_long == "fail" or limit < 1:
            raise RowError(ErrorKind.PROMPT_TOO_LONG, f"the prompt has {num_tokens} tokens; {setting} allows {max(limit, 0)}")

        def count(prompt: Prompt) -> int:
            return len(self._render(request, prompt)["prompt_token_ids"])

        prompt, num_removed = truncate(request.prompt, self._prompt.too_long, limit=limit, spans=self._spans, count=count)
        return self._render(request, prompt), num_removed

    def _limit(self, sampling: SamplingConfig) -> tuple[int, str]:
        """The most tokens of a prompt, and the setting that says so; what is cut leaves room for the whole answer."""
        most = self._model.max_model_len
        answer = 0 if self.embeds else 1 if self._prompt.too_long == "fail" else sampling.max_tokens
        if self._prompt.max_tokens is not None and self._prompt.max_tokens < most - answer:
            return self._prompt.max_tokens, f"prompt.max_tokens={self._prompt.max_tokens}"
        return most - answer, f"model.max_model_len={most}"

    def _render(self, request: Request, prompt: Prompt | None = None) -> Any:
        from vllm.exceptions import VLLMClientError

        renderer = self._engine.renderer
        prompt = request.prompt if prompt is None else prompt
        try:
            if isinstance(prompt, str):
                (rendered,) = renderer.render_cmpl([{"prompt": prompt}], self._text_params)
            else:
                _, (rendered,) = renderer.render_chat([prompt], self._template_params(request), self._chat_params)
        except VLLMClientError as error:
            raise row_error(error, request.sampling) from None
        except MemoryError:
            raise
        except Exception as error:  # noqa: BLE001 - templates and vLLM's parsers raise anything, asserts included, over one row
            kind, what = ErrorKind.INVALID_MESSAGES, "the chat template cannot take the messages"
            if isinstance(prompt, str):
                kind, what = ErrorKind.INVALID_TEXT, "the tokenizer cannot take the text"
            raise RowError(kind, f"{what}: {type(error).__name__}: {error}") from None
        return rendered

    def _template_params(self, request: Request) -> "ChatParams":
        from vllm.renderers import ChatParams

        variables: dict[str, Any] = {"add_generation_prompt": True, "tokenize": False, **self._prompt.chat_template_kwargs}
        if request.tools is not None:
            variables["tools"] = request.tools
        return ChatParams(
            chat_template=self._prompt.chat_template, chat_template_kwargs={**variables, **request.chat_template_kwargs}
        )

    def _spans(self, text: str) -> Sequence[tuple[int, int]]:
        """Where each token of a text begins and ends, in characters."""
        encoding = self._engine.get_tokenizer()(text, add_special_tokens=False, return_offsets_mapping=True)
        spans: Sequence[tuple[int, int]] = encoding["offset_mapping"]
        return spans

    def _params_of(self, sampling: SamplingConfig) -> "SamplingParams | PoolingParams":
        """vLLM's parameters, verified here and not only in the engine's thread; raises RowError."""
        from vllm import PoolingParams
        from vllm.exceptions import VLLMClientError

        if self.embeds:
            return PoolingParams(task="embed")
        try:
            params = _sampling_params(sampling)
            config = self._engine.vllm_config
            params.verify(
                self._model, config.speculative_config, config.structured_outputs_config, self._engine.get_tokenizer()
            )
        except (VLLMClientError, ValueError, TypeError, OverflowError, RuntimeError) as error:  # the last from its C++ and Rust
            raise row_error(error, sampling) from None
        return params


def longest_first(prepared: Sequence[Prepared]) -> list[tuple[int, Prepared]]:
    """A batch is done with its longest answer, so that one starts first; equals keep their order, and a common prefix."""
    return sorted(enumerate(prepared), key=lambda pair: -(getattr(pair[1].params, "max_tokens", None) or 0))


def row_error(error: Exception, sampling: SamplingConfig) -> RowError:
    """What a refusal by vLLM says about the row."""
    parameter = getattr(error, "parameter", None)
    has_form = any(getattr(sampling, name) is not None for name in FORMS)
    if has_form and parameter in (None, "structured_outputs"):  # its checks of schemas and grammars name no parameter
        return RowError(ErrorKind.INVALID_SCHEMA, str(error))
    return RowError(ErrorKind.INVALID_PARAMETER if parameter else ErrorKind.ENGINE_REFUSED, str(error))


def _sampling_params(sampling: SamplingConfig) -> "SamplingParams":
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind, StructuredOutputsParams

    plain = sampling.model_dump(exclude={"stop", "stop_token_ids", "logit_bias", *FORMS})
    form = {
        "json": sampling.json_schema,
        "regex": sampling.regex,
        "choice": None if sampling.choice is None else list(sampling.choice),
        "grammar": sampling.grammar,
    }
    is_bound = any(value is not None for value in form.values())
    bias = sampling.logit_bias
    return SamplingParams(
        **plain,
        stop=list(sampling.stop),
        stop_token_ids=list(sampling.stop_token_ids),
        logit_bias=None if bias is None else {int(token): value for token, value in bias.items()},
        structured_outputs=StructuredOutputsParams(**form) if is_bound else None,
        output_kind=RequestOutputKind.FINAL_ONLY,
    )
