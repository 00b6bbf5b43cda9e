"""The engine contract, the same for both engines; vLLM runs the real model, one engine for all tests."""

import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from pipelines.compose import compose_settings
from pipelines.config import BatchConfig
from pipelines.engines import Engine, build_engine
from pipelines.errors import EngineDead, ErrorKind, RowError
from pipelines.model import model_folder
from pipelines.parse import parse_config
from pipelines.rows import Answer, Outcome, Request

MAX_MODEL_LEN = 256
MAX_TOKENS = 24


def config_of(engine: str) -> BatchConfig:
    own = [f"engine.max_model_len={MAX_MODEL_LEN}"] if engine == "echo" else ["engine.kwargs.max_num_seqs=8"]
    return parse_config(
        compose_settings(
            "batch", [f"engine={engine}", f"model.max_model_len={MAX_MODEL_LEN}", f"sampling.max_tokens={MAX_TOKENS}", *own]
        )
    )


@pytest.fixture(scope="module")
def vllm_engine() -> Iterator[Engine]:
    """The real engine in this process, as a worker on CPUs runs it."""
    environment = {
        "HF_HUB_OFFLINE": "1",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_NUM_OF_RESERVED_CPU": "0",
        "VLLM_LOGGING_LEVEL": "ERROR",
    }
    before = {key: os.environ.get(key) for key in environment}
    os.environ.update(environment)
    config = config_of("vllm")
    yield build_engine(config, folder=model_folder(config.model), revision=None, device="cpu")
    for key, value in before.items():
        os.environ.pop(key) if value is None else os.environ.update({key: value})


@pytest.fixture(params=["echo", "vllm"])
def engine(request: pytest.FixtureRequest) -> Engine:
    if request.param == "echo":
        return build_engine(config_of("echo"), folder="", revision=None, device="cpu")
    loaded: Engine = request.getfixturevalue("vllm_engine")
    return loaded


def chat(text: str, key: str = "k") -> Request:
    return Request(key, [{"role": "user", "content": text}])


def ask(engine: Engine, *prompts: str) -> list[Outcome]:
    prepared = [engine.prepare(chat(prompt, f"k{i}")) for i, prompt in enumerate(prompts)]
    return engine.submit(prepared).answered.result(timeout=300)


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


def test_the_shares_of_all_answers_add_up_to_the_busy_time(engine: Engine) -> None:
    before = engine.busy_s()
    shares = sum(one.engine_s for one in answers(ask(engine, *["Count to ten.", "Hello!", "Name a colour."] * 5)))
    assert shares == pytest.approx(engine.busy_s() - before, rel=0.05, abs=1e-3)


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
            longest = engine.prepare(Request("long", "yes " * words))
        except RowError as error:
            assert error.kind == ErrorKind.PROMPT_TOO_LONG
            continue
        break
    (one,) = answers(engine.submit([longest]).answered.result(timeout=300))
    assert one.num_prompt_tokens == MAX_MODEL_LEN - 1
    assert (one.completions[0].num_output_tokens, one.completions[0].finish_reason) == (1, "length")


def test_batches_from_many_threads_all_come_back(engine: Engine) -> None:
    prepared = [[engine.prepare(chat(f"Say {n}.", f"{n}-{i}")) for i in range(n)] for n in range(6)]
    with ThreadPoolExecutor(6) as pool:
        tickets = list(pool.map(engine.submit, prepared))
    assert [len(ticket.answered.result(timeout=300)) for ticket in tickets] == list(range(6))
    assert all(ticket.admitted.done() for ticket in tickets)


def test_an_engine_describes_what_it_resolved(engine: Engine) -> None:
    assert engine.describe()["max_model_len"] == MAX_MODEL_LEN
    assert engine.describe()["max_num_seqs"] >= 8


def test_the_real_model_knows_the_capital_of_france(vllm_engine: Engine) -> None:
    (one,) = answers(ask(vllm_engine, "What is the capital of France?"))
    assert "Paris" in one.completions[0].text


def test_token_counts_are_the_tokenizers(vllm_engine: Engine) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model_folder(config_of("vllm").model))
    prompts = ["What is the capital of France?", "Quelle est la couleur du ciel par beau temps ?", "🥐" * 5]
    for prompt, one in zip(prompts, answers(ask(vllm_engine, *prompts)), strict=True):
        text = tokenizer.apply_chat_template([{"role": "user", "content": prompt}], add_generation_prompt=True, tokenize=False)
        assert one.num_prompt_tokens == len(tokenizer(text, add_special_tokens=False)["input_ids"])
    (raw,) = answers(vllm_engine.submit([vllm_engine.prepare(Request("raw", "Once upon a time"))]).answered.result(timeout=300))
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
        vllm_engine.prepare(Request("bad", messages))
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


def test_requests_that_a_dying_vllm_aborts_are_no_answers_and_every_batch_hears_of_it(
    vllm_engine: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last test here: nothing answers after it."""
    prepared = [vllm_engine.prepare(chat("Hello!"))]
    monkeypatch.setattr(vllm_engine._engine, "step", end_with(vllm_engine, "abort"))
    for ticket in [vllm_engine.submit(prepared) for _ in range(3)]:
        with pytest.raises(EngineDead, match="vLLM aborted the requests that it held"):
            ticket.answered.result(timeout=60)
    with pytest.raises(EngineDead):
        vllm_engine.submit(prepared).answered.result(timeout=60)
