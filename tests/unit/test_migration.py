"""Who comes from elsewhere: our commands on the page answer its rows; theirs are as the installed packages have them."""

import ast
import inspect
import json
import re
import shlex
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any, get_args

import pytest
from openai.resources import Batches, Files
from openai.types import Batch
from openai.types.chat.completion_create_params import CompletionCreateParamsNonStreaming as ChatParams

from pipelines.compose import compose_settings, conf_folder
from pipelines.config import BatchConfig, SamplingConfig, VllmEngineConfig
from pipelines.engines.vllm.options import check_options, engine_options
from pipelines.errors import RowError
from pipelines.openai_requests import Body, body_of
from pipelines.openai_results import write_openai
from pipelines.schema import RESULT
from tests.unit.story import answer, results

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/migration.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```(\w+)\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
PROSE = re.sub(r"^```.*?^```", "", PAGE, flags=re.MULTILINE | re.DOTALL)
QUESTIONS = ["What is 2 + 2?", "How many days has a week?"]

Config = Callable[..., BatchConfig]


def commands(program: str) -> list[list[str]]:
    """The arguments of a program's commands on the page."""
    lines = [line for language, text in BLOCKS if language == "bash" for line in text.replace("\\\n", "").splitlines()]
    return [shlex.split(line.removeprefix(program)) for line in lines if line.startswith(program)]


OURS, RUN_BATCH = commands("fournee batch "), commands("vllm run-batch ")


def snippet(word: str) -> str:
    """The Python on the page that has a word in it."""
    (text,) = (text for language, text in BLOCKS if language == "python" and word in text)
    return str(text)


def codes(text: str) -> list[str]:
    return re.findall(r"`([^`]+)`", text)


def table(head: str) -> list[list[str]]:
    """The rows of the table with that first heading."""
    lines = PROSE.partition(f"\n| {head} |")[2].partition("\n\n")[0].splitlines()
    assert len(lines) > 2, head
    return [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines[2:]]


def theirs(head: str) -> set[str]:
    """What the first column of a table names."""
    return {code.split()[0] for row in table(head) for code in codes(row[0])}


# What is installed, read in its source: importing vLLM takes tens of seconds.


def source(path: str) -> str:
    spec = find_spec(path.partition("/")[0])
    assert spec is not None and spec.origin is not None
    return (Path(spec.origin).parent.parent / path).read_text(encoding="utf-8")


def members(path: str, name: str) -> dict[str, ast.expr | None]:
    """The fields of a class, with their defaults."""
    found = next(node for node in ast.parse(source(path)).body if isinstance(node, ast.ClassDef) and node.name == name)
    return {
        one.target.id: one.value for one in found.body if isinstance(one, ast.AnnAssign) and isinstance(one.target, ast.Name)
    }


def functions(path: str) -> dict[str, set[str]]:
    """All functions of a module, methods too, by name with their parameters."""
    nodes = [node for node in ast.walk(ast.parse(source(path))) if isinstance(node, ast.FunctionDef)]
    return {node.name: {one.arg for one in (*node.args.args, *node.args.kwonlyargs)} - {"self"} for node in nodes}


def calls(text: str) -> dict[str, ast.Call]:
    """The calls of a snippet, by what is called."""
    return {ast.unparse(node.func): node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Call)}


def keywords(call: ast.Call) -> set[str]:
    return {str(one.arg) for one in call.keywords}


RAY = "ray/llm/_internal/batch"
RAY_SETTINGS = {
    **members(f"{RAY}/processor/base.py", "ProcessorConfig"),
    **members(f"{RAY}/processor/base.py", "OfflineProcessorConfig"),
    **members(f"{RAY}/processor/vllm_engine_proc.py", "vLLMEngineProcessorConfig"),
}
RAY_STAGE = f"{RAY}/stages/vllm_engine_stage.py"
SAMPLING = members("vllm/sampling_params.py", "SamplingParams")
LAUNCHER, FRONTEND = "vllm/entrypoints/launchers/run_batch.py", "vllm/entrypoints/launchers/cli_args.py"


# Ours.


@pytest.fixture
def at_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder with the page's files in it."""
    monkeypatch.chdir(tmp_path)
    exec(compile(snippet("write_table"), "page", "exec"), {})
    (lines,) = (text for language, text in BLOCKS if language == "json")
    Path("requests.jsonl").write_text(lines, encoding="utf-8")
    bodies = [json.loads(line)["body"] for line in lines.splitlines()]
    Path("conversations.jsonl").write_text("".join(f"{json.dumps({'messages': one['messages']})}\n" for one in bodies))


@pytest.mark.usefixtures("at_home")
def test_our_commands_answer_the_rows_of_the_page(batch_config: Config, capsys: pytest.CaptureFixture[str]) -> None:
    echo = batch_config("engine=echo").engine
    found: dict[str, list[dict[str, Any]]] = {}
    for words in OURS:
        config = batch_config(*words)
        assert isinstance(config.engine, VllmEngineConfig)
        check_options(config)
        run, plan, _ = answer(config.model_copy(update={"engine": echo}))
        found[str(config.output.path)] = results(run)
        if config.output.openai:
            write_openai(run.folder, plan, config.model.name)
    for rows in found.values():
        answers = [(row["status"], row["text"], row["finish_reason"]) for row in rows]
        assert answers == [("ok", question, "stop") for question in QUESTIONS]
    ids = {name: [row["id"] for row in rows] for name, rows in found.items()}
    expected = {name: ["a", "b"] for name in ("answers", "second", "run", "night")}
    assert ids == {**expected, "chats": ["0", "1"]}  # the last have no id: it is the row's number
    exec(compile(snippet("json.loads"), "page", "exec"), {})
    assert capsys.readouterr().out.splitlines() == [f"a {QUESTIONS[0]}", f"b {QUESTIONS[1]}"]


def named(pattern: str) -> Iterator[tuple[str, str]]:
    """What the prose and the tables name of our groups."""
    groups = "|".join(path.name for path in conf_folder().iterdir() if path.is_dir())
    for code in codes(PROSE):
        yield from re.findall(rf"(?<![\w/.])({groups}|errors|budget){pattern}", code)


def test_every_setting_of_ours_exists() -> None:
    settings, options = compose_settings("batch", ["input=jsonl", "input.path=rows.jsonl"]), engine_options()
    for group, path in named(r"\.(?!jsonl)([a-z_]+(?:\.[a-z_]+)?)"):
        key, _, option = path.partition(".")
        assert key in settings[group], f"{group}.{path}"
        assert not option or option in options, f"{group}.{path}"


def test_every_choice_of_ours_exists() -> None:
    for group, choice in named(r"=(\w+)"):
        assert (conf_folder() / group / f"{choice}.yaml").exists(), f"{group}={choice}"


def test_sections_that_the_page_links_to_exist() -> None:
    for page, section in re.findall(r"\]\(([\w./]*)#([\w-]+)\)", PAGE):
        text = (ROOT / "docs" / page).read_text(encoding="utf-8") if page else PAGE
        headings = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
        assert section in {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


# What a request leaves out.


def test_the_defaults_are_those_of_vllm_and_ours(batch_config: Config) -> None:
    ours = batch_config().sampling
    for name, there, _, here in table("not set"):
        (parameter,) = codes(name)
        default = SAMPLING[parameter]
        assert default is not None
        assert (float(there), float(here.split()[0])) == (ast.literal_eval(default), getattr(ours, parameter))


def test_the_versions_are_the_pinned_ones() -> None:
    project = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    for name, version in re.findall(r"(ray|vLLM) (\d[\d.]+\d)", PROSE.partition("## ")[0]):
        assert re.search(rf"\b{name.lower()}(\[[a-z,]+\])?=={version}\"", project)


def test_vllm_knows_neither_of_the_two_when_it_chooses_its_defaults() -> None:
    options, scheduler = source("vllm/engine/arg_utils.py"), source("vllm/config/scheduler.py")
    assert "UsageContext.LLM_CLASS: 1024" in options and "UsageContext.LLM_CLASS: 16384" in options
    assert "UsageContext.ENGINE_CONTEXT" not in options and "UsageContext.OPENAI_BATCH_RUNNER" not in options
    assert "DEFAULT_MAX_NUM_SEQS: ClassVar[int] = 128" in scheduler
    assert "DEFAULT_MAX_NUM_BATCHED_TOKENS: ClassVar[int] = 2048" in scheduler
    defaults = {name: ast.unparse(value) for name, value in RAY_SETTINGS.items() if value is not None}
    assert defaults["batch_size"].startswith("Field(default=32,") and defaults["max_concurrent_batches"].startswith(
        "Field(default=8,"
    )


# Theirs.


def test_ray_datas_settings_are_all_there() -> None:
    builder = functions("ray/data/llm.py")["build_processor"] - {"config"}
    assert theirs("set in Ray Data") == RAY_SETTINGS.keys() | builder | {"sampling_params"}


def test_ray_datas_columns_are_all_there_and_become_ours() -> None:
    columns = theirs("column in Ray Data")
    assert columns >= members(RAY_STAGE, "vLLMOutputData").keys()
    assert not [column for column in columns if not re.search(rf'"{column}"|^    {column}: ', source(RAY_STAGE), re.MULTILINE)]
    assert {code for row in table("column in Ray Data") for code in codes(row[1])} - {"run.json"} <= set(RESULT.names)


def test_ray_datas_snippet_is_one_that_it_takes() -> None:
    text = snippet("ray.data.llm")
    made = calls(text)
    assert keywords(made["vLLMEngineProcessorConfig"]) <= RAY_SETTINGS.keys()
    assert keywords(made["build_processor"]) <= functions("ray/data/llm.py")["build_processor"]
    assert {"read_parquet", "write_parquet"} <= functions("ray/data/read_api.py").keys() | functions(
        "ray/data/dataset.py"
    ).keys()
    inner = {
        key.value: {one.value for one in value.keys if isinstance(one, ast.Constant)}
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.Dict)
        for key, value in zip(node.keys, node.values, strict=True)
        if isinstance(key, ast.Constant) and isinstance(value, ast.Dict)
    }
    assert inner["sampling_params"] <= SAMPLING.keys()
    (options,) = (one.value for one in made["vLLMEngineProcessorConfig"].keywords if one.arg == "engine_kwargs")
    assert ast.literal_eval(options).keys() <= engine_options()
    assert set(re.findall(r'row\["(\w+)"\]', text)) == {"uid", "question", "generated_text"}


def test_parameters_that_we_lack_are_vllms_and_not_ours() -> None:
    (sentence,) = re.findall(r"`bad_words`.*? are no parameters", PROSE, re.DOTALL)
    assert set(codes(sentence)) <= SAMPLING.keys() - SamplingConfig.model_fields.keys()


def test_run_batch_has_the_options_that_the_page_names() -> None:
    own = members(LAUNCHER, "BatchFrontendArgs").keys()
    flags = {f"--{name.replace('_', '-')}" for name in own | members(FRONTEND, "BaseFrontendArgs").keys()}
    flags |= set(re.findall(r'\["flags"\] = \["(-\w)"\]', source(LAUNCHER)))
    flags |= set(re.findall(r'"(--[a-z-]+)"', source("vllm/engine/arg_utils.py")))
    assert RUN_BATCH and all({word for word in words if word.startswith("-")} <= flags for words in RUN_BATCH)
    assert {f"--{name.replace('_', '-')}" for name in own} <= theirs("option of `vllm run-batch`") <= flags


def test_openais_client_has_the_calls_and_fields_that_the_page_names() -> None:
    real: dict[str, Callable[..., Any]] = {
        "client.files.create": Files.create, "client.files.content": Files.content,
        "client.batches.create": Batches.create, "client.batches.retrieve": Batches.retrieve,
    }  # fmt: skip
    made = calls(snippet("completion_window"))
    for name, call in real.items():
        given = {str(one.arg): one.value for one in made[name].keywords}
        inspect.signature(call).bind(None, *made[name].args, **given)
    settings = set(inspect.signature(Batches.create).parameters) - {"self", "timeout"}
    settings = {name for name in settings if not name.startswith("extra_")}
    names = theirs("OpenAI")
    assert settings <= names <= settings | Batch.model_fields.keys() | {"custom_id", "method", "url", "purpose"}
    assert theirs("`status` there") == set(get_args(Batch.model_fields["status"].annotation))
    assert all(limit in str(Batches.create.__doc__) for limit in ("50,000", "200 MB"))


def test_every_key_of_a_chats_body_has_the_treatment_that_the_page_says() -> None:
    count, ignored, refused = (set(codes(row[0])) - {"auto", "none"} for row in table("keys of a chat's body")[:3])
    assert count | ignored | refused >= ChatParams.__required_keys__ | ChatParams.__optional_keys__
    plain = {"messages": [{"role": "user", "content": "Hi"}]}
    for key in ignored:
        assert body_of({"body": {**plain, key: "x"}}, "body") == Body(plain["messages"]), key
    for key in count | refused:
        try:
            body_of({"body": {**plain, key: "x"}}, "body")
        except RowError as error:
            assert ("is not offered" in error.message or key == "tool_choice") == (key in refused), key
        else:
            assert key in count, key


def test_vllms_own_class_has_what_the_page_names() -> None:
    made = calls(snippet("llm.chat"))
    own = functions("vllm/entrypoints/llm.py")
    others = functions("vllm/entrypoints/pooling/offline.py") | functions("vllm/entrypoints/generate/beam_search/offline.py")
    assert keywords(made["LLM"]) <= own["__init__"] | engine_options()
    assert keywords(made["SamplingParams"]) <= SAMPLING.keys()
    assert theirs("`vllm.LLM`") - {"SamplingParams"} <= {*own, *others} | own["chat"] | own["__init__"] | engine_options()
