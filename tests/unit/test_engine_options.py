"""The options that vLLM is given: a model's own, and the command's over them."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pipelines import placement
from pipelines.batch import check_settings
from pipelines.config import BatchConfig
from pipelines.errors import ConfigError
from pipelines.placement import cache_block_size, check_room, place
from pipelines.run import fingerprint_of, identity_of
from pipelines.sizing import rows_at_once, sizes_of
from pipelines.sources import list_sources

Config = Callable[..., BatchConfig]
WANTED = "model.engine_kwargs"


@pytest.fixture
def rows(jsonl: Callable[..., Path]) -> list[str]:
    return ["input=jsonl", f"input.path={jsonl([{'id': 'a', 'prompt': 'hi'}])}"]


@pytest.mark.parametrize(
    ("wanted", "chosen", "given"),
    [
        ("{a: 1}", "{b: 2}", {"a": 1, "b": 2}),
        ("{a: 1}", "{a: 2}", {"a": 2}),
        ("{a: {x: 1, y: 2}}", "{a: {x: 3}}", {"a": {"x": 3}}),
        ("{a: 1, b: 2}", "{a: null}", {"b": 2}),
        ("{a: false}", "{a: null}", {}),
        ("{}", "{a: null}", {"a": None}),
        ("{a: null}", "{}", {"a": None}),
        ("{a: null}", "{a: null}", {}),
    ],
)
def test_the_commands_options_go_over_the_models_and_null_takes_one_of_those_away(
    batch_config: Config, wanted: str, chosen: str, given: dict[str, Any]
) -> None:
    assert batch_config(f"{WANTED}={wanted}", f"engine.kwargs={chosen}").engine_kwargs == given


def test_an_engine_without_a_model_has_no_options(batch_config: Config, rows: list[str]) -> None:
    config = batch_config("engine=echo", *rows, f"{WANTED}.enable_prefix_caching=false", "input.order=by_prefix")
    assert config.engine_kwargs == {}
    check_settings(config)


def test_where_an_option_stands_is_no_part_of_a_run(batch_config: Config, rows: list[str]) -> None:
    def fingerprint(*overrides: str) -> str:
        config = batch_config(*rows, *overrides)
        return fingerprint_of(identity_of(config, list_sources(config.input)))

    plain = fingerprint()
    assert fingerprint(f"{WANTED}.quantization=fp8") == fingerprint("engine.kwargs.quantization=fp8") != plain
    assert fingerprint(f"{WANTED}.quantization=awq", "engine.kwargs.quantization=fp8") == fingerprint(
        f"{WANTED}.quantization=fp8"
    )
    assert fingerprint(f"{WANTED}.quantization=fp8", "engine.kwargs.quantization=null") == plain
    assert fingerprint(f"{WANTED}.max_num_seqs=8") == plain


def test_runs_from_before_models_had_options_keep_their_fingerprint(batch_config: Config, rows: list[str]) -> None:
    config = batch_config(*rows)
    identity = identity_of(config, list_sources(config.input))
    assert set(identity["model"]) == {
        "dtype", "max_model_len", "trust_remote_code", "reasoning_parser", "tool_call_parser", "digest",
    }  # fmt: skip
    assert identity["engine"] == {"kind": "vllm", "kwargs": {}}


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ([f"{WANTED}.quantisation=fp8"], rf"{WANTED}\.quantisation is not an option .* did you mean quantization"),
        ([f"{WANTED}.dtype=half"], rf"{WANTED}\.dtype is set by model\.dtype"),
        ([f"{WANTED}.a=1", "engine.kwargs.a=2"], r"engine\.kwargs\.a is not an option"),
        ([f"{WANTED}.seed=1", "engine.kwargs.sed=2"], r"engine\.kwargs\.sed is not an option"),
    ],
)
def test_a_wrong_option_is_named_where_it_stands(batch_config: Config, overrides: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        check_settings(batch_config(*overrides))


def test_the_size_of_a_worker_and_of_its_engine_follow_the_models_options(
    batch_config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(placement, "installed_versions", lambda names: {})  # as on a machine with the GPU build of vLLM
    options = ["tensor_parallel_size=4", "pipeline_parallel_size=2", "block_size=256", "max_num_seqs=8"]
    config = batch_config(*(f"{WANTED}.{option}" for option in options), "engine.kwargs.pipeline_parallel_size=1")
    found = place(config, {"CPU": 8.0, "GPU": 2.0})
    assert (found.num_accelerators, cache_block_size(config), rows_at_once(config, "gpu")) == (4, 256, 128)
    assert sizes_of(config, {"max_num_seqs": 8}, "16", None)["max_num_seqs"] == "8 (the settings)"
    with pytest.raises(ConfigError) as refusal:
        check_room(config, found, [{"CPU": 8.0, "GPU": 2.0}], can_grow=False)
    assert str(refusal.value).endswith(f"lower {WANTED}.tensor_parallel_size or engine.kwargs.pipeline_parallel_size")
