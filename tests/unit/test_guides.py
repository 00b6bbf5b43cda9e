"""The guides: none is left out of the index, links lead to headings, and the handbook quotes what the code really says."""

import ast
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
import yaml

from pipelines.config import BatchConfig
from pipelines.errors import ExitCode, RunFailed
from pipelines.history import History
from pipelines.run import find_run
from pipelines.sources import list_sources
from pipelines.summary import finish, read_summary
from tests.unit.story import answer, echo, results

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
HANDBOOK = (ROOT / "docs/failures.md").read_text(encoding="utf-8")
HOLE = "\0"  # what a message fills in; the page writes ...
ENDS_A_JOB = {"ConfigError", "RunFailed", "RoundLost", "TooManyFailures", "Stopped", "EngineDead", "TimeoutError"}
REFUSES_A_SETTING = {"ValueError", "PydanticCustomError"}  # in config/
LEAST_LETTERS = 10  # what has fewer, or no space, says nothing of its own

Config = Callable[..., BatchConfig]
Jsonl = Callable[..., Path]


def test_every_guide_is_in_the_index() -> None:
    index = (ROOT / "docs/README.md").read_text(encoding="utf-8")
    assert not [
        page.name for page in (ROOT / "docs").glob("*.md") if page.name != "README.md" and f"]({page.name})" not in index
    ]


def headings(page: Path) -> set[str]:
    """The anchors of a page, as GitHub makes them."""
    texts = re.findall(r"^#+ (.+)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", text.lower()).replace(" ", "-") for text in texts}


def test_links_lead_to_headings() -> None:
    for page in PAGES:
        for link, anchor in re.findall(r"\]\(([^)#:]*)#([\w-]+)\)", page.read_text(encoding="utf-8")):
            target = page.parent / link if link else page
            assert target.suffix != ".md" or anchor in headings(target), f"{page.name}: {link}#{anchor}"


# The handbook's messages.


class Said(NamedTuple):
    """A text in the code, what is made of it, and where."""

    text: str
    becomes: str
    place: str


def text_of(node: ast.AST) -> str | None:
    match node:
        case ast.Constant(value=str(text)):
            return text
        case ast.JoinedStr(values=values):
            return "".join(text_of(one) or HOLE for one in values)
    return None


def plain(text: str) -> str:
    return re.sub(rf"{HOLE}(?: ?{HOLE})*", HOLE, re.sub(r"%(?:\.\d)?[sdgr]|%\.\df", HOLE, text))


def said_in(path: Path) -> Iterator[Said]:
    place = path.relative_to(ROOT).as_posix()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Call):
            name = ast.unparse(node.func)
            yield from (Said(plain(text), name, place) for text in map(text_of, node.args) if text)
        elif text := text_of(node):
            yield Said(plain(text), "", place)


SAID = [said for folder in ("pipelines", "jobs") for path in (ROOT / folder).rglob("*.py") for said in said_in(path)]


def is_for_users(said: Said) -> bool:
    """Whether it ends a job, refuses a setting, or warns."""
    if sum(map(str.isalpha, said.text)) < LEAST_LETTERS or " " not in said.text:
        return False
    is_setting = said.place.startswith("pipelines/config/") and said.becomes in REFUSES_A_SETTING
    return is_setting or said.becomes in ENDS_A_JOB or said.becomes in ("logger.warning", "logger.error", "logger.exception")


def quoted() -> list[str]:
    """What stands in the first column of the tables of messages."""
    tables = re.findall(r"^\| message \|.*\n\|[-|]+\n((?:\|.*\n)+)", HANDBOOK, re.MULTILINE)
    cells = [line.split(" | ")[0] for table in tables for line in table.splitlines()]
    return [plain(text.replace("...", HOLE)) for cell in cells for text in re.findall(r"`([^`]+)`", cell)]


def test_what_the_handbook_quotes_is_what_the_code_says() -> None:
    texts = {said.text for said in SAID}
    assert len(quoted()) > 100
    assert not [quote.replace(HOLE, "...") for quote in quoted() if not any(quote in text for text in texts)]


def test_every_message_that_ends_a_job_or_warns_is_in_the_handbook() -> None:
    quotes = quoted()
    missing = {f"{said.place}: {said.text.replace(HOLE, '...')}" for said in SAID if is_for_users(said)
               and not any(quote in said.text for quote in quotes)}  # fmt: skip
    assert not missing


def test_every_exit_code_is_in_the_handbook() -> None:
    page = HANDBOOK.partition("## Exit codes")[2].partition("\n## ")[0]
    assert not [code for code in ExitCode if f"| {code.value} | " not in page]


def test_every_alert_has_its_meaning_and_what_to_do() -> None:
    rules = yaml.safe_load((ROOT / "infra/k8s/base/alerts.yaml").read_text(encoding="utf-8"))["spec"]["groups"]
    alerts = {rule["alert"]: rule["labels"]["severity"] for group in rules for rule in group["rules"]}
    lines = re.findall(r"^\| `(\w+)` \| (\w+) \| [^|]+ \| [^|]+ \|$", HANDBOOK.partition("## An alert")[2], re.MULTILINE)
    assert dict(lines) == alerts


# What it says of run folders.


def test_a_run_that_is_moved_goes_on_where_it_is(batch_config: Config, jsonl: Jsonl, tmp_path: Path) -> None:
    path = jsonl([{"id": f"r{i}", "prompt": f"row {i}"} for i in range(40)])
    answer(batch_config(*echo(path, str(tmp_path / "here"))), most_shards=2)
    shutil.move(tmp_path / "here", tmp_path / "there")
    config = batch_config(*echo(path, str(tmp_path / "there")))
    run, plan, lines = answer(config)
    assert (run.attempt, len(lines)) == (2, 2)
    assert finish(run, plan, config).num_ok == 40
    assert sorted(row["id"] for row in results(run)) == sorted(f"r{i}" for i in range(40))


def test_an_unfinished_run_with_a_copied_input_goes_on_only_where_it_began(batch_config: Config, tmp_path: Path) -> None:
    (tmp_path / "rows.csv").write_text("prompt\n" + "a row\n" * 40, encoding="utf-8")
    command = ["engine=echo", "engine.rows_per_batch=10", "input=csv", f"input.path={tmp_path / 'rows.csv'}"]
    answer(batch_config(*command, f"output.path={tmp_path / 'here'}"), most_shards=2)
    shutil.move(tmp_path / "here", tmp_path / "there")
    with pytest.raises(RunFailed, match="cannot be read"):
        answer(batch_config(*command, f"output.path={tmp_path / 'there'}"))
    shutil.move(tmp_path / "there", tmp_path / "here")
    assert len(answer(batch_config(*command, f"output.path={tmp_path / 'here'}"))[2]) == 2


def test_of_an_old_night_its_statistics_are_enough(batch_config: Config, jsonl: Jsonl, tmp_path: Path) -> None:
    config = batch_config(*echo(jsonl([{"id": "a", "prompt": "one row"}]), str(tmp_path / "runs/night")))
    run, plan, _ = answer(config)
    finish(run, plan, config)
    for path in (tmp_path / "runs/night").iterdir():
        if path.name not in ("run.json", "_SUCCESS", "stats"):
            shutil.rmtree(path) if path.is_dir() else path.unlink()
    found = find_run(config, list_sources(config.input))
    assert found.is_finished and not found.is_new
    assert read_summary(found, config).num_ok == 1
    other = batch_config(*echo(tmp_path / "rows.jsonl", str(tmp_path / "runs/night"), "sampling.max_tokens=5"))
    assert find_run(other, list_sources(other.input)).is_new, "whose answers are gone, it takes for a first try"
    assert History(str(tmp_path / "runs")).lines(["date"])["num_rows"].to_pylist() == [1]
