"""The engine contract, the same for both engines; vLLM runs the real model, one engine for all tests."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from pipelines.engines import Engine, build_engine
from pipelines.errors import EngineDead, ErrorKind, RowError
from pipelines.model import model_folder
from pipelines.rows import Answer, Outcome, Request
from tests.integration.conftest import MAX_MODEL_LEN, MAX_TOKENS, engine_config

SAMPLING = engine_config("vllm").sampling


@pytest.fixture(params=["echo", "vllm"])
def engine(request: pytest.FixtureRequest) -> Engine:
    if request.param == "echo":
        return build_engine(engine_config("echo"), folder="", revision=None, device="cpu")
    loaded: Engine = request.getfixturevalue("vllm_engine")
    return loaded


def chat(text: str, key: str = "k") -> Request:
    return request([{"role": "user", "content": text}], key)


def request(messages: list[dict[str, Any]], key: str = "k") -> Request:
    return Request(key, messages, SAMPLING)


def text_request(text: str) -> Request:
    return Request("text", text, SAMPLING)


def ask(engine: Engine, *prompts: str) -> list[Outcome]:
    prepared = [engine.prepare(chat(prompt, f"k{i}")) for i, prompt in enumerate(prompts)]
    return engine.submit(prepared).outcomes(300)


def answers(outcomes: list[Outcome]) -> list[Answer]:
    assert all(isinstance(outcome, Answer) for outcome in outcomes), outcomes
    return [outcome for outcome in outcomes if isinstance(outcome, Answer)]


def test_answers_come_in_the_order_of_the_requests_and_are_the_same_again(engine: Engine) -> None:
    prompts = [f"Repeat the number {n}." for n in range(12)]
    first = [one.completions[0].text for one in answers(ask(engine, *prompts))]
    assert len(set(first)) == 12
    assert first == [one.completions[0].text for one in answers(ask(engine, *prompts))]


def test_token_counts_reasons_and_times_hold_together(engine: Engine) -> None:
    for one in answers(ask(engine, *["What is the capital of France?", "Tell me a long story about the sea. " * 4] * 3)):
        (completion,) = one.completions
        assert completion.finish_reason == ("length" if completion.num_output_tokens == MAX_TOKENS else "stop")
        assert 0 < completion.num_output_tokens <= MAX_TOKENS
        assert 0 <= one.num_cached_tokens <= one.num_prompt_tokens
        assert 0 <= one.queue_s <= one.ttft_s + 1e-3
        assert one.generation_s >= 0


def test_an_engine_that_decodes_moves_on_with_every_token(engine: Engine) -> None:
    before = engine.num_steps()
    (answer,) = answers(ask(engine, "Tell me a long story about the sea."))
    assert engine.num_steps() - before >= answer.completions[0].num_output_tokens > 1


def test_the_shares_of_all_answers_add_up_to_the_busy_time(engine: Engine) -> None:
    before, generated = engine.clock.busy_s(), engine.work().num_generated_tokens
    found = answers(ask(engine, *["Count to ten.", "Hello!", "Name a colour."] * 5))
    shares = [(one.engine_time.prefill_s, one.engine_time.decode_s) for one in found]
    assert sum(prefill_s + decode_s for prefill_s, decode_s in shares) == pytest.approx(engine.clock.busy_s() - before)
    assert all(prefill_s > 0 and decode_s > 0 for prefill_s, decode_s in shares)
    assert engine.work().num_generated_tokens - generated == sum(one.completions[0].num_output_tokens for one in found)


def test_more_requests_than_run_at_once_take_turns_and_each_second_is_charged_once(engine: Engine) -> None:
    before_s, before_request_s = engine.clock.busy_s(), engine.clock.request_s()
    found = answers(ask(engine, *[f"Tell me about the number {n}." for n in range(40)]))
    busy_s, request_s = engine.clock.busy_s() - before_s, engine.clock.request_s() - before_request_s
    assert sum(one.engine_time.prefill_s + one.engine_time.decode_s for one in found) == pytest.approx(busy_s)
    most = engine.describe()["max_num_seqs"]
    assert 0.5 * min(most, 40) < request_s / busy_s <= min(most, 40)


def test_a_prompt_that_is_too_long_fails_alone_and_names_the_limit(engine: Engine) -> None:
    with pytest.raises(RowError) as failure:
        engine.prepare(chat("word " * 2000))
    assert failure.value.kind == ErrorKind.PROMPT_TOO_LONG
    assert str(MAX_MODEL_LEN) in failure.value.message
    assert answers(ask(engine, "Are you still there?"))


def test_the_longest_prompt_that_fits_gives_one_token(engine: Engine) -> None:
    longest: Any = None
    for words in range(MAX_MODEL_LEN, 0, -1):
        try:
            longest = engine.prepare(text_request("yes " * words))
        except RowError as error:
            assert error.kind == ErrorKind.PROMPT_TOO_LONG
            continue
        break
    (one,) = answers(engine.submit([longest]).outcomes(300))
    assert one.num_prompt_tokens == MAX_MODEL_LEN - 1
    assert (one.completions[0].num_output_tokens, one.completions[0].finish_reason) == (1, "length")


def test_batches_from_many_threads_all_come_back(engine: Engine) -> None:
    prepared = [[engine.prepare(chat(f"Say {n}.", f"{n}-{i}")) for i in range(n)] for n in range(6)]
    with ThreadPoolExecutor(6) as pool:
        tickets = list(pool.map(engine.submit, prepared))
    assert [len(ticket.outcomes(300)) for ticket in tickets] == list(range(6))
    assert all(ticket.admitted.done() for ticket in tickets)


def test_an_engine_describes_what_it_resolved(engine: Engine) -> None:
    assert engine.describe()["max_model_len"] == MAX_MODEL_LEN
    assert engine.describe()["max_num_seqs"] >= 8


def test_the_real_model_knows_the_capital_of_france(vllm_engine: Engine) -> None:
    (one,) = answers(ask(vllm_engine, "What is the capital of France?"))
    assert "Paris" in one.completions[0].text


def test_token_counts_are_the_tokenizers(vllm_engine: Engine) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model_folder(engine_config("vllm").model))
    prompts = ["What is the capital of France?", "Quelle est la couleur du ciel par beau temps ?", "🥐" * 5]
    for prompt, one in zip(prompts, answers(ask(vllm_engine, *prompts)), strict=True):
        text = tokenizer.apply_chat_template([{"role": "user", "content": prompt}], add_generation_prompt=True, tokenize=False)
        assert one.num_prompt_tokens == len(tokenizer(text, add_special_tokens=False)["input_ids"])
    (raw,) = answers(vllm_engine.submit([vllm_engine.prepare(text_request("Once upon a time"))]).outcomes(300))
    assert raw.num_prompt_tokens == len(tokenizer("Once upon a time")["input_ids"])


@pytest.mark.parametrize(
    "messages",
    [
        [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}]}],
        [{"role": "user", "content": [{"type": "nonsense"}]}],
        [{"role": "user", "content": [7]}],
    ],
)
def test_messages_that_the_model_cannot_take_fail_alone(vllm_engine: Engine, messages: list[dict[str, Any]]) -> None:
    with pytest.raises(RowError):
        vllm_engine.prepare(request(messages))
    assert answers(ask(vllm_engine, "Hello!"))


def end_with(engine: Any, reason: str) -> Callable[[], list[Any]]:
    """A step of the engine whose requests end for another reason than they did."""
    step = engine._engine.step

    def stepped() -> list[Any]:
        outputs: list[Any] = step()
        for one in [one for output in outputs for one in output.outputs]:
            one.finish_reason = reason
        return outputs

    return stepped


def test_a_request_that_vllm_gives_up_is_no_answer(vllm_engine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(vllm_engine._engine, "step", end_with(vllm_engine, "error"))
        (outcome,) = ask(vllm_engine, "Hello!")
    assert isinstance(outcome, RowError)
    assert outcome.kind == ErrorKind.ENGINE_ERROR
    assert answers(ask(vllm_engine, "Hello!"))


@pytest.mark.kills_the_engine
def test_requests_that_a_dying_vllm_aborts_are_no_answers_and_every_batch_hears_of_it(
    vllm_engine: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    prepared = [vllm_engine.prepare(chat("Hello!"))]
    monkeypatch.setattr(vllm_engine._engine, "step", end_with(vllm_engine, "abort"))
    for ticket in [vllm_engine.submit(prepared) for _ in range(3)]:
        with pytest.raises(EngineDead, match="vLLM aborted the requests that it held"):
            ticket.outcomes(60)
    with pytest.raises(EngineDead):
        vllm_engine.submit(prepared).outcomes(60)
