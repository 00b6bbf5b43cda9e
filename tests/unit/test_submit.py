"""What is submitted: command lines arrive unharmed, ids name runs, uploads are what Ray packs, mistakes are refused."""

import json
import os
import re
import shlex
import socket
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from zipfile import ZipFile

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from ray._private.runtime_env.packaging import create_package

from jobs import submit
from pipelines.compose import compose_settings
from pipelines.config import SubmitConfig
from pipelines.errors import ConfigError, ExitCode
from pipelines.parse import parse_submit
from pipelines.submit import Call, JobRequest, prepare, runtime_env
from pipelines.submit.server import exit_code
from pipelines.submit.upload import find_upload

WORDS = st.lists(st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), max_size=20), max_size=5)
BATCH = ("engine=echo", "output.path=/mnt/shared/run")


@cache
def settings(*overrides: str) -> SubmitConfig:
    return parse_submit(compose_settings("submit", overrides))


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder that is uploaded; it is also where the command is given."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


def batch(*overrides: str, config_dir: str | None = None) -> Call:
    own = () if config_dir is None else ("--config-dir", config_dir)
    return Call("batch", (*own, *overrides), overrides, config_dir)


def arguments_of(request: JobRequest) -> list[str]:
    python, m, module, job, *arguments = shlex.split(request.entrypoint)
    assert [python, m, module] == ["python", "-m", "jobs.cli"]
    assert job == request.job
    return arguments


def write(path: Path, text: str = "") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    return path


@given(WORDS)
@example(["it's", 'a "b"', "$HOME `ls` \\", "a\nb", "{x},[y]=z", "", "${now}", "!1 #2 *"])
def test_a_shell_gives_every_argument_back_as_it_was(words: list[str]) -> None:
    entrypoint = prepare(settings(), Call("inspect", tuple(words))).entrypoint
    shown = subprocess.run(
        ["/bin/sh", "-c", entrypoint.replace("python -m jobs.cli inspect", "printf '%s\\0' .", 1)],
        capture_output=True,
        check=True,
    )
    assert shown.stdout.decode().split("\0")[1:-1] == words


def test_a_job_runs_on_the_cluster_it_is_submitted_to_unless_another_is_chosen(folder: Path) -> None:
    write(folder / "own/experiment/here.yaml", "# @package _global_\ndefaults:\n  - override /cluster: big\n")
    write(folder / "own/experiment/usual.yaml", "# @package _global_\ncluster:\n  workers: 4\n")
    small = compose_settings("batch", ["cluster=job"])["cluster"]
    write(folder / "own/cluster/big.yaml", "\n".join(f"{k}: {'null' if v is None else v}" for k, v in small.items()))
    assert arguments_of(prepare(settings(), batch(*BATCH))) == ["cluster=job", *BATCH]
    assert arguments_of(prepare(settings(), batch(*BATCH, "cluster=local"))) == [*BATCH, "cluster=local"]
    assert arguments_of(prepare(settings(), Call("estimate", BATCH, BATCH))) == ["cluster=job", *BATCH]
    for experiment, chosen in {"here": [], "usual": ["cluster=job"]}.items():
        call = batch(*BATCH, f"experiment={experiment}", config_dir="own")
        assert arguments_of(prepare(settings(), call)) == [*chosen, *call.arguments]


def test_what_the_job_names_is_looked_for_in_the_folder_that_goes_up(folder: Path) -> None:
    write(folder / "project/prompt.txt", "Say {{ prompt }}")
    call = batch(*BATCH, "prompt.template_file=prompt.txt", "input.prompt_column=null")
    assert prepare(settings("working_dir=project"), call).working_dir == folder / "project"
    with pytest.raises(ConfigError, match=r"prompt\.template_file=prompt\.txt cannot be read"):
        prepare(settings(), call)
    assert Path.cwd() == folder


def run_of(path: str) -> str:
    return prepare(settings(), batch("engine=echo", f"output.path={path}")).run


def test_a_run_is_known_by_its_folder_however_it_is_spelt_and_answered() -> None:
    assert run_of("/mnt/a/nightly") == run_of("/mnt/a/./b/../nightly/") != run_of("/mnt/b/nightly")
    assert run_of("s3://a/nightly") == run_of("s3://a/nightly/") != run_of("s3://b/nightly")
    assert prepare(settings(), batch(*BATCH, "cluster.workers=2")).run == prepare(settings(), batch(*BATCH)).run
    assert run_of("/mnt/a/nightly").startswith("nightly-")


@given(st.text(st.characters(exclude_categories=["Cs"]), min_size=1))
def test_a_run_is_named_with_what_an_address_and_a_file_name_can_hold(word: str) -> None:
    run = prepare(settings(), Call("inspect", (word,))).run
    assert re.fullmatch(r"inspect-[0-9a-f]{8}", run)
    assert run != prepare(settings(), Call("inspect", (word, word))).run


@pytest.mark.parametrize("path", ["/mnt/x/Überlauf 2026:11", "/mnt/x/...", "/", f"/mnt/{'y' * 300}", "s3://b/a?b#c"])
def test_odd_folders_give_plain_names(path: str) -> None:
    assert re.fullmatch(r"[A-Za-z0-9_-]{1,40}-[0-9a-f]{8}", run_of(f'"{path}"'))


@pytest.mark.parametrize(("overrides", "said"), [
    (("engine=echo",), "output.path=null would write into the cluster's copy of working_dir"),
    (("engine=echo", "output.path=runs/x"), "output.path=runs/x would write into the cluster's copy"),
    (("engine=echo", "output.path='~/x'"), "output.path=~/x would write into the cluster's copy"),
    ((*BATCH, "input.limti=5"), "input.limti is not a setting; did you mean limit?"),
    ((*BATCH, "cluster.drain_s=120"), "stop_wait_s=120 is not above the job's cluster.drain_s=120"),
])  # fmt: skip
def test_what_the_job_would_refuse_or_lose_is_refused_here(overrides: tuple[str, ...], said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        prepare(settings(), batch(*overrides))
    assert said in str(caught.value)


@pytest.mark.parametrize(("overrides", "said"), [
    (("engine=echo",), "serve.folder=runs/serve would write into the cluster's copy of working_dir"),
    (("engine=echo", "serve.folder='~/x'"), "serve.folder=/mnt/shared/serve"),
    (("engine=echo", "serve.folder=/mnt/x", "serve.port=80000"), "serve.port=80000 must be"),
    (("engine=echo", "serve.folder=/mnt/x", "cluster.drain_s=120"), "stop_wait_s=120 is not above"),
])  # fmt: skip
def test_what_an_endpoint_would_refuse_or_lose_is_refused_here(overrides: tuple[str, ...], said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        prepare(settings(), Call("serve", overrides, overrides))
    assert said in str(caught.value)


def test_an_endpoint_is_known_by_its_folder() -> None:
    shared = ("engine=echo", "serve.folder=s3://bucket/live/")
    request = prepare(settings(), Call("serve", shared, shared))
    assert arguments_of(request) == ["cluster=job", *shared] and request.run.startswith("live-")


def test_a_dry_run_needs_no_folder() -> None:
    assert prepare(settings(), batch("engine=echo", "dry_run=true")).run.startswith("batch-")
    assert prepare(settings(), Call("batch", ("--dry-run",))).run.startswith("batch-")


@pytest.mark.parametrize(("config_dir", "said"), [
    ("../elsewhere", "lies outside of working_dir"),
    ("/etc", "lies outside of working_dir"),
    ("{folder}/own", "write --config-dir=own, as on the cluster"),
])  # fmt: skip
def test_a_folder_of_yaml_that_the_cluster_would_not_have_is_refused(config_dir: str, said: str, folder: Path) -> None:
    (folder / "own").mkdir()
    with pytest.raises(ConfigError) as caught:
        prepare(settings(), batch(*BATCH, config_dir=config_dir.format(folder=folder)))
    assert said in str(caught.value)


def test_a_folder_of_yaml_that_is_not_uploaded_is_refused(folder: Path) -> None:
    write(folder / "own/input/mine.yaml")
    assert find_upload(folder, [], "./own/").sizes == {"own/input/mine.yaml": 0}
    write(folder / ".rayignore", "own")
    with pytest.raises(ConfigError, match="--config-dir=own is not uploaded"):
        find_upload(folder, [], "own")


def test_variables_are_passed_on_by_name(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = settings("pass_env=[MY_TOKEN]", 'env_vars.SPEED="9"', "stop_wait_s=77", "pip=[polars]")
    monkeypatch.delenv("MY_TOKEN", raising=False)
    with pytest.raises(ConfigError, match="pass_env names MY_TOKEN, which is not set here"):
        prepare(config, Call("doctor", ()))
    monkeypatch.setenv("MY_TOKEN", "s3cr${ET}")
    with pytest.raises(ConfigError, match="MY_TOKEN holds a ") as caught:
        prepare(config, Call("doctor", ()))
    assert "s3cr" not in str(caught.value)
    monkeypatch.setenv("MY_TOKEN", "s3cret$")
    environment = runtime_env(config, prepare(config, Call("doctor", ())))
    assert environment["env_vars"] == {"SPEED": "9", "MY_TOKEN": "s3cret$", "RAY_JOB_STOP_WAIT_TIME_S": "77"}
    assert environment["pip"] == ["polars"]
    assert environment["working_dir"] == str(folder)


NAMES = st.sampled_from(["a.py", "b.log", "data", "data/x.bin", "sub/data/y.bin", "sub/b.log", ".git/HEAD", "é/ü"])
FILES = st.dictionaries(NAMES, st.binary(max_size=300), min_size=1).filter(
    lambda files: not {"data", "data/x.bin"} <= files.keys()
)
PATTERNS = st.lists(st.sampled_from(["*.log", "/data", "data", "!b.log", "sub/", "a.py"]), max_size=3)


@given(files=FILES, excludes=PATTERNS, gitignore=PATTERNS, rayignore=PATTERNS)
def test_what_is_announced_is_what_ray_packs_to_the_byte(
    files: dict[str, bytes],
    excludes: list[str],
    gitignore: list[str],
    rayignore: list[str],
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    folder = tmp_path_factory.mktemp("up")
    for name, content in files.items():
        write(folder / name)
        (folder / name).write_bytes(content)
    for place in (folder, folder / "sub"):
        write(place / ".gitignore", "\n".join(gitignore))
    write(folder / ".rayignore", "\n".join(rayignore))
    upload = find_upload(folder, excludes)

    package = tmp_path_factory.mktemp("zip") / "package.zip"
    create_package(str(folder), package, include_gitignore=True, excludes=[".git", *excludes])
    with ZipFile(package) as packed:
        infos = [info for info in packed.infolist() if not info.is_dir()]
        folders = [info.filename for info in packed.infolist() if info.is_dir()]
    assert upload.sizes == {info.filename: info.file_size for info in infos}
    assert upload.num_bytes == package.stat().st_size - 22 - sum(76 + 2 * len(name.encode()) for name in folders)


def test_a_folder_beyond_rays_limit_is_refused_with_what_takes_most(folder: Path) -> None:
    for name, size_mib in {"model/weights.bin": 300, "rows/a.jsonl": 150, "rows/b.jsonl": 140, "code.py": 1}.items():
        os.truncate(write(folder / name), size_mib * 2**20)
    with pytest.raises(ConfigError) as caught:
        find_upload(folder, [])
    assert f"working_dir={folder} comes to 591.0 MiB, and Ray takes less than 512.0 MiB" in str(caught.value)
    assert "largest: model/weights.bin (300.0 MiB), rows/a.jsonl (150.0 MiB), rows/b.jsonl (140.0 MiB)" in str(caught.value)
    assert find_upload(folder, ["/model"]).sizes.keys() == {"rows/a.jsonl", "rows/b.jsonl", "code.py"}


def test_the_shipped_excludes_leave_out_what_no_job_needs(folder: Path) -> None:
    unwanted = (".git/HEAD", ".venv/bin/python", ".env", "a/__pycache__/b.pyc", ".mypy_cache/x", "runs/r/x", "data/x")
    for name in (*unwanted, "data.py"):
        write(folder / name)
    write(folder / "src/data/needed.py")
    assert find_upload(folder, settings().excludes).sizes.keys() == {"src/data/needed.py", "data.py"}


@pytest.mark.parametrize(("override", "said"), [
    ("address=head:8265", "address=head:8265 must be the job server's URL, such as http://head:8265"),
    ("stop_wait_s=60.5", "stop_wait_s=60.5 must be"),
    ("stop_wait_s=0", "stop_wait_s=0 must be greater than 0"),
    ('env_vars.RAY_JOB_STOP_WAIT_TIME_S="9"', "is what stop_wait_s sets"),
    ("env_vars.SPEED=9", "env_vars.SPEED=9 must be text"),
    ("{env_vars: {A: x}, pass_env: [A]}", "is not an override"),
    ("pass_env=[A-B]", "A-B in env_vars or pass_env is not the name of an environment variable"),
    ("pas_env=[A]", "pas_env is not a setting; did you mean pass_env?"),
    ("working_dir=''", 'working_dir="" must not be empty'),
])  # fmt: skip
def test_a_wrong_setting_is_named_with_its_value(override: str, said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        settings(override)
    assert said in str(caught.value)


def test_a_variable_is_given_once() -> None:
    with pytest.raises(ConfigError, match="A stands in env_vars and in pass_env"):
        settings("env_vars.A=x", "pass_env=[A]")


@pytest.mark.parametrize(("status", "driver", "code"), [
    ("SUCCEEDED", 0, ExitCode.OK),
    ("FAILED", 1, ExitCode.FAILED),
    ("FAILED", 2, ExitCode.BAD_CONFIG),
    ("FAILED", 3, ExitCode.ROWS_FAILED),
    ("FAILED", 4, ExitCode.STOPPED),
    ("FAILED", 137, ExitCode.FAILED),
    ("FAILED", -9, ExitCode.FAILED),
    ("FAILED", None, ExitCode.FAILED),
    ("STOPPED", None, ExitCode.STOPPED),
])  # fmt: skip
def test_the_exit_code_is_the_jobs_own(status: str, driver: int | None, code: ExitCode) -> None:
    assert exit_code(SimpleNamespace(status=status, driver_exit_code=driver)) == code


@pytest.mark.parametrize(("arguments", "said"), [
    ([], "what to run is missing"),
    (["--"], "what to run is missing"),
    (["--", "bacth"], "bacth is not a job that can be submitted; did you mean batch?"),
    (["--", "submit", "--", "batch"], "submit is not a job that can be submitted"),
    (["--", "batch", "--config-dir"], "batch: argument --config-dir: expected one argument"),
    (["poll_s=1", "--", "doctor"], "poll_s=1 must be greater than or equal to 5"),
    (["batch", "--", "doctor"], '"batch" is not an override'),
    (["stop"], "fournee submit stop takes one submission id, and no job"),
    (["logs", "a", "b"], "fournee submit logs takes one submission id, and no job"),
    (["status", "a", "--", "batch"], "fournee submit status takes one submission id, and no job"),
    (["working_dir=no_such", "--", "doctor"], "working_dir=no_such is not a folder"),
    (["--", "batch", "engine=echo", "output.path=/x", "sampling.top_p=2"], "sampling.top_p=2 must be"),
])  # fmt: skip
def test_a_mistake_ends_with_exit_code_2_and_its_reason(
    arguments: list[str], said: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert submit.main(arguments) == ExitCode.BAD_CONFIG
    out, err = capsys.readouterr()
    assert out == ""
    assert said in err


def test_no_server_is_said_with_the_address_and_the_way_out(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("RAY_API_SERVER_ADDRESS", raising=False)
    monkeypatch.setenv("RAY_ADDRESS", "http://127.0.0.1:2")
    with socket.socket() as taken:  # bound, and not listening
        taken.bind(("127.0.0.1", 0))
        address = f"http://127.0.0.1:{taken.getsockname()[1]}"
        for order in ([f"address={address}", "status", "x"], ["status", "x", f"address={address}"]):
            assert submit.main(order) == ExitCode.FAILED
            said = capsys.readouterr().err
            assert f"no Ray job server answers at address={address}: [Errno 111] Connection refused" in said


@contextmanager
def job_server(status: int, *jobs: dict[str, object]) -> Iterator[str]:
    """The address of a server that answers whatever is asked with this status, and that knows these jobs."""

    class Answers(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(status)
            self.end_headers()
            known = jobs if self.path == "/api/jobs/" else {"version": "4", "ray_version": "2.60.0", "ray_commit": "x"}
            self.wfile.write(json.dumps(known).encode() if status == HTTPStatus.OK else b"no token, or a wrong one")

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Answers) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()


def told(address: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> ExitCode:
    monkeypatch.setenv("RAY_API_SERVER_ADDRESS", address)
    write(folder / "code.py")
    return ExitCode(submit.main([f"address={address}", "--", "batch", *BATCH]))


def test_a_run_that_is_alive_is_a_job_that_could_not_go_on_and_no_wrong_setting(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = prepare(settings(), batch(*BATCH)).run
    metadata = {"fournee_run": run, "fournee_attempt": "1"}
    alive = {"type": "SUBMISSION", "submission_id": f"fournee-{run}-1", "status": "RUNNING", "metadata": metadata}
    with job_server(HTTPStatus.OK, {**alive, "entrypoint": "python"}) as address:
        assert told(address, folder, monkeypatch) == ExitCode.FAILED
    assert f"this run is alive as fournee-{run}-1; follow or stop that one" in capsys.readouterr().err


@pytest.mark.parametrize(("status", "code", "said"), [
    (HTTPStatus.UNAUTHORIZED, ExitCode.BAD_CONFIG, "`ray get-auth-token` on the head node shows the cluster's token"),
    (HTTPStatus.SERVICE_UNAVAILABLE, ExitCode.FAILED, "no Ray job server answers at address=http://127.0.0.1:"),
])  # fmt: skip
def test_a_token_that_is_refused_stays_so_and_a_head_that_starts_may_answer_later(
    status: int, code: ExitCode, said: str, folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with job_server(status) as address:
        assert told(address, folder, monkeypatch) == code
    assert said in capsys.readouterr().err


def test_the_help_lists_its_keys_and_none_of_a_batch(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        submit.main(["--help"])
    out = capsys.readouterr().out
    for key in SubmitConfig.model_fields:
        assert re.search(rf"^  {key}: ", out, re.MULTILINE), f"{key} is missing"
    assert "sampling" not in out.partition("examples:")[0]
    assert "130 on Ctrl-C" in out
