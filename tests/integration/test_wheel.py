"""The console command works from an installed wheel, away from the clone: `conf/` and the demo prompts travel in it."""

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The unpacked wheel: what `pip install` puts into site-packages."""
    built, site = tmp_path_factory.mktemp("dist"), tmp_path_factory.mktemp("site")
    subprocess.run(
        [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", built], cwd=ROOT, check=True, capture_output=True
    )
    (wheel,) = built.glob("fournee-*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(site)
    return site


def fournee(installed: Path, cwd: Path, *arguments: str) -> "subprocess.CompletedProcess[str]":
    environment = {**os.environ, "PYTHONPATH": str(installed), "COLUMNS": "160"}
    command = [sys.executable, "-c", "import jobs.cli, sys; print(jobs.cli.__file__); sys.exit(jobs.cli.main())", *arguments]
    return subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=120, check=False)


def test_the_wheel_holds_code_settings_and_prompts(installed: Path) -> None:
    for name in (
        "pipelines/conf/batch.yaml",
        "pipelines/conf/model/smollm2.yaml",
        "pipelines/demo_messages.jsonl",
        "pipelines/demo_prompts.jsonl",
        "pipelines/report.html.j2",
        "jobs/batch.py",
    ):
        assert (installed / name).is_file(), name
    assert not (installed / "tests").exists()
    (entry_points,) = installed.glob("*.dist-info/entry_points.txt")
    assert "fournee = jobs.cli:main" in entry_points.read_text()


def test_a_dry_run_away_from_the_clone_finds_everything(installed: Path, tmp_path: Path) -> None:
    done = fournee(installed, tmp_path, "batch", "--dry-run", "engine=echo")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(str(installed))
    assert "64" in done.stdout
    assert not list(tmp_path.iterdir())


def test_users_keep_their_own_settings_in_their_own_folder(installed: Path, tmp_path: Path) -> None:
    (tmp_path / "mine" / "sampling").mkdir(parents=True)
    shipped = (installed / "pipelines" / "conf" / "sampling" / "greedy.yaml").read_text()
    (tmp_path / "mine" / "sampling" / "short.yaml").write_text(shipped.replace("max_tokens: 128", "max_tokens: 7"))
    done = fournee(installed, tmp_path, "batch", "--dry-run", "engine=echo", "--config-dir", "mine", "sampling=short")
    assert done.returncode == 0, done.stderr
    assert "max_tokens: 7" in done.stdout
