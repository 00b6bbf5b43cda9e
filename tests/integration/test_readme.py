"""Every command in the README: run where this machine can, composed by the real loader where it cannot."""

import json
import os
import re
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path

import pyarrow.dataset as ds
import pytest

from pipelines.compose import compose_settings
from pipelines.parse import parse_config, parse_submit

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```(bash|python)\n(.*?)^```", README, re.MULTILINE | re.DOTALL)
OPERATIONS = (ROOT / "docs/operations.md").read_text(encoding="utf-8")
COMMANDS = [line for language, block in BLOCKS if language == "bash" for line in block.splitlines()]
TOUR = [block for block in BLOCKS if block[0] == "python" or ".venv/bin/fournee" in block[1]]
REAL = ".venv/bin/fournee batch"


def test_every_command_is_one_that_these_tests_know() -> None:
    known = (
        "make ",
        f"{REAL} ",
        ".venv/bin/fournee inspect ",
        ".venv/bin/fournee report ",
        "pip install ",
        "fournee batch ",
        "fournee submit ",
        "fournee serve",  # with its curl line in test_serve.py
        "curl ",
    )
    assert COMMANDS
    assert not [command for command in COMMANDS if not command.startswith(known)]


@pytest.mark.parametrize("command", [c for c in COMMANDS if c.startswith("make ")])
def test_make_knows_its_targets(command: str) -> None:
    """`make demo` itself runs in test_real_run.py, and `make test` is what runs this."""
    done = subprocess.run([*shlex.split(command), "--dry-run"], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert ".venv/bin/" in done.stdout


def run(line: str, folder: Path, address: str) -> None:
    """Run a command as written; the echo engine stands in for the model, which other tests run."""
    words = shlex.split(line)[1:]
    engine = ["engine=echo"] if words[0] in ("batch", "estimate") else []
    environment = {**os.environ, "RAY_ADDRESS": address, "RAY_AUTH_MODE": "token"}
    command = [sys.executable, "-m", "jobs.cli", *words, *engine]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, f"{line}\n{done.stderr}"


def play(page: str, folder: Path, address: str) -> None:
    """Do what a page of docs/ says, in order: `fournee` line by line, whatever else a block holds in a shell."""
    for block in re.findall(
        r"^```bash\n(.*?)^```", (ROOT / "docs" / page).read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL
    ):
        for words in block.splitlines() if "\nfournee " in f"\n{block}" else [block]:
            if words.startswith("fournee "):
                run(words, folder, address)
            else:
                subprocess.run(words, shell=True, cwd=folder, check=True)


def tour(folder: Path, address: str) -> None:
    """What the README does with a file of one's own, in order."""
    for language, block in TOUR:
        if language == "python":
            subprocess.run([sys.executable, "-c", block], cwd=folder, check=True)
            continue
        for line in block.splitlines():
            run(line, folder, address)


def test_the_tour_runs_as_written_with_the_echo_engine(tmp_path: Path, ray_address: str) -> None:
    tour(tmp_path, ray_address)
    assert ds.dataset(tmp_path / "runs/ten/results").count_rows() == 10
    assert ds.dataset(tmp_path / "runs/all/results").count_rows() == 100


@pytest.mark.slow  # as the next two: a minute or two; that their commands compose is tested in test_docs.py
def test_the_quick_start_runs_as_written_with_the_echo_engine(tmp_path: Path, ray_address: str) -> None:
    tour(tmp_path, ray_address)
    play("quickstart.md", tmp_path, ray_address)
    assert ds.dataset(tmp_path / "runs/squares/2026-12-01/results").count_rows() == 100
    assert ds.dataset(tmp_path / "runs/pirate/results").count_rows() == 64
    (first, *_) = ds.dataset(tmp_path / "runs/numbers/results").to_table().to_pylist()
    assert (first["text"], first["uid"]) == ("Answer with a number only. What is 1", 1)


@pytest.mark.slow
def test_the_commands_about_inputs_run_as_written_with_the_echo_engine(tmp_path: Path, ray_address: str) -> None:
    play("inputs.md", tmp_path, ray_address)
    rows = {row["id"]: row for row in ds.dataset(tmp_path / "run/results").to_table().to_pylist()}
    assert (rows["b"]["error_kind"], rows["b"]["attempts"], rows["c"]["num_output_tokens"]) == ("missing_value", 2, 3)
    assert ds.dataset(tmp_path / "numbers/results").to_table()["parsed"].to_pylist()[0] == '"2"'


@pytest.mark.slow
def test_the_commands_of_the_handbook_run_as_written(tmp_path: Path, ray_address: str) -> None:
    night, *_ = bash_lines(OPERATIONS)
    run(night, tmp_path, ray_address)
    play("failures.md", tmp_path, ray_address)


def bash_lines(page: str) -> list[str]:
    return [line for block in re.findall(r"^```bash\n(.*?)^```", page, re.MULTILINE | re.DOTALL) for line in block.splitlines()]


ESTIMATES = [line for line in bash_lines(OPERATIONS) if line.startswith("fournee estimate ")]


def test_the_estimate_runs_as_written_with_the_echo_engine(tmp_path: Path, ray_address: str) -> None:
    (command,) = ESTIMATES
    lines = [json.dumps({"prompt": f"row {number}"}) for number in range(600)]
    (tmp_path / "rows.jsonl").write_text("\n".join(lines), encoding="utf-8")
    run(command, tmp_path, ray_address)
    assert [path.name for path in tmp_path.iterdir() if path.name != "runs"] == ["rows.jsonl"]


SUBMISSIONS = [line for line in [*COMMANDS, *bash_lines(OPERATIONS)] if line.startswith("fournee submit ") and " -- " in line]


@pytest.mark.parametrize("command", [c for c in COMMANDS if c.startswith("fournee batch ")])
def test_commands_for_a_cluster_compose(command: str) -> None:
    assert parse_config(compose_settings("batch", shlex.split(command)[2:])).cluster.workers == 8


@pytest.mark.parametrize("command", SUBMISSIONS)
def test_what_is_submitted_composes(command: str, tmp_path: Path) -> None:
    """The submissions themselves run in test_submit.py."""
    own, job = (shlex.split(part) for part in command.split(" -- "))
    parse_submit(compose_settings("submit", [word for word in own[2:] if "=" in word]))
    if "--config-dir" in job:
        job = [word for word in job if word not in ("--config-dir", "my_conf")]
    assert parse_config(compose_settings("batch", ["cluster=job", *job[1:]])).cluster.address == "auto"


def test_the_commands_of_every_night_run_as_written(tmp_path: Path, ray_address: str) -> None:
    night, *others = bash_lines(OPERATIONS)
    run(night, tmp_path, ray_address)
    assert ds.dataset(tmp_path / "runs/nightly/2026-11-30/results").count_rows() == 64
    for line in (line for line in others if line.startswith("fournee history ")):
        run(line, tmp_path, ray_address)
    (chaos,) = (line for line in others if line.startswith("make "))
    test_make_knows_its_targets(chaos)
    (plain,) = (line for line in others if line.startswith("RAY_AUTH_MODE=token ray job submit "))
    parse_config(compose_settings("batch", shlex.split(plain.partition(" jobs/batch.py ")[2])))


@pytest.mark.parametrize("command", [c for c in COMMANDS if c.startswith("pip install ")])
def test_the_extras_exist(command: str) -> None:
    (extra,) = re.findall(r"\[(\w+)\]", command)
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert extra in project["optional-dependencies"]


def test_links_lead_somewhere() -> None:
    for page in [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").glob("*.md")]:
        for link in re.findall(r"\]\(([^)#]+?)(?:#[\w-]+)?\)", page.read_text(encoding="utf-8")):
            assert link.startswith("https://") or (page.parent / link).exists(), f"{page.name}: {link}"
