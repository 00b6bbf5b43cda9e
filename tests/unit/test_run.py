"""The identity of a run: what changes it, and how an existing folder is met."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from fsspec.implementations.local import LocalFileSystem

from pipelines.batch import check_settings, open_plan
from pipelines.config import BatchConfig
from pipelines.errors import ConfigError
from pipelines.parts import part_name
from pipelines.run import find_run, fingerprint_of, identity_of, open_run, run_folder
from pipelines.sources import list_sources
from pipelines.storage import Folder

Config = Callable[..., BatchConfig]


@pytest.fixture
def command(jsonl: Callable[..., Path], tmp_path: Path) -> list[str]:
    path = jsonl([{"id": "a", "prompt": "hi"}])
    return ["engine=echo", "input=jsonl", f"input.path={path}", f"output.path={tmp_path / 'run'}"]


def fingerprint(config: BatchConfig) -> str:
    return fingerprint_of(identity_of(config, list_sources(config.input)))


@pytest.mark.parametrize(
    "change",
    [
        ["sampling.max_tokens=5"], ["sampling.temperature=0.5"], ["prompt.system=Short."], ["input.limit=1"],
        ["input.id_column=id"], ["input.carry_columns=[id]"], ["engine.max_model_len=99"],
        ["prompt=raw"], ["input.prompt_column=null", 'prompt.template="{{ prompt }}!"'],
    ],
)  # fmt: skip
def test_what_changes_answers_changes_the_fingerprint(batch_config: Config, command: list[str], change: list[str]) -> None:
    assert fingerprint(batch_config(*command, *change)) != fingerprint(batch_config(*command))


@pytest.mark.parametrize(
    "change",
    [
        "engine.rows_per_batch=3",
        "engine.seconds_per_token=0.1",
        "cluster.workers=4",
        "output.compression=none",
        "pricing=h100",
        "verbose=true",
    ],
)
def test_what_only_changes_speed_or_cost_does_not(batch_config: Config, command: list[str], change: str) -> None:
    assert fingerprint(batch_config(*command, change)) == fingerprint(batch_config(*command))


def test_engine_options_count_only_where_they_change_answers(batch_config: Config, command: list[str]) -> None:
    vllm = [*command, "engine=vllm"]
    same = fingerprint(batch_config(*vllm))
    assert fingerprint(batch_config(*vllm, "engine.kwargs.max_num_seqs=7")) == same
    assert fingerprint(batch_config(*vllm, "engine.kwargs.quantization=fp8")) != same
    assert fingerprint(batch_config(*vllm, "model.dtype=bfloat16")) != same


def test_a_changed_input_file_changes_the_fingerprint(
    batch_config: Config, command: list[str], jsonl: Callable[..., Path]
) -> None:
    before = fingerprint(batch_config(*command))
    jsonl([{"id": "a", "prompt": "another"}])
    assert fingerprint(batch_config(*command)) != before


def test_another_run_in_the_folder_is_refused_with_a_diff(batch_config: Config, command: list[str]) -> None:
    config = batch_config(*command)
    run = open_run(config, list_sources(config.input))
    run.folder.write(part_name(0), b"an answer")
    other = batch_config(*command, "sampling.max_tokens=5", "prompt.system=Short.")
    with pytest.raises(ConfigError) as refusal:
        open_run(other, list_sources(other.input))
    message = str(refusal.value)
    assert "sampling.max_tokens: 128 in the folder, 5 now" in message
    assert 'prompt.system: null in the folder, "Short." now' in message
    assert "output.on_existing=replace" in message


def test_a_changed_input_is_named(batch_config: Config, command: list[str], jsonl: Callable[..., Path]) -> None:
    config = batch_config(*command)
    sources = list_sources(config.input)
    run = open_run(config, sources)
    open_plan(config, sources, run.folder)
    run.folder.write(part_name(0), b"an answer")
    changed = jsonl([{"id": "a", "prompt": "another"}])
    with pytest.raises(ConfigError, match=f"{changed}: changed since the run was planned"):
        open_run(config, list_sources(config.input))


def test_a_first_try_that_answered_nothing_does_not_lock_the_folder(batch_config: Config, command: list[str]) -> None:
    mistyped = batch_config(*command, "sampling.max_tokens=12")
    open_run(mistyped, list_sources(mistyped.input))
    config = batch_config(*command)
    run = open_run(config, list_sources(config.input))
    assert run.is_new
    assert json.loads(run.folder.read("run.json"))["fingerprint"] == run.fingerprint


def test_a_run_counts_in_one_currency(batch_config: Config, command: list[str]) -> None:
    config = batch_config(*command)
    open_run(config, list_sources(config.input))
    with pytest.raises(ConfigError, match=r"pricing\.currency=JPY, but .* counts in USD"):
        open_run(batch_config(*command, "pricing.currency=JPY"), list_sources(config.input))


def test_a_run_inside_its_own_input_is_refused(batch_config: Config, command: list[str], tmp_path: Path) -> None:
    inside = batch_config(*command, f"input.path={tmp_path}", f"output.path={tmp_path / 'runs' / 'one'}")
    with pytest.raises(ConfigError, match=r"lies in input\.path"):
        find_run(inside, list_sources(inside.input))


def test_replacing_a_run_takes_its_success_first_and_its_identity_last(tmp_path: Path) -> None:
    class Interrupted(LocalFileSystem):
        """Stops after two deletions, as a kill would."""

        cachable = False
        left = 2

        def rm(self, path: Any, recursive: bool = False, maxdepth: int | None = None) -> None:
            if self.left == 0:
                raise KeyboardInterrupt
            self.left -= 1
            super().rm(path, recursive, maxdepth)

    folder = Folder(str(tmp_path / "run"))
    for name in ("_SUCCESS", "run.json", "results/part-00000000.parquet", "plan/plan.parquet"):
        folder.write(name, b"x")
    folder.__dict__["_place"] = (Interrupted(), folder.path())
    with pytest.raises(KeyboardInterrupt):
        folder.remove(first="_SUCCESS", last="run.json")
    assert not (tmp_path / "run" / "_SUCCESS").exists()
    assert (tmp_path / "run" / "run.json").exists()


def test_an_existing_run_is_resumed_refused_or_replaced(batch_config: Config, command: list[str], tmp_path: Path) -> None:
    config = batch_config(*command)
    open_run(config, list_sources(config.input))
    created = json.loads((tmp_path / "run" / "run.json").read_text())["created_at_s"]
    open_run(config, list_sources(config.input))
    assert json.loads((tmp_path / "run" / "run.json").read_text())["created_at_s"] == created
    with pytest.raises(ConfigError, match=r"output\.on_existing=refuse"):
        open_run(batch_config(*command, "output.on_existing=refuse"), list_sources(config.input))
    (tmp_path / "run" / "results").mkdir()
    (tmp_path / "run" / "results" / "part-00000000.parquet").write_bytes(b"old")
    open_run(batch_config(*command, "output.on_existing=replace"), list_sources(config.input))
    assert not (tmp_path / "run" / "results").exists()


@pytest.mark.parametrize("on_existing", ["resume", "refuse", "replace"])
def test_a_folder_that_holds_something_else_is_never_touched(
    batch_config: Config, command: list[str], tmp_path: Path, on_existing: str
) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "thesis.txt").write_text("precious")
    config = batch_config(*command, f"output.on_existing={on_existing}")
    with pytest.raises(ConfigError, match=r"holds files but no run\.json"):
        open_run(config, list_sources(config.input))
    assert (tmp_path / "run" / "thesis.txt").read_text() == "precious"


def test_without_a_path_the_folder_follows_from_the_identity(batch_config: Config, command: list[str]) -> None:
    config = batch_config(*command, "output.path=null")
    name = run_folder(config, fingerprint(config)).url
    assert name == f"runs/rows-{fingerprint(config)[:10]}"


def test_a_token_is_no_setting_and_is_not_repeated(batch_config: Config, command: list[str]) -> None:
    config = batch_config(*command, "engine=vllm", "engine.kwargs.hf_token=hf_secret")
    with pytest.raises(ConfigError, match="HF_TOKEN") as refusal:
        check_settings(config)
    assert "hf_secret" not in str(refusal.value)


def test_a_base_model_is_refused_for_conversations_before_anything_is_loaded(
    batch_config: Callable[..., BatchConfig], tmp_path: Path
) -> None:
    (tmp_path / "tokenizer_config.json").write_text("{}")
    with pytest.raises(ConfigError, match=r"has no chat template.*set prompt=raw"):
        check_settings(batch_config(f"model.path={tmp_path}"))
    check_settings(batch_config(f"model.path={tmp_path}", "prompt=raw"))
    (tmp_path / "chat_template.jinja").write_text("{{ messages }}")
    check_settings(batch_config(f"model.path={tmp_path}"))
