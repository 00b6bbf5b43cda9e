"""The models that ship: vLLM itself takes the options that their files give it, and knows their parsers. Loads none of them."""

import argparse
import json
from collections.abc import Iterator, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
from pydantic import TypeAdapter, ValidationError

from pipelines.compose import compose_settings, conf_folder
from pipelines.config import ModelConfig
from pipelines.engines.vllm.answers import AnswerParser
from pipelines.errors import ConfigError
from pipelines.parse import parse_config
from pipelines.rows import Request

NAMES = sorted(path.stem for path in (conf_folder() / "model").glob("*.yaml"))


class Refused(Exception):
    """vLLM would not take an option."""


@pytest.fixture(scope="module")
def arguments() -> argparse.ArgumentParser:
    """The arguments of vLLM's engine, as its own command has them."""
    from vllm.engine.arg_utils import EngineArgs
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    parser: argparse.ArgumentParser = EngineArgs.add_cli_args(FlexibleArgumentParser(exit_on_error=False))
    return parser


def words(options: Mapping[str, Any]) -> Iterator[str]:
    """Options as they are typed."""
    for name, value in options.items():
        flag = name.replace("_", "-")
        match value:
            case bool():
                yield f"--{flag}" if value else f"--no-{flag}"
            case dict() | list():
                yield from (f"--{flag}", json.dumps(value))
            case _:
                yield from (f"--{flag}", str(value))


def check(arguments: argparse.ArgumentParser, options: Mapping[str, Any]) -> None:
    """Have vLLM judge options; raises Refused."""
    from vllm.config import SpeculativeConfig
    from vllm.model_executor.layers.quantization import QUANTIZATION_METHODS

    try:
        parsed = arguments.parse_args(list(words(options)))
    except (SystemExit, argparse.ArgumentError) as error:
        raise Refused(options) from error
    actions = {action.dest: action for action in arguments._actions}
    for name, value in options.items():
        action = actions[name]
        # Where a choice may also be the name of a plug-in, vLLM only shows the choices that it knows itself, or looks later.
        shown = action.metavar if isinstance(action.metavar, list) else None
        known = QUANTIZATION_METHODS if name == "quantization" else action.choices or shown
        if (known and value not in known) or getattr(parsed, name) != value:
            raise Refused(f"{name}={value!r}; vLLM makes {getattr(parsed, name)!r} of it, and knows {known}")
    drafting = options.get("speculative_config") or {}
    types = {field.name: field.type for field in fields(SpeculativeConfig)}
    for name, value in drafting.items():
        try:
            TypeAdapter(types[name]).validate_python(value, strict=True)
        except (KeyError, ValidationError) as error:
            raise Refused(f"speculative_config.{name}={value!r}") from error


def model_of(name: str) -> ModelConfig:
    return parse_config(compose_settings("batch", [f"model={name}"])).model


@pytest.mark.parametrize("name", NAMES)
def test_vllm_takes_the_options_of_every_model_file(arguments: argparse.ArgumentParser, name: str, tmp_path: Path) -> None:
    from vllm.engine.arg_utils import EngineArgs

    model = model_of(name)
    check(arguments, {**model.engine_kwargs, "dtype": model.dtype, "max_model_len": model.max_model_len})
    EngineArgs(**{**model.engine_kwargs, "model": str(tmp_path)})  # what the engine calls; the model itself is not there


@pytest.mark.parametrize(
    "options",
    [
        {"tensor_parallel_size": "four"}, {"tensor_parallel_size": "4"}, {"tensor_parallel_size": 2.5},
        {"enable_expert_parallel": "yes"}, {"gpu_memory_utilization": "most"}, {"max_num_seqs": True},
        {"quantization": "fp9"}, {"kv_cache_dtype": "int3"}, {"runner": "embedding"}, {"tokenizer_mode": "fast"},
        {"speculative_config": {"method": "eagle4", "num_speculative_tokens": 2}},
        {"speculative_config": {"method": "ngram", "num_speculative_tokens": "2"}},
        {"speculative_config": {"method": "ngram", "speculative_tokens": 2}},
        {"speculative_config": "ngram"}, {"no_such_option": 1},
    ],
    ids=str,
)  # fmt: skip
def test_a_wrong_option_would_not_pass(arguments: argparse.ArgumentParser, options: dict[str, Any]) -> None:
    with pytest.raises(Refused):
        check(arguments, options)


@pytest.mark.parametrize("name", NAMES)
def test_vllm_knows_the_parsers_of_every_model_file(name: str) -> None:
    from vllm.reasoning import ReasoningParserManager
    from vllm.tool_parsers import ToolParserManager

    model = model_of(name)
    if model.reasoning_parser is not None:
        assert ReasoningParserManager.get_reasoning_parser(model.reasoning_parser)
    if model.tool_call_parser is not None:
        assert ToolParserManager.get_tool_parser(model.tool_call_parser)
    for change in ({"reasoning_parser": "qwen33"}, {"tool_call_parser": "hermes33"}):
        with pytest.raises(ConfigError, match=next(iter(change.values()))):
            AnswerParser(model.model_copy(update=change), None)


def test_gpt_oss_is_taken_apart_by_the_parser_that_knows_its_whole_format(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its vocabulary comes from the internet, where no test looks; that it is asked for shows who parses."""
    from openai_harmony import HarmonyError

    config = parse_config(compose_settings("batch", ["model=gpt_oss_20b"]))
    _, parse = AnswerParser(config.model, None).for_request(Request("k", [{"role": "user", "content": "Hi!"}], config.sampling))
    monkeypatch.setenv("TIKTOKEN_ENCODINGS_BASE", str(tmp_path))
    with pytest.raises(HarmonyError, match="vocab"):
        parse("Hello.", [1, 2, 3])
