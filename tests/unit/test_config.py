"""A wrong setting ends the job before anything starts, with a line that names the key, the value and the way out."""

import re
from collections.abc import Sequence
from pathlib import Path

import pytest
from pydantic import ValidationError

from pipelines.compose import compose_settings
from pipelines.config import BatchConfig, EchoEngineConfig, RegexStep, SqlInput, VllmEngineConfig
from pipelines.errors import ConfigError
from pipelines.parse import parse_config

JARGON = re.compile(
    r"pydantic|hydra\.cc|https?://|OmegaConf|omegaconf|Lexer|full_key|function-after|tuple\[|constrained|None|True|False"
)
MAX_LINE = 300  # characters; the names of all models are one line

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
    "model={a: 1}": "model.a is not a setting; "
    "there are: dtype, engine_kwargs, max_model_len, name, path, reasoning_parser, revision, tool_call_parser, "
    "trust_remote_code",
    "prompt.str=1": "prompt.str is not a setting; "
    "there are: chat_template, chat_template_file, chat_template_kwargs, kind, max_tokens, special_tokens, system, template, "
    "template_file, too_long",
    "output.x.y=1": "output.x is not a setting; there are: compression, on_existing, openai, path, patience_s, rows_per_file",
    "engine.vllm=1": "engine.vllm is not a setting; "
    "there are: cpu_kv_cache_gib, cpu_threads, device, kind, kwargs, rows_per_batch",
    "errors.max_failed_row=1": "errors.max_failed_row is not a setting; did you mean max_failed_rows?",
    "model.reasoning_praser=x": "model.reasoning_praser is not a setting; did you mean reasoning_parser?",
    "output.opnai=true": "output.opnai is not a setting; did you mean openai?",
    "postprocess.step=[]": "postprocess.step is not a setting; did you mean steps?",
    "prompt.too_lng=fail": "prompt.too_lng is not a setting; did you mean too_long?",
    "retry_faild=true": "retry_faild is not a setting; did you mean retry_failed?",
    "sampling.json_shema=x": "sampling.json_shema is not a setting; did you mean json_schema?",
    "input.delimiter=x": "input.delimiter is not a setting of this input; it belongs to input=csv",
    "input.version=3": "input.version is not a setting of this input; "
    "it belongs to input=delta or input=iceberg or input=lance",
    "engine.max_num_seqs=5": "engine.max_num_seqs is not a setting of this engine; it belongs to engine=echo",
    "foo=1": "foo is not a setting; there are: budget, cluster, dry_run, endpoint, engine, errors, experiment, input, model, "
    "output, postprocess, pricing, progress_interval_s, prompt, retry_failed, run_date, sampling, verbose",
}
WRONG_TYPES = {
    "input.path=12": f"""input.path=12 {QUOTE} 'input.path="..."'""",
    "input.limit=abc": 'input.limit="abc" must be a whole number',
    "input.carry_columns=id": 'input.carry_columns="id" must be a list: input.carry_columns=[...]',
    "input.id_column=[a,b]": 'input.id_column=["a", "b"] must be text',
    "prompt.kind=chatty": """prompt.kind="chatty" must be 'raw' or 'chat'""",
    "prompt.system=12": f"""prompt.system=12 {QUOTE} 'prompt.system="..."'""",
    "prompt.template_file=1e5": f"""prompt.template_file=100000.0 {QUOTE} 'prompt.template_file="..."'""",
    "sampling.temperature=hot": 'sampling.temperature="hot" must be a number',
    "sampling.seed=1.5": "sampling.seed=1.5 must be a whole number",
    "sampling.stop=END": 'sampling.stop="END" must be a list: sampling.stop=[...]',
    "output.on_existing=append": """output.on_existing="append" must be 'resume', 'refuse' or 'replace'""",
    "engine.kwargs=3": "engine.kwargs=3 must be a mapping: {name: value}",
    "model.engine_kwargs=3": "model.engine_kwargs=3 must be a mapping: {name: value}",
    "cluster.workers=true": "cluster.workers=true must be a whole number",
    "dry_run=yes": 'dry_run="yes" must be true or false',
    "endpoint=5": f"""endpoint=5 {QUOTE} 'endpoint="..."'""",
    "input.ids=unique": """input.ids="unique" must be 'allow' or 'require_unique'""",
    "input.request_column=5": f"""input.request_column=5 {QUOTE} 'input.request_column="..."'""",
    "input.order=sorted": """input.order="sorted" must be 'as_is' or 'by_prefix'""",
    "input.on_bad_file=ignore": """input.on_bad_file="ignore" must be 'fail' or 'skip'""",
    "prompt.max_tokens=many": 'prompt.max_tokens="many" must be a whole number',
    "prompt.too_long=cut": """prompt.too_long="cut" must be """
    "'fail', 'truncate_left', 'truncate_middle' or 'truncate_right'",
    "prompt.special_tokens=drop": """prompt.special_tokens="drop" must be 'allow', 'flag', 'escape' or 'fail'""",
    "prompt.chat_template_file=5": f"""prompt.chat_template_file=5 {QUOTE} 'prompt.chat_template_file="..."'""",
    "sampling.logit_bias=[1]": "sampling.logit_bias=[1] must be a mapping: {name: value}",
    "sampling.stop_token_ids=5": "sampling.stop_token_ids=5 must be a list: sampling.stop_token_ids=[...]",
    "sampling.json_schema=[1]": "sampling.json_schema=[1] must be a mapping, or JSON text in quotes",
    "sampling.regex=5": f"""sampling.regex=5 {QUOTE} 'sampling.regex="..."'""",
    "sampling.choice=yes": 'sampling.choice="yes" must be a list: sampling.choice=[...]',
    "sampling.grammar=true": f"""sampling.grammar=true {QUOTE} 'sampling.grammar="..."'""",
    "sampling.prompt_logprobs=few": 'sampling.prompt_logprobs="few" must be a whole number',
    "postprocess.steps=json": 'postprocess.steps="json" must be a list: postprocess.steps=[...]',
    "model.reasoning_parser=5": f"""model.reasoning_parser=5 {QUOTE} 'model.reasoning_parser="..."'""",
    "output.openai=yes": 'output.openai="yes" must be true or false',
    "output.rows_per_file=0": "output.rows_per_file=0 must be greater than 0",
    "errors.max_failed_rows=1.5": "errors.max_failed_rows=1.5 must be a whole number",
    "retry_failed=yes": 'retry_failed="yes" must be true or false',
}
MORE_WRONG_TYPES = {
    "errors=foo": 'errors="foo" must be a group of settings; set its keys one by one',
    "sampling.json_schema={minimum: nan}": 'sampling.json_schema={"minimum": NaN} holds a number that JSON has no name for',
    "sampling.choice=[yes,1]": f"""sampling.choice.1=1 {QUOTE} 'sampling.choice=["..."]'""",
    "model.tool_call_parser=[a]": 'model.tool_call_parser=["a"] must be text',
    "output.compression=gzip": """output.compression="gzip" must be 'zstd', 'snappy' or 'none'""",
    "input.path=null": "input.path=null must be text",
    "input.limit=5.0": "input.limit=5.0 must be a whole number",
    "input.carry_columns=[id,7]": f"""input.carry_columns.1=7 {QUOTE} 'input.carry_columns=["..."]'""",
    "input.id_column=nan": f"""input.id_column=NaN {QUOTE} 'input.id_column="..."'""",
    "prompt.system=true": f"""prompt.system=true {QUOTE} 'prompt.system="..."'""",
    "prompt.template=${postprocess}": 'prompt.template={"steps": []} must be text',
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
    "input.schema_column=": 'input.schema_column="" must not be empty',
    "prompt.max_tokens=0": "prompt.max_tokens=0 must be greater than 0",
    "sampling.stop_token_ids=[-1]": "sampling.stop_token_ids.0=-1 must be greater than or equal to 0",
    "sampling.logit_bias={50256: 200}": "sampling.logit_bias.50256=200 must be less than or equal to 100",
    "sampling.prompt_logprobs=21": "sampling.prompt_logprobs=21 must be less than or equal to 20",
    "sampling.choice=[]": "sampling.choice=[] must not be empty",
    "sampling.regex=": 'sampling.regex="" must not be empty',
    "model.reasoning_parser=": 'model.reasoning_parser="" must not be empty',
    "errors.max_failed_rows=-1": "errors.max_failed_rows=-1 must be greater than or equal to 0",
    "cluster.heartbeat_s=0": "cluster.heartbeat_s=0 must be greater than 0",
    "cluster.workers=0": "cluster.workers=0 must be greater than 0",
    "cluster.worker_restarts=-1": "cluster.worker_restarts=-1 must be greater than or equal to 0",
}
# Steps with one fault each, given together as one list, and the line about each.
KINDS = "regex or json or strip_reasoning or filter or function"
STEPS = {
    "json": '="json" must be a mapping: {name: value}',
    "{kind: xml}": f'.kind="xml" must be {KINDS}',
    "{pattern: x}": f".kind=null must be {KINDS}",
    "{kind: json, take: last}": ".take is not a setting of this kind; it belongs to kind=regex",
    "{kind: json, pattern: x}": ".pattern is not a setting of this kind; it belongs to kind=regex or kind=filter",
    "{kind: json, limit: 5}": ".limit is not a setting; did you mean input.limit?",
    "{kind: regex, pattern: x, take: last, patern: x}": ".patern is not a setting; did you mean pattern?",
    "{kind: regex, pattern: x}": ".take is not set; add {key}.take=... to the command, or set it in your own YAML",
    "{kind: regex, pattern: x, take: middle}": """.take="middle" must be 'first' or 'last'""",
    "{kind: regex, pattern: '(', take: last}": '.pattern="(" is not a regular expression: '
    "missing ), unterminated subpattern at position 0",
    "{kind: regex, pattern: 'a{99999999999}', take: last}": '.pattern="a{99999999999}" is not a regular expression: '
    "the repetition number is too large",
    "{kind: filter, name: a, pattern: '[', words: []}": '.pattern="[" is not a regular expression: '
    "unterminated character set at position 0",
    "{kind: filter, name: a, pattern: null, words: ['']}": '.words.0="" must not be empty',
    "{kind: strip_reasoning, start: '', end: b}": '.start="" must not be empty',
    "{kind: function, function: [f]}": '.function=["f"] must be text',
}
FILTERS = ["{kind: filter, name: no, pattern: null, words: []}", "{kind: filter, name: no, pattern: x, words: [x]}"]

# Commands with a fault that comes alone, and what the message must hold.
# fmt: off
CHOICES = [
    ("engine=vlm", ["engine=vlm: there is no such file; did you mean vllm?"]),
    ("engine=", ["engine=: there is no such file; there are: echo, vllm"]),
    ("input=csvv", ["input=csvv: there is no such file; did you mean csv?"]),
    ("model=null", ["model=null: there is no such file; there are: glm47_fp8"]),
    ("model=[smollm2,12]", ["model=12: there is no such file"]),
    ("experiment=no_such", ["experiment"]),
]
ENGINES = [
    ("engine=echo engine.cpu_threads=4", ["engine.cpu_threads is not a setting of this engine; it belongs to engine=vllm"]),
    ("engine=echo engine.kwargs.seed=1", ["engine.kwargs is not a setting of this engine; it belongs to engine=vllm"]),
    ("engine.kind=echo", ['engine.kind="echo" has the settings of engine=vllm; choose by file: engine=echo']),
    ("engine.kind=foo", ['engine.kind="foo" must be vllm or echo; choose with engine=vllm']),
    ("~engine.kind", ["engine.kind=null must be vllm or echo"]),
]
FORMATS = "parquet or jsonl or csv or files or huggingface or sql or delta or iceberg or lance"
INPUTS = [
    ("input.format=xml", [f'input.format="xml" must be {FORMATS}; choose with input=parquet']),
    ("~input.format", [f"input.format=null must be {FORMATS}"]),
    ("input.format=csv", ['input.format="csv" has the settings of input=parquet or input=jsonl; choose by file: input=csv']),
    ("input=csv input.path=a input.format=jsonl", ["input.delimiter is not a setting of this input; it belongs to input=csv"]),
    ("input=csv input.path=a input.delimitr=x", ["input.delimitr is not a setting; did you mean delimiter?"]),
    ("input=csv input.path=a input.split=x", ["input.split is not a setting of this input; it belongs to input=huggingface"]),
    ("input=csv input.path=a input.delimiter=ab", ['input.delimiter="ab" must be one character']),
    ("input=csv input.path=a input.quote=", ['input.quote="" must not be empty']),
    ("input=csv input.path=a input.encoding=8", ["input.encoding=8 must be text"]),
    ("input=tsv input.path=a input.columns=id", ['input.columns="id" must be a list: input.columns=[...]']),
    ("input=huggingface input.path=[a,b]", ['input.path=["a", "b"] must be text']),
    ("input=huggingface input.path=a input.split=", ['input.split="" must not be empty']),
    ("input=delta input.path=a input.version=-1", ["input.version=-1 must be greater than or equal to 0"]),
    ("input=lance input.path=a input.version=0", ["input.version=0 must be greater than 0"]),
    ("input=iceberg input.table=a.b input.version=latest", ['input.version="latest" must be a whole number']),
    ("input=iceberg input.table=a.b input.catalog=c", ['input.catalog="c" must be a mapping: {name: value}']),
    ("input=iceberg input.table=a.b input.path=c", ["input.path is not a setting of this input; it belongs to input=parquet"]),
    ("input=sql input.query=q", ["input.connection is not set; add input.connection=... to the command"]),
    ("input=sql input.query= input.connection=env:DB", ['input.query="" must not be empty']),
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
        "a row needs a prompt, but input.prompt_column, input.messages_column, input.request_column, prompt.template "
        "are all null; set one of them",
    ]),
    ("input.messages_column=m", [
        'a row has one prompt, but input.prompt_column="prompt" and input.messages_column="m" are set; set all but one to null',
    ]),
    ("input.order=by_prefix engine.kwargs.enable_prefix_caching=false", [
        "input.order=by_prefix has no effect without a prefix cache, but engine.kwargs.enable_prefix_caching=false; "
        "set that to true, or input.order=as_is"
    ]),
    ("input.order=by_prefix model.engine_kwargs.enable_prefix_caching=false", [
        "but model.engine_kwargs.enable_prefix_caching=false; set that to true"
    ]),
    ("input.request_column=r", ['input.prompt_column="prompt" and input.request_column="r" are set']),
    ("prompt.template=x", ['input.prompt_column="prompt" and prompt.template="x" are set; set all but one to null']),
    *((f"input=openai input.path=a input.{column}=c", [f'input.{column}="c" has no effect', "input.request_column", "to null"])
      for column in ("tools_column", "sampling_column", "schema_column")),
    ("input.prompt_column=null prompt.template=", ['prompt.template="" must not be empty']),
    ("prompt.template=x prompt.template_file=t.txt", [
        'prompt.template="x" and prompt.template_file=t.txt are both set', "set one of them to null",
    ]),
    ("prompt.chat_template=x prompt.chat_template_file=t.jinja", [
        'prompt.chat_template="x" and prompt.chat_template_file=t.jinja are both set', "set one of them to null",
    ]),
    ("prompt.template_file=no/such.txt", ["prompt.template_file=no/such.txt cannot be read: No such file or directory"]),
    ("prompt.chat_template_file=no/such", ["prompt.chat_template_file=no/such cannot be read: No such file or directory"]),
    ("prompt=raw prompt.system=x", ['prompt.system="x" needs prompt.kind=chat; set that, or prompt.system=null']),
    ("prompt=raw prompt.chat_template_kwargs.a=1", ['prompt.chat_template_kwargs={"a": 1} needs prompt.kind=chat; set that']),
    ("prompt=raw prompt.chat_template=x", ['prompt.chat_template="x" needs prompt.kind=chat; set that, or']),
    ("prompt=raw input.prompt_column=null input.messages_column=m", [
        'input.messages_column="m" holds conversations and needs prompt.kind=chat',
    ]),
]
SAMPLING_AND_CLUSTER = [
    ("sampling.min_tokens=200", ["sampling.min_tokens=200 is above sampling.max_tokens=128"]),
    ("sampling.n=2", ["sampling.n=2 would give the same answer 2 times; set sampling.temperature above 0"]),
    ("sampling.logit_bias.hello=1", ['sampling.logit_bias={"hello": 1} must have token ids for its keys, such as 50256']),
    ("sampling.logit_bias={-1:1}", ['sampling.logit_bias={"-1": 1} must have token ids for its keys']),
    ("sampling.regex=a sampling.choice=[a]", [
        "an answer has one form, but sampling.regex and sampling.choice are set; set all but one to null",
    ]),
    ("sampling.json_schema=object", ['sampling.json_schema="object" is no JSON schema: Expecting value']),
    ("sampling.json_schema={type:objekt}", ['sampling.json_schema="{', "no JSON schema: at $.type, 'objekt' is not valid"]),
    ("sampling.json_schema={required:id}", ['sampling.json_schema="{', "at $.required, 'id' is not of type 'array'"]),
    ("sampling.choice=[a,a]", ['sampling.choice=["a", "a"]']),
    ("sampling.json_schema={$ref:a.json}", ['sampling.json_schema="{', 'refers to "a.json"', "write it out"]),
    ("cluster.workers=3 cluster.max_workers=2", ["cluster.max_workers=2 is below cluster.workers=3; null keeps workers"]),
    ("cluster.hang_timeout_s=9 cluster.heartbeat_s=5", ["cluster.hang_timeout_s=9", "three times cluster.heartbeat_s=5"]),
    ("hydra.run.dir=out", ["hydra.run.dir=out is a setting of Hydra's own, which has no effect here"]),
]
# fmt: on
COMMANDS = [*CHOICES, *ENGINES, *INPUTS, *NOT_SET, *PROMPTS, *SAMPLING_AND_CLUSTER]


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


def test_every_wrong_step_has_its_line_under_its_number() -> None:
    keys = [f"postprocess.steps.{number}" for number in range(len(STEPS))]
    lines = [key + line.replace("{key}", key) for key, line in zip(keys, STEPS.values(), strict=True)]
    assert refusal(f"postprocess.steps=[{', '.join(STEPS)}]").splitlines() == lines


@pytest.mark.parametrize("step", FILTERS)
def test_a_filter_searches_for_a_pattern_or_for_words(step: str) -> None:
    assert "the filter no takes either pattern or words" in refusal(f"postprocess.steps=[{step}]")


def test_a_step_is_changed_by_its_number() -> None:
    config = parse_config(compose_settings("batch", ["postprocess=last_number", "postprocess.steps.0.take=first"]))
    (step,) = config.postprocess.steps
    assert isinstance(step, RegexStep)
    assert step.take == "first"


@pytest.mark.parametrize("connection", [
    "postgresql://me:hunter2@host/db", "mysql+pymysql://me:hunter/2#?@host:3306/db", "postgresql://host/db?user=me&password=hunter2",
    "mssql+pyodbc:///?odbc_connect=UID%3Dme%3BPWD%3Dhunter2", "snowflake://me@account/db?token=hunter2",
    "postgresql://me:hunter2@[::1/db",
])  # fmt: skip
def test_a_connection_with_a_password_is_refused_without_showing_it(connection: str) -> None:
    message = refusal("input=sql", "input.query=q", f'input.connection="{connection}"')
    assert message.startswith("input.connection holds a password") and message.endswith("set input.connection=env:NAME")
    assert "hunter" not in message


@pytest.mark.parametrize("connection", [
    "env:DATABASE_URL", "sqlite:////data/my:file@home.db", "postgresql+psycopg://me@host:5432/db?sslmode=require",
    "postgresql://me@[::1]:5432/db", "mssql+pyodbc://host/db?driver=ODBC+Driver+18&Trusted_Connection=yes", "duckdb:///a.db",
])  # fmt: skip
def test_a_connection_without_a_password_is_taken_as_it_is(connection: str) -> None:
    source = parse_config(compose_settings("batch", ["input=sql", "input.query=q", f'input.connection="{connection}"'])).input
    assert isinstance(source, SqlInput)
    assert source.connection == connection


def test_rules_between_settings_are_checked_in_every_group_at_once() -> None:
    message = refusal("prompt=raw", "prompt.system=x", "sampling.min_tokens=200", "cluster.workers=3", "cluster.max_workers=2")
    assert [line.partition("=")[0] for line in message.splitlines()] == [
        "prompt.system", "sampling.min_tokens", "cluster.max_workers",
    ]  # fmt: skip


def test_a_long_value_is_shown_in_part() -> None:
    message = refusal(f"sampling.temperature='{'hot ' * 1000}'")
    assert message.startswith('sampling.temperature="hot hot') and len(message) < 120


@pytest.mark.parametrize("name", ["template", "chat_template"])
def test_a_template_file_that_is_not_utf8_is_refused(name: str, tmp_path: Path) -> None:
    path = tmp_path / "latin.txt"
    path.write_bytes("Café: {{ text }}".encode("latin-1"))
    message = refusal(f"prompt.{name}_file={path}")
    assert message == f"prompt.{name}_file={path} is not UTF-8 text (byte 3); save it as UTF-8"


@pytest.mark.parametrize("name", ["template", "chat_template"])
def test_an_empty_template_file_is_refused(name: str, tmp_path: Path) -> None:
    path = tmp_path / "empty.txt"
    path.write_text("")
    assert f'prompt.{name}="" must not be empty' in refusal("input.prompt_column=null", f"prompt.{name}_file={path}")


def test_a_template_file_beside_a_prompt_column_is_named_as_the_user_named_it(tmp_path: Path) -> None:
    path = tmp_path / "t.txt"
    path.write_text("{{ text }}")
    message = refusal(f"prompt.template_file={path}")
    assert 'input.prompt_column="prompt"' in message and "prompt.template_file=" in message


@pytest.mark.parametrize(("name", "more"), [("template", ["input.prompt_column=null"]), ("chat_template", [])])
def test_the_text_of_a_template_file_becomes_the_template(name: str, more: list[str], tmp_path: Path) -> None:
    path = tmp_path / "my prompt.txt"
    path.write_text("Übersetze, bitte: ${x} {{ text }}\n", encoding="utf-8")
    prompt = parse_config(compose_settings("batch", [*more, f"prompt.{name}_file='{path}'"])).prompt
    assert getattr(prompt, name) == "Übersetze, bitte: ${x} {{ text }}\n"


def test_a_chat_template_file_for_a_raw_prompt_is_named_as_the_user_named_it(tmp_path: Path) -> None:
    path = tmp_path / "chat.jinja"
    path.write_text("{{ messages }}")
    message = refusal("prompt=raw", f"prompt.chat_template_file={path}")
    assert message.startswith(f"prompt.chat_template_file={path} needs prompt.kind=chat")
    assert message.endswith("or prompt.chat_template_file=null")


def test_a_schema_may_be_a_mapping_or_json_text_and_its_properties_keep_their_order() -> None:
    text = '{"type": "object", "properties": {"b": {"type": "string"}, "a": {"type": "integer"}}, "required": ["b", "a"]}'
    mapping = "{type: object, properties: {b: {type: string}, a: {type: integer}}, required: [b, a]}"
    schemas = [
        parse_config(compose_settings("batch", [f"sampling.json_schema={schema}"])).sampling.json_schema
        for schema in (f"'{text}'", mapping)
    ]
    assert schemas == [text, text]


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
