"""What the real model is asked for and what comes back: forms, several answers, probabilities, tools, cut prompts, seeds."""

import json
import math
from dataclasses import replace
from typing import Any

import pytest

from pipelines.engines import Engine
from pipelines.engines.vllm.answers import AnswerParser
from pipelines.engines.vllm.requests import Requests
from pipelines.errors import ConfigError, ErrorKind, RowError
from pipelines.parameters import merge
from pipelines.rows import Answer, Completion, Request
from pipelines.structured import parsed_of
from tests.integration.conftest import MAX_MODEL_LEN, engine_config

CONFIG = engine_config("vllm")
PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 5}, "adult": {"type": "boolean"}},
    "required": ["name", "adult"],
    "additionalProperties": False,
}
TOOLS = [{"type": "function", "function": {"name": "get_weather", "parameters": {"type": "object", "properties": {}}}}]


def request(text: str, **parameters: Any) -> Request:
    return Request("k", [{"role": "user", "content": text}], merge(CONFIG.sampling, parameters, "sampling"))


def answer(engine: Engine, *asked: Request) -> list[Answer]:
    outcomes = engine.submit([engine.prepare(one) for one in asked]).outcomes(300)
    assert all(isinstance(outcome, Answer) for outcome in outcomes), outcomes
    return [outcome for outcome in outcomes if isinstance(outcome, Answer)]


def first(answers: list[Answer]) -> Completion:
    return answers[0].completions[0]


def test_the_answer_has_the_form_that_was_asked_for(vllm_engine: Engine) -> None:
    person, choice, pattern, grammar = (
        request("Describe a person as JSON.", json_schema=json.dumps(PERSON), max_tokens=80),
        request("Is the sky blue?", choice=["yes", "no"]),
        request("What year is it?", regex=r"in \d{4}!"),
        request("Is the sky blue?", grammar='root ::= "perhaps" | "surely"'),
    )
    answers = answer(vllm_engine, person, choice, pattern, grammar)
    texts = [one.completions[0].text for one in answers]
    parsed = parsed_of(person.sampling, texts[0], answers[0].completions[0].finish_reason)
    assert parsed is not None and set(json.loads(parsed)) == {"name", "adult"}
    assert texts[1] in ("yes", "no")
    assert parsed_of(pattern.sampling, texts[2], "stop") is None  # it matches
    assert texts[3] in ("perhaps", "surely")


def test_forms_that_cannot_be_fail_alone_and_the_next_row_is_answered(vllm_engine: Engine) -> None:
    """The order of a public report: valid, broken in every way, valid again."""
    good = request("Describe a person as JSON.", json_schema=json.dumps(PERSON), max_tokens=80)
    assert first(answer(vllm_engine, good)).text
    bad: list[dict[str, Any]] = [
        {"json_schema": '{"type": "nonsense"}'},
        {"json_schema": '{"type": "string", "pattern": "("}'},
        {"regex": "(("},
        {"grammar": "root ::= ("},
    ]
    for parameters in bad:
        with pytest.raises(RowError) as failure:
            vllm_engine.prepare(request("x", **parameters))
        assert failure.value.kind == ErrorKind.INVALID_SCHEMA, parameters
    with pytest.raises(RowError) as failure:
        vllm_engine.prepare(request("x", logit_bias={"999999": 1.0}))
    assert failure.value.kind == ErrorKind.INVALID_PARAMETER
    assert first(answer(vllm_engine, good)).text


def test_several_answers_probabilities_and_stop_texts_come_back_typed(vllm_engine: Engine) -> None:
    two, likely, stopped = answer(
        vllm_engine,
        request("Name a colour.", n=2, temperature=0.9, seed=3, max_tokens=4),
        request("Say hello.", logprobs=2, prompt_logprobs=1, max_tokens=3),
        request("Count: 1, 2, 3, 4, 5, 6", stop=["4"], max_tokens=24),
    )
    assert len(two.completions) == 2
    places = likely.completions[0].logprobs
    assert places is not None and len(places) == likely.completions[0].num_output_tokens
    assert all(len(place) >= 2 and place[0]["logprob"] <= 0 and place[0]["rank"] == 1 for place in places)
    assert likely.prompt_logprobs is not None and len(likely.prompt_logprobs) == likely.num_prompt_tokens
    assert likely.prompt_logprobs[0] == [] and all(likely.prompt_logprobs[1:])
    assert stopped.completions[0].stop_reason in ("4", None)
    assert "4" not in stopped.completions[0].text


def test_under_a_form_what_is_impossible_has_a_log_probability_of_minus_infinity(vllm_engine: Engine) -> None:
    (one,) = answer(vllm_engine, request("Is the sky blue?", choice=["yes"], logprobs=5))
    found = [candidate["logprob"] for place in one.completions[0].logprobs or [] for candidate in place]
    assert found and all(math.isfinite(value) or value == -math.inf for value in found)


def test_the_same_seed_draws_the_same_answer_whatever_runs_beside_it(vllm_engine: Engine) -> None:
    asked = request("Write one word.", temperature=1.5, seed=11, max_tokens=8)
    alone = first(answer(vllm_engine, asked)).text
    crowd = [request(f"Tell me about {n}.", temperature=1.0, max_tokens=8) for n in range(4)]
    assert answer(vllm_engine, *crowd, asked)[-1].completions[0].text == alone


@pytest.mark.parametrize("how", ["truncate_left", "truncate_middle", "truncate_right"])
def test_a_prompt_that_is_too_long_is_cut_to_what_leaves_room_for_the_answer(vllm_engine: Any, how: str) -> None:
    prompt = CONFIG.prompt.model_copy(update={"too_long": how})
    cutting = Requests(vllm_engine._engine, prompt, CONFIG.sampling, None)
    limit = MAX_MODEL_LEN - CONFIG.sampling.max_tokens
    words = " ".join(f"w{n}" for n in range(1000))
    asked = Request("k", [{"role": "user", "content": f"FIRST {words} LAST"}], CONFIG.sampling)
    prepared = cutting.prepare(asked)
    num_tokens = len(prepared.rendered["prompt_token_ids"])
    assert limit - 3 <= num_tokens <= limit
    text = vllm_engine._engine.get_tokenizer().decode(prepared.rendered["prompt_token_ids"])
    assert ("FIRST" in text, "LAST" in text) == (how != "truncate_left", how != "truncate_right")
    assert text.rstrip().endswith("assistant")  # the template is whole
    assert prepared.num_truncated_tokens > 1000
    short = cutting.prepare(Request("k", [{"role": "user", "content": "hi"}], CONFIG.sampling))
    assert short.num_truncated_tokens == 0
    (outcome,) = vllm_engine.submit([prepared]).outcomes(300)
    assert outcome.num_truncated_tokens == prepared.num_truncated_tokens


def test_reasoning_and_tool_calls_are_split_from_the_answer_by_vllms_parsers(vllm_engine: Any) -> None:
    tokenizer = vllm_engine._engine.get_tokenizer()

    def parser_of(**names: str) -> AnswerParser:
        parser = AnswerParser.of(CONFIG.model.model_copy(update=names), tokenizer)
        assert parser is not None
        return parser

    with pytest.raises(ConfigError, match=r"model\.reasoning_parser=nonsense"):
        parser_of(reasoning_parser="nonsense")
    _, parse = parser_of(reasoning_parser="granite").for_request(request("Why?"))
    thought = "Here is my thought process: two and two. Here is my response: Four."
    reasoning, content, calls = parse(thought, tokenizer.encode(thought))
    assert ((reasoning or "").strip(), content.strip(), calls) == ("two and two.", "Four.", None)

    parser = parser_of(tool_call_parser="hermes")
    _, parse = parser.for_request(replace(request("Weather?"), tools=TOOLS))
    said = 'Let me look.<tool_call>\n{"name": "get_weather", "arguments": {"city": "Lyon"}}\n</tool_call>'
    reasoning, content, calls = parse(said, tokenizer.encode(said))
    assert (reasoning, content.strip()) == (None, "Let me look.")
    (call,) = json.loads(calls or "[]")
    assert (call["type"], call["function"]["name"]) == ("function", "get_weather")
    assert json.loads(call["function"]["arguments"]) == {"city": "Lyon"}
    _, parse = parser.for_request(request("Weather?"))
    assert parse(said, tokenizer.encode(said)) == (None, said, None)  # nobody offered a tool


def test_tools_reach_the_template_the_tokenizers_own_tokens_are_known_and_embeddings_are_refused(vllm_engine: Engine) -> None:
    assert {"<|im_start|>", "<|im_end|>"} <= set(vllm_engine.special_tokens)
    with pytest.raises(RowError) as failure:
        vllm_engine.prepare(replace(request("hi"), embeds=True))
    assert failure.value.kind == ErrorKind.INVALID_REQUEST
    own = {"chat_template": "{% for tool in tools or [] %}{{ tool.function.name }}{% endfor %}: {{ messages[0].content }}"}
    requests = Requests(vllm_engine._engine, CONFIG.prompt.model_copy(update=own), CONFIG.sampling, None)  # type: ignore[attr-defined]
    prepared = requests.prepare(replace(request("hi"), tools=TOOLS))
    assert prepared.rendered["prompt"] == "get_weather: hi"


def test_a_chat_template_that_cannot_render_is_refused_once_and_not_for_every_row(vllm_engine: Any) -> None:
    broken = CONFIG.prompt.model_copy(update={"chat_template": "{{ raise_exception('no chats here') }}"})
    with pytest.raises(ConfigError, match=r"no chats here.*set prompt=raw"):
        Requests(vllm_engine._engine, broken, CONFIG.sampling, None)
