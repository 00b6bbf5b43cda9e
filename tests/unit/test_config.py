"""A wrong setting ends the job before anything starts, with a line that names the key, the value and the way out."""

import re
from collections.abc import Sequence
from pathlib import Path

import pytest
from pydantic import ValidationError

from pipelines.compose import compose_settings
from pipelines.config import BatchConfig, EchoEngineConfig, VllmEngineConfig
from pipelines.errors import ConfigError
from pipelines.parse import parse_config

JARGON = re.compile(
    r"pydantic|hydra\.cc|https?://|OmegaConf|omegaconf|Lexer|full_key|function-after|tuple\[|constrained|None|True|False"
)
MAX_LINE = 240  # characters

# Overrides with one fault each, and the whole line about each. Those of one table are given in one command.
QUOTE = "must be text; quote it, once for Hydra and once for the shell:"
UNKNOWN_KEYS = {
    "inputt.limit=5": "inputt is not a setting; did you mean input?",
    "input.limti=5": "input.limti is not a setting; did you mean limit?",
    "+sampling.temperture=1": "sampling.temperture is not a setting; did you mean temperature?",
    "++prompt.sytem=1": "prompt.sytem is not a setting; did you mean system?",
    "errors.max_failed_fractoin=0.5": "errors.max_failed_fractoin is not a setting; did you mean max_failed_fraction?",
    "progres_interval_s=1": "progres_interval_s is not a setting; did you mean progress_interval_s?",
    "engine.cpu_thread=1": "engine.cpu_thread is not a setting; did you mean cpu_threads?",
    "engin=vllm": "engin is not a setting; did you mean engine?",
    "limit=5": "limit is not a setting; did you mean input.limit?",
    "input.system=x": "input.system is not a setting; did you mean prompt.system?",
    "model.kind=x": "model.kind is not a setting; did you mean engine.kind or prompt.kind?",
    "model={a: 1}": "model.a is not a setting; there are: dtype, max_model_len, name, path, revision, trust_remote_code",
    "prompt.str=1": "prompt.str is not a setting; there are: chat_template_kwargs, kind, system, template, template_file",
    "output.x.y=1": "output.x is not a setting; there are: compression, on_existing, path",
    "engine.vllm=1": "engine.vllm is not a setting; "
    "there are: cpu_kv_cache_gib, cpu_threads, device, kind, kwargs, rows_per_batch",
    "engine.max_num_seqs=5": "engine.max_num_seqs is not a setting of this engine; it belongs to engine=echo",
    "foo=1": "foo is not a setting; there are: cluster, dry_run, engine, errors, input, model, output, pricing, "
    "progress_interval_s, prompt, sampling, verbose",
}
WRONG_TYPES = {
    "input.path=12": f"""input.path=12 {QUOTE} 'input.path="..."'""",
    "input.limit=abc": 'input.limit="abc" must be a whole number',
    "input.carry_columns=id": 'input.carry_columns="id" must be a list: input.carry_columns=[...]',
    "input.format=csv": """input.format="csv" must be 'parquet' or 'jsonl'""",
    "input.id_column=[a,b]": 'input.id_column=["a", "b"] must be text',
    "prompt.kind=chatty": """prompt.kind="chatty" must be 'raw' or 'chat'""",
    "prompt.system=12": f"""prompt.system=12 {QUOTE} 'prompt.system="..."'""",
    "prompt.template_file=1e5": f"""prompt.template_file=100000.0 {QUOTE} 'prompt.template_file="..."'""",
    "sampling.temperature=hot": 'sampling.temperature="hot" must be a number',
    "sampling.seed=1.5": "sampling.seed=1.5 must be a whole number",
    "sampling.stop=END": 'sampling.stop="END" must be a list: sampling.stop=[...]',
    "output.on_existing=append": """output.on_existing="append" must be 'resume', 'refuse' or 'replace'""",
    "engine.kwargs=3": "engine.kwargs=3 must be a mapping: {name: value}",
    "errors=foo": 'errors="foo" must be a group of settings; set its keys one by one',
    "cluster.workers=true": "cluster.workers=true must be a whole number",
    "dry_run=yes": 'dry_run="yes" must be true or false',
}
MORE_WRONG_TYPES = {
    "input.path=null": "input.path=null must be text",
    "input.limit=5.0": "input.limit=5.0 must be a whole number",
    "input.carry_columns=[id,7]": f"""input.carry_columns.1=7 {QUOTE} 'input.carry_columns=["..."]'""",
    "input.id_column=nan": f"""input.id_column=NaN {QUOTE} 'input.id_column="..."'""",
    "prompt.system=true": f"""prompt.system=true {QUOTE} 'prompt.system="..."'""",
    "prompt.template=${errors}": 'prompt.template={"max_failed_fraction": 0.01} must be text',
    "sampling.stop=null": "sampling.stop=null must be a list: sampling.stop=[...]",
    "cluster.workers=null": "cluster.workers=null must be a whole number",
    "dry_run=1": "dry_run=1 must be true or false",
    "engine.cpu_threads.x=5": 'engine.cpu_threads={"x": 5} must be a whole number',
    "engine.rows_per_batch='5'": 'engine.rows_per_batch="5" must be a whole number',
}
OUT_OF_RANGE = {
    "input.path=": 'input.path="" must not be empty',
    "input.limit=0": "input.limit=0 must be greater than 0",
    "sampling.top_p=0": "sampling.top_p=0 must be greater than 0",
    "sampling.min_p=2": "sampling.min_p=2 must be less than or equal to 1",
    "sampling.temperature=2.1": "sampling.temperature=2.1 must be less than or equal to 2",
    "sampling.presence_penalty=nan": "sampling.presence_penalty=NaN must be a finite number",
    "sampling.repetition_penalty=inf": "sampling.repetition_penalty=Infinity must be a finite number",
    "sampling.logprobs=21": "sampling.logprobs=21 must be less than or equal to 20",
    "sampling.stop=['']": 'sampling.stop.0="" must not be empty',
    "errors.max_failed_fraction=5": "errors.max_failed_fraction=5 must be less than or equal to 1",
    "pricing.price_per_accelerator_hour=-1": "pricing.price_per_accelerator_hour=-1 must be greater than or equal to 0",
    "output.path=": 'output.path="" must not be empty',
    "cluster.workers=0": "cluster.workers=0 must be greater than 0",
    "cluster.worker_restarts=-1": "cluster.worker_restarts=-1 must be greater than or equal to 0",
}

# Commands with a fault that comes alone, and what the message must hold.
# fmt: off
CHOICES = [
    ("engine=vlm", ["engine=vlm: there is no such file; did you mean vllm?"]),
    ("engine=", ["engine=: there is no such file; there are: echo, vllm"]),
    ("input=csvv", ["input=csvv: there is no such file; there are: demo, jsonl, parquet"]),
    ("model=null", ["model=null: there is no such file; there are: llama31_8b"]),
    ("model=[smollm2,12]", ["model=12: there is no such file"]),
    ("experiment=no_such", ["experiment"]),
]
ENGINES = [
    ("engine=echo engine.cpu_threads=4", ["engine.cpu_threads is not a setting of this engine; it belongs to engine=vllm"]),
    ("engine=echo engine.kwargs.seed=1", ["engine.kwargs is not a setting of this engine; it belongs to engine=vllm"]),
    ("engine.kind=echo", ['engine.kind="echo" has the settings of engine=vllm', "engine=vllm or engine=echo"]),
    ("engine.kind=foo", ['engine.kind="foo" has the settings of engine=vllm', "engine=vllm or engine=echo"]),
    ("engine.kind=foo engine.more=1", ['engine.kind="foo" must be vllm or echo; choose with engine=vllm']),
    ("~engine.kind", ["engine.kind=null must be vllm or echo"]),
]
NOT_SET = [
    ("input=parquet output=bucket", ["input.path is not set; add input.path=... to the command", "\noutput.path is not set"]),
    ("input=parquet output.path=${input.path}/out", ["input.path is not set; add input.path=..."]),
    ("prompt=template input.prompt_column=null", ["prompt.template_file is not set; add prompt.template_file=..."]),
    ("engine.kwargs.quantization=???", ["engine.kwargs.quantization is not set"]),
    ("~input.path", ["input.path is not set; add input.path=... to the command, or set it in your own YAML"]),
    ("~model", ["model is not set"]),
    ("~input.limit", ["~input.limit: there is no such setting to delete, or it is null"]),
]
PROMPTS = [
    ("input.prompt_column=null", [
        "exactly one of input.prompt_column, input.messages_column and prompt.template",
        "none of them is set; set one",
    ]),
    ("input.messages_column=m", ['input.prompt_column="prompt", input.messages_column="m"', "set all but one to null"]),
    ("prompt.template=x", ['input.prompt_column="prompt", prompt.template="x"', "set all but one to null"]),
    ("input.prompt_column=null prompt.template=", ['prompt.template="" must not be empty']),
    ("prompt.template=x prompt.template_file=t.txt", [
        'prompt.template="x" and prompt.template_file=t.txt are both set', "set one of them to null",
    ]),
    ("prompt.template_file=no/such.txt", ["prompt.template_file=no/such.txt cannot be read: No such file or directory"]),
    ("prompt=raw prompt.system=x", ['prompt.system="x" needs prompt.kind=chat; set that, or prompt.system=null']),
    ("prompt=raw prompt.chat_template_kwargs.a=1", ['prompt.chat_template_kwargs={"a": 1} need prompt.kind=chat']),
    ("prompt=raw input.prompt_column=null input.messages_column=m", [
        'input.messages_column="m" holds conversations and needs prompt.kind=chat',
    ]),
]
SAMPLING_AND_CLUSTER = [
    ("sampling.min_tokens=200", ["sampling.min_tokens=200 is above sampling.max_tokens=128"]),
    ("sampling.n=2", ["sampling.n=2 would give the same answer 2 times; set sampling.temperature above 0"]),
    ("cluster.workers=3 cluster.max_workers=2", ["cluster.max_workers=2 is below cluster.workers=3; null keeps workers"]),
    ("hydra.run.dir=out", ["hydra.run.dir=out is a setting of Hydra's own, which has no effect here"]),
]
# fmt: on
COMMANDS = [*CHOICES, *ENGINES, *NOT_SET, *PROMPTS, *SAMPLING_AND_CLUSTER]


def refusal(*overrides: str) -> str:
    with pytest.raises(ConfigError) as caught:
        parse_config(compose_settings("batch", overrides))
    return str(caught.value)


@pytest.mark.parametrize("faults", [UNKNOWN_KEYS, WRONG_TYPES, MORE_WRONG_TYPES, OUT_OF_RANGE])
def test_every_wrong_setting_of_a_command_has_its_line(faults: dict[str, str]) -> None:
    assert sorted(refusal(*faults).splitlines()) == sorted(faults.values())


@pytest.mark.parametrize(("command", "fragments"), COMMANDS, ids=[command for command, _ in COMMANDS])
def test_a_command_that_cannot_run_is_refused_with_the_way_out(command: str, fragments: Sequence[str]) -> None:
    message = refusal(*command.split())
    for fragment in fragments:
        assert fragment in message
    assert not JARGON.search(message)
    assert all(len(line) <= MAX_LINE for line in message.splitlines())


def test_rules_between_settings_are_checked_in_every_group_at_once() -> None:
    message = refusal("prompt=raw", "prompt.system=x", "sampling.min_tokens=200", "cluster.workers=3", "cluster.max_workers=2")
    assert [line.partition("=")[0] for line in message.splitlines()] == [
        "prompt.system", "sampling.min_tokens", "cluster.max_workers",
    ]  # fmt: skip


def test_a_long_value_is_shown_in_part() -> None:
    message = refusal(f"sampling.temperature='{'hot ' * 1000}'")
    assert message.startswith('sampling.temperature="hot hot') and len(message) < 120


def test_a_template_file_that_is_not_utf8_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "latin.txt"
    path.write_bytes("Café: {{ text }}".encode("latin-1"))
    message = refusal("input.prompt_column=null", f"prompt.template_file={path}")
    assert message == f"prompt.template_file={path} is not UTF-8 text (byte 3); save it as UTF-8"


def test_an_empty_template_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "empty.txt"
    path.write_text("")
    assert 'prompt.template="" must not be empty' in refusal("input.prompt_column=null", f"prompt.template_file={path}")


def test_a_template_file_beside_a_prompt_column_is_named_as_the_user_named_it(tmp_path: Path) -> None:
    path = tmp_path / "t.txt"
    path.write_text("{{ text }}")
    message = refusal(f"prompt.template_file={path}")
    assert 'input.prompt_column="prompt"' in message and "prompt.template_file=" in message


def test_the_text_of_a_template_file_becomes_the_template(tmp_path: Path) -> None:
    path = tmp_path / "my prompt.txt"
    path.write_text("Übersetze, bitte: ${x} {{ text }}\n", encoding="utf-8")
    config = parse_config(compose_settings("batch", ["input.prompt_column=null", f"prompt.template_file='{path}'"]))
    assert config.prompt.template == "Übersetze, bitte: ${x} {{ text }}\n"


def test_a_whole_number_serves_where_a_fraction_is_asked_for() -> None:
    config = parse_config(compose_settings("batch", ["sampling.temperature=1", "pricing.price_per_accelerator_hour=5"]))
    assert config.sampling.temperature == 1.0


def test_null_means_null_and_not_the_word() -> None:
    config = parse_config(compose_settings("batch", ["input.id_column=null", "prompt.system=null"]))
    assert config.input.id_column is None
    assert config.prompt.system is None


def test_the_engines_choice_gives_that_engines_settings() -> None:
    assert isinstance(parse_config(compose_settings("batch", [])).engine, VllmEngineConfig)
    assert isinstance(parse_config(compose_settings("batch", ["engine=echo"])).engine, EchoEngineConfig)


def test_engine_options_may_be_anything_json_can_say() -> None:
    kwargs = "{quantization: fp8, speculative_config: {method: ngram, num_speculative_tokens: 3}, limits: [1, 2.5, null, true]}"
    engine = parse_config(compose_settings("batch", [f"engine.kwargs={kwargs}"])).engine
    assert isinstance(engine, VllmEngineConfig)
    assert engine.kwargs == {
        "quantization": "fp8",
        "speculative_config": {"method": "ngram", "num_speculative_tokens": 3},
        "limits": [1, 2.5, None, True],
    }


@pytest.mark.parametrize("group", BatchConfig.model_fields)
def test_settings_cannot_be_changed_after_parsing(group: str) -> None:
    config = parse_config(compose_settings("batch", []))
    with pytest.raises(ValidationError, match="frozen"):
        setattr(config, group, None)
    inner = getattr(config, group)
    if hasattr(inner, "model_fields_set"):
        with pytest.raises(ValidationError, match="frozen"):
            setattr(inner, next(iter(type(inner).model_fields)), None)
