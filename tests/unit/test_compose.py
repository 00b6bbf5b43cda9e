"""One command line gives one mapping of settings: any text survives it, nothing becomes a sweep, the user's files win."""

import json
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import example, given, settings
from hypothesis import strategies as st

from pipelines.compose import compose_settings, conf_folder, to_yaml
from pipelines.errors import ConfigError
from pipelines.parse import parse_config

READABLE = [
    "Answer in one sentence.",
    "/data/2026-11-29/*.parquet",
    "s3://bucket/run-1/x.parquet",
    "2026-11-29",
    "12:30:00",
    "C:\\models\\",
    "user@example.com",
    "100% + 3 $",
]
UNREADABLE = [
    "a=b",
    "/data/dt=2026-11-29/x.parquet",
    "Say {name}",
    "请用一句话回答。",
    "Answer with 🍞 and 👩‍🚀!",
    "it's",
    "[END,</s>]",
    "<|im_start|>",
    "Answer briefly.<|im_end|>",
    "s3://b/[x]/*.parquet",
    "${oc.env:HOME",
    'say "yes"',
    "a,",
    """it's "both" kinds""",
    'ends with a backslash and a quote\\"',
    "two\nlines\n",
    "trailing backslash and newline\\\n",
    "a\tb: #1 ~ (c)",
    "{a: b",
    "[a, b",
    "key: value, other: [1, 2]",
]
SWEEPS = ["Hello, world", "1,2", "choice(a,b)", "range(1,5)", "interval(0,1)", "glob(*)"]

anything = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"))  # what a command line can hold
awkward = st.text(st.sampled_from("\\${}[]()\"'ab,=:;. \n\t~@+|<>*é🍞"), max_size=12)


def refusal(*overrides: str, config_dir: str | None = None) -> str:
    with pytest.raises(ConfigError) as caught:
        compose_settings("batch", overrides, config_dir)
    return str(caught.value)


def shown_override(message: str) -> str:
    """What the shell makes of the quoted form that a message shows."""
    return shlex.split(message.partition("once for the shell:\n")[2])[0]


def system_prompt(override: str) -> Any:
    return compose_settings("batch", [override])["prompt"]["system"]


def kwargs_of(overrides: Sequence[str]) -> Any:
    """Compose many texts in one go, under the only group that takes any key."""
    return compose_settings("batch", overrides)["engine"]["kwargs"]


def test_a_text_without_hydras_own_marks_arrives_as_it_is() -> None:
    texts = {f"t{number}": text for number, text in enumerate(READABLE)}
    assert kwargs_of([f"engine.kwargs.{key}={text}" for key, text in texts.items()]) == texts


@pytest.mark.parametrize("text", UNREADABLE)
def test_a_text_that_hydra_cannot_read_is_refused(text: str) -> None:
    message = refusal(f"prompt.system={text}")
    assert message.startswith("prompt.system=")
    assert "cannot be read; a text needs quotes" in message


@pytest.mark.parametrize("text", SWEEPS)
def test_nothing_starts_a_sweep(text: str) -> None:
    message = refusal(f"prompt.system={text}")
    assert message.startswith("prompt.system=")
    assert "reads as several values, and a run takes one; a text needs quotes" in message


def test_the_quoted_form_that_an_error_shows_gives_the_text_back() -> None:
    texts = {f"t{number}": text for number, text in enumerate(UNREADABLE + SWEEPS)}
    overrides = [shown_override(refusal(f"engine.kwargs.{key}={text}")) for key, text in texts.items()]
    assert kwargs_of(overrides) == texts


@settings(max_examples=8)
@given(st.lists(anything | awkward, min_size=40, max_size=60))
@example(['"', "\\", '\\"', "\\\\", "\\\n", "${", "\\${a}", "\\\\${a}\\", "$", "'", '"\'"', "", " ", "???,"])
def test_the_quoted_form_gives_any_text_back(texts: list[str]) -> None:
    expected, overrides = {}, []
    for number, text in enumerate(texts):
        # The second override is no override: where the first one can be read, the error is about the second.
        message = refusal(f"engine.kwargs.t{number}={text}", "stop here")
        is_quoted_already = text.strip()[:1] in {'"', "'"} and text.strip()[:1] == text.strip()[-1:]
        if "once for the shell:" in message and not is_quoted_already:
            expected[f"t{number}"] = text
            overrides.append(shown_override(message))
    assert kwargs_of(overrides) == expected


def test_a_list_is_shown_quoted_as_a_text_and_as_a_list_of_texts() -> None:
    _, text, as_list = refusal("sampling.stop=[END, </s>,<|im_end|>]").splitlines()
    assert shlex.split(text) == ['sampling.stop="[END, </s>,<|im_end|>]"']
    override = shlex.split(as_list)[0]
    assert compose_settings("batch", [override])["sampling"]["stop"] == ["END", "</s>", "<|im_end|>"]


def test_a_backslash_and_an_n_stay_two_characters_and_a_line_end_is_one() -> None:
    stops = compose_settings("batch", ["sampling.stop=['\\n','\n']"])["sampling"]["stop"]
    assert stops == ["\\n", "\n"]


JSON_SCHEMA = {
    "type": "object",
    "properties": {"b": {"type": "string", "pattern": "^[a-z]+, [a-z]+$"}, "a": {"enum": ["it's", "a=b", 1, None, True]}},
    "required": ["b", "a"],
}


def test_a_schema_may_stand_on_the_command_line_as_a_mapping() -> None:
    b, a = "{type: string, pattern: '^[a-z]+, [a-z]+$'}", r"{enum: ['it\'s','a=b',1,null,true]}"
    override = f"sampling.json_schema={{type: object, properties: {{b: {b}, a: {a}}}, required: [b,a]}}"
    assert parse_config(compose_settings("batch", [override])).sampling.json_schema == json.dumps(JSON_SCHEMA)


def test_a_schema_as_json_is_shown_quoted_since_its_quotes_are_not_hydras() -> None:
    override = shown_override(refusal(f"sampling.json_schema={json.dumps(JSON_SCHEMA)}"))
    assert parse_config(compose_settings("batch", [override])).sampling.json_schema == json.dumps(JSON_SCHEMA)


def test_a_template_that_needs_quotes_is_better_put_into_a_file() -> None:
    assert "prompt.template_file=my_prompt.txt" in refusal("prompt.template={{ a }}, {{ b }}")
    assert "prompt.template_file" not in refusal("prompt.system=Hello, world")


def test_a_text_in_quotes_whose_dollar_has_no_backslash_is_shown_with_one() -> None:
    message = refusal('prompt.system="Pay ${ now"')
    assert shown_override(message) == 'prompt.system="Pay \\${ now"'
    assert system_prompt(shown_override(message)) == "Pay ${ now"


@pytest.mark.parametrize(("text", "reason"), [
    ("${no.such.key}", "Interpolation key 'no.such.key' not found"),
    ("${oc.env:FOURNEE_NOT_SET}", "Environment variable 'FOURNEE_NOT_SET' not found"),
    ("Pay ${amount:5}", "Unsupported interpolation type amount"),
])  # fmt: skip
def test_an_interpolation_that_leads_nowhere_names_its_key_and_shows_the_form_for_a_text(text: str, reason: str) -> None:
    message = refusal(f"prompt.system={text}")
    assert message.startswith(f"prompt.system: {reason}; a text needs quotes")
    assert system_prompt(shown_override(message)) == text


def test_an_interpolation_takes_the_other_settings_value() -> None:
    assert system_prompt("prompt.system=You are ${model.name}.") == "You are smollm2."


@pytest.mark.parametrize("words", [
    ["brief"], ["input.limit"], ["--dryrun"], ["=5"], ["+"], [""], ["~"], ["input.limit 5"], ["input..limit=5"], ["/model=x"],
    ["engine@other=echo"], ["größe=5"], ["prompt.system=Be", "brief."],
])  # fmt: skip
def test_a_word_that_is_no_override_is_named(words: list[str]) -> None:
    assert f'"{words[-1]}" is not an override; write key=value' in refusal(*words)


def test_bytes_that_are_no_text_are_refused() -> None:
    assert refusal("prompt.system=caf\udce9") == 'prompt.system="caf\\udce9" is not UTF-8 text'


def test_hydras_own_escapes_still_work() -> None:
    overrides = [r"engine.kwargs.a=Pay \${amount}", r"engine.kwargs.b=Hello\, world", "engine.kwargs.c='Hello, world'"]
    assert kwargs_of(overrides) == {"a": "Pay ${amount}", "b": "Hello, world", "c": "Hello, world"}


def test_later_overrides_win() -> None:
    assert compose_settings("batch", ["input.limit=5", "input.limit=7"])["input"]["limit"] == 7


def test_a_mapping_is_merged_into_the_group() -> None:
    model = compose_settings("batch", ["model={name: mine, path: ./mine}"])["model"]
    assert (model["name"], model["path"], model["dtype"]) == ("mine", "./mine", "float32")


def test_the_shipped_files_are_there() -> None:
    assert (conf_folder() / "batch.yaml").is_file()


def test_settings_shown_as_yaml_read_back_the_same(tmp_path: Path) -> None:
    composed = compose_settings(
        "batch", ["prompt.system='12'", "sampling.stop=['null','</s>']", "engine.kwargs={a: [1, null]}"]
    )
    (tmp_path / "batch.yaml").write_text(to_yaml(composed), encoding="utf-8")
    assert compose_settings("batch", [], str(tmp_path)) == composed


@pytest.fixture
def own(tmp_path: Path) -> Path:
    """A folder for `--config-dir`, laid out like the shipped one, in a place whose name needs care."""
    folder = tmp_path / "my conf, it's $[x]=é"
    for group in ("model", "prompt", "experiment"):
        (folder / group).mkdir(parents=True)
    return folder


def test_a_choice_of_the_users_own_is_found_beside_the_shipped_ones(own: Path) -> None:
    (own / "model" / "mine.yaml").write_text("name: mine\npath: ./mine\n")
    settings = compose_settings("batch", ["model=mine", "engine=echo"], str(own))
    assert (settings["model"], settings["engine"]["kind"]) == ({"name": "mine", "path": "./mine"}, "echo")


def test_the_users_file_comes_before_a_shipped_one_of_the_same_name(own: Path) -> None:
    (own / "model" / "smollm2.yaml").write_text("name: mine\npath: ./mine\n")
    assert compose_settings("batch", [], str(own))["model"] == {"name": "mine", "path": "./mine"}


@pytest.mark.parametrize(("job", "setting"), [("serve", "port"), ("estimate", "sample_rows")])
def test_an_experiment_may_set_what_one_job_alone_has(own: Path, job: str, setting: str) -> None:
    (own / "experiment" / "mine.yaml").write_text(f"# @package _global_\n{job}:\n  {setting}: 7\n")
    assert compose_settings(job, ["experiment=mine"], str(own))[job][setting] == 7
    assert compose_settings(job, ["experiment=mine", f"{job}.{setting}=8"], str(own))[job][setting] == 8


def test_an_experiment_changes_settings_and_choices_and_the_command_line_wins(own: Path) -> None:
    (own / "experiment" / "nightly.yaml").write_text(
        "# @package _global_\n# fournee batch --config-dir conf experiment=nightly\n"
        "defaults:\n  - override /engine: echo\nsampling:\n  max_tokens: 7\n  top_k: 8\n"
    )
    config = parse_config(compose_settings("batch", ["experiment=nightly", "sampling.top_k=9"], str(own)))
    assert (config.engine.kind, config.sampling.max_tokens, config.sampling.top_k) == ("echo", 7, 9)


def test_texts_that_need_quotes_on_the_command_line_need_none_in_a_file(own: Path) -> None:
    texts = [text for text in READABLE + UNREADABLE + SWEEPS if "${" not in text]
    content = yaml.safe_dump({"sampling": {"stop": texts}}, allow_unicode=True)
    (own / "experiment" / "texts.yaml").write_text(f"# @package _global_\n{content}", encoding="utf-8")
    assert compose_settings("batch", ["experiment=texts"], str(own))["sampling"]["stop"] == texts


def test_a_schema_may_be_written_as_yaml(own: Path) -> None:
    content = yaml.safe_dump({"sampling": {"json_schema": JSON_SCHEMA}}, sort_keys=False)
    (own / "experiment" / "schema.yaml").write_text(f"# @package _global_\n{content}")
    config = parse_config(compose_settings("batch", ["experiment=schema"], str(own)))
    assert config.sampling.json_schema == json.dumps(JSON_SCHEMA)


def test_a_config_dir_that_is_missing_is_refused(tmp_path: Path) -> None:
    missing = tmp_path / "no_such"
    assert refusal(config_dir=str(missing)) == f"--config-dir={missing} is not a folder"


def test_a_misspelt_choice_is_compared_with_the_users_own(own: Path) -> None:
    (own / "model" / "teapot.yaml").write_text("name: teapot\n")
    assert refusal("model=taepot", config_dir=str(own)) == "model=taepot: there is no such file; did you mean teapot?"


def test_a_misspelt_key_in_the_users_yaml_is_named(own: Path) -> None:
    (own / "experiment" / "typo.yaml").write_text("# @package _global_\nsampling:\n  max_token: 9\n")
    with pytest.raises(ConfigError, match=r"sampling\.max_token is not a setting; did you mean max_tokens\?"):
        parse_config(compose_settings("batch", ["experiment=typo"], str(own)))


def test_a_setting_that_the_users_yaml_leaves_out_is_named(own: Path) -> None:
    (own / "prompt" / "short.yaml").write_text("kind: chat\nsystem: null\ntemplate: null\ntemplate_file: null\n")
    with pytest.raises(ConfigError, match=r"prompt\.chat_template_kwargs is not set; .* or set it in your own YAML"):
        parse_config(compose_settings("batch", ["prompt=short"], str(own)))


@pytest.mark.parametrize(("content", "fragments"), [
    (b"name: [a\n", ["broken.yaml", "line 2"]),
    (b"name: a\nname: b\n", ["found duplicate key name", "broken.yaml"]),
    (b"name: caf\xe9\n", ["a file in --config-dir is not UTF-8 text"]),
    (b"name: ${\n", ["a YAML file in --config-dir cannot be read", r"is written \${"]),
    (b"name: ${no.such}\n", ["model.name: Interpolation key 'no.such' not found", r"is written \${"]),
    (b"- a\n- b\n", ['model=["a", "b"] must be a group of settings']),
])  # fmt: skip
def test_broken_yaml_of_the_users_own_is_refused_on_one_line(own: Path, content: bytes, fragments: list[str]) -> None:
    (own / "model" / "broken.yaml").write_bytes(content)
    with pytest.raises(ConfigError) as caught:
        parse_config(compose_settings("batch", ["model=broken"], str(own)))
    message = str(caught.value)
    assert "\n" not in message
    for fragment in fragments:
        assert fragment in message


@pytest.mark.parametrize(("content", "fragment"), [
    ("sampling:\n  max_tokens: 9\n", "must begin with the line '# @package _global_'"),
    ("# @package _global_\ndefaults:\n  - override /engine: ecco\n", "engine=ecco: there is no such file; did you mean echo?"),
    ("# @package _global_\ndefaults:\n  - override /engin: echo\n", "In 'experiment/mine': Could not override 'engin'"),
    ("# @package _global_\ndefaults:\n  - /engine: echo\n", "use 'override engine: echo'"),
])  # fmt: skip
def test_an_experiment_that_hydra_cannot_place_is_refused(own: Path, content: str, fragment: str) -> None:
    (own / "experiment" / "mine.yaml").write_text(content)
    message = refusal("experiment=mine", config_dir=str(own))
    assert fragment in message
    assert "\n" not in message


def test_a_misspelt_experiment_is_refused_and_not_passed_over(own: Path) -> None:
    (own / "experiment" / "nightly.yaml").write_text("# @package _global_\n")
    assert refusal("experiment=nigthly", config_dir=str(own)).endswith("did you mean nightly?")


def test_a_setting_without_a_value_becomes_no_part_of_a_text() -> None:
    with pytest.raises(ConfigError, match=r"^run_date is not set"):
        compose_settings("batch", ["output.path='runs/${run_date}'"])
    settings = compose_settings("batch", ["output.path='runs/${run_date}'", "run_date=2026-11-30"])
    assert settings["output"]["path"] == "runs/2026-11-30"
    assert compose_settings("batch", ["output.path=${run_date}"])["output"]["path"] is None
    assert compose_settings("batch", [r"prompt.system='a \${run_date}'"])["prompt"]["system"] == "a ${run_date}"
