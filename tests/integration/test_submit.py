"""`fournee submit` against the job server of a real `ray start --head` that wants a token."""

import json
import os
import random
import re
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import pyarrow.dataset as ds
import pytest

from tests.integration.conftest import Done

ROOT = Path(__file__).parents[2]
BIN = Path(sys.executable).parent
PORTS = ("port", "dashboard-port", "dashboard-agent-listen-port", "metrics-export-port", "ray-client-server-port")


@dataclass(frozen=True)
class Cluster:
    """A running head, and the surroundings of a user who may use it."""

    folder: Path
    address: str
    token_file: Path
    started: "list[subprocess.Popen[str]]" = field(default_factory=list)

    def environment(self, **more: str) -> dict[str, str]:
        own = {
            "PATH": f"{BIN}:{os.environ['PATH']}",
            "HOME": str(self.folder),
            "RAY_API_SERVER_ADDRESS": self.address,
            "RAY_AUTH_TOKEN_PATH": str(self.token_file),
            "RAY_USAGE_STATS_ENABLED": "0",
            "COLUMNS": "160",
        }
        foreign = {"RAY_ADDRESS", "RAY_AUTH_MODE", "RAY_AUTH_TOKEN"}
        return {**{name: value for name, value in os.environ.items() if name not in foreign}, **own, **more}

    def start(self, *arguments: str, cwd: Path = ROOT, **more: str) -> "subprocess.Popen[str]":
        """Give a command and leave it running."""
        command = [sys.executable, "-m", "jobs.cli", "submit", *arguments]
        pipe = subprocess.PIPE
        process = subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True, cwd=cwd, env=self.environment(**more))
        self.started.append(process)
        return process

    def submit(self, *arguments: str, cwd: Path = ROOT, **more: str) -> Done:
        """Give a command and wait for its end."""
        return finished(self.start(*arguments, cwd=cwd, **more))

    def uploaded(self, name: str) -> set[str]:
        """What lies in the one uploaded folder that holds a file of this name."""
        found = [path.parent for path in self.folder.glob(f"r/session_2*/runtime_resources/working_dir_files/*/{name}")]
        (place,) = found
        return {str(path.relative_to(place)) for path in place.rglob("*") if path.is_file() and "__pycache__" not in path.parts}


def finished(process: "subprocess.Popen[str]") -> Done:
    out, err = process.communicate(timeout=180)
    return Done(process.returncode, out, err)


def free_ports(count: int) -> list[int]:
    """Ports below those that Linux gives to outgoing connections, any of which may be taken before the head gets to it."""
    ports = random.sample(range(20000, 32000), 20 * count)
    return [port for port in ports if not answers(port)][:count]


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    """A head with token authentication, in a folder with a short name: Unix sockets allow 107 characters."""
    folder = Path(tempfile.mkdtemp(prefix="fs"))
    ports = dict(zip(PORTS, free_ports(len(PORTS)), strict=True))
    cluster = Cluster(folder, f"http://127.0.0.1:{ports['dashboard-port']}", folder / "token")
    cluster.token_file.write_text(secrets.token_hex(32))
    command = [str(BIN / "ray"), "start", "--head", "--block", "--disable-usage-stats", f"--temp-dir={folder / 'r'}"]
    command += [f"--{name}={port}" for name, port in ports.items()]
    command += ["--min-worker-port=0", "--max-worker-port=0", "--num-cpus=4", f"--object-store-memory={200 * 2**20}"]
    with (folder / "head.log").open("w") as log:
        head = psutil.Popen(command, stdout=log, stderr=log, env=cluster.environment(RAY_API_SERVER_ADDRESS=""))
    try:
        wait_for(lambda: answers(ports["dashboard-port"]) or head.poll() is not None, 120)
        assert head.poll() is None, (folder / "head.log").read_text()
        yield cluster
    finally:
        for process in cluster.started:
            process.kill()  # where a test failed before its end
        said = (folder / "head.log").read_text() if head.poll() is not None else ""
        ours = [head, *head.children(recursive=True)]
        for signal_name in ("terminate", "kill"):  # the head leaves some of them behind where it is only terminated
            for one in ours:
                if one.is_running():
                    getattr(one, signal_name)()
            _, ours = psutil.wait_procs(ours, timeout=3)
        shutil.rmtree(folder, ignore_errors=True)
        assert not said, f"the head ended before the tests did: {said}"


def answers(port: int) -> bool:
    with socket.socket() as one:
        return one.connect_ex(("127.0.0.1", port)) == 0


def wait_for(look: Callable[[], Any], timeout_s: float = 90) -> Any:
    deadline = time.monotonic() + timeout_s
    while not (found := look()):
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.1)
    return found


def write_rows(path: Path, *prompts: str) -> Path:
    path.write_text("".join(json.dumps({"id": f"r{i:03d}", "prompt": text}) + "\n" for i, text in enumerate(prompts)))
    return path


def job(rows: Path, output: Path, *more: str) -> list[str]:
    return [
        "batch", "engine=echo", "engine.rows_per_batch=10", "engine.max_num_seqs=10",
        "input=jsonl", f"input.path={rows}", "input.id_column=id",
        "cluster.cpus_per_worker=1", f"output.path={output}", *more,
    ]  # fmt: skip


def texts(output: Path) -> list[tuple[str, str]]:
    table = ds.dataset(output / "results").to_table(columns=["id", "text"])
    return sorted(zip(table["id"].to_pylist(), table["text"].to_pylist(), strict=True))


TEMPLATE = """It's {{ prompt }}, "quoted", a=b, [c,d], {e: f}, \\${HOME} $HOME `id` * ~ é; & | < # !"""
SAID = """It's ROW, "quoted", a=b, [c,d], {e: f}, ${HOME} $HOME `id` * ~ é; & | < # !"""


def test_a_job_runs_from_a_folder_of_yaml_with_its_arguments_unharmed_and_is_followed_to_its_end(
    cluster: Cluster, tmp_path: Path
) -> None:
    folder = tmp_path / "project"
    (folder / "my_conf/sampling").mkdir(parents=True)
    greedy = (ROOT / "conf/sampling/greedy.yaml").read_text()
    (folder / "my_conf/sampling/mine.yaml").write_text(greedy.replace("max_tokens: 128", "max_tokens: 77 "))
    for name, text in {
        "notes.txt": "",
        "big.bin": "",
        "secret.env": "",
        ".gitignore": "secret.env",
        ".rayignore": "*.bin",
    }.items():
        (folder / name).write_text(text)
    (folder / "data").mkdir()
    rows = write_rows(folder / "data/rows.jsonl", *(f"row {i}" for i in range(30)))
    quoted = TEMPLATE.replace('"', '\\"')
    more = ["--config-dir", "my_conf", "sampling=mine", "input.prompt_column=null", f'prompt.template="{quoted}"']
    done = cluster.submit("--", *job(rows, tmp_path / "run", *more), cwd=folder)

    assert done.code == 0, done.err + done.out
    assert texts(tmp_path / "run") == [(f"r{i:03d}", SAID.replace("ROW", f"row {i}")) for i in range(30)]
    assert json.loads((tmp_path / "run/run.json").read_text())["config"]["sampling"]["max_tokens"] == 77
    assert f"{folder}: 4 files, 0.0 MiB to upload" in done.err
    assert cluster.uploaded("notes.txt") == {"notes.txt", "my_conf/sampling/mine.yaml", ".gitignore", ".rayignore"}
    submission = re.search(r"submitted (fournee-run-[0-9a-f]{8}-1) to", done.err)
    assert submission is not None
    assert f"{submission[1]} has ended: SUCCEEDED, exit code 0" in done.err
    assert done.out.count("30: 30 ok, 0 failed") == done.out.count("Running entrypoint for job") == 1

    again = cluster.submit("logs", submission[1])
    assert (again.code, again.out) == (0, done.out)
    stopped = cluster.submit("stop", submission[1])
    assert stopped.code == 0 and "SUCCEEDED" in stopped.out


def test_variables_reach_the_job_by_name_and_are_never_shown(cluster: Cluster) -> None:
    done = cluster.submit("pass_env=[HF_TOKEN]", 'env_vars.HF_HUB_OFFLINE="1"', "--", "doctor", HF_TOKEN="hf_s3cr3t")
    assert done.code == 0, done.err + done.out
    assert re.search(r"HF_TOKEN +set, HF_HUB_OFFLINE 1|HF_TOKEN set", done.out)
    assert "hf_s3cr3t" not in done.out + done.err


def test_more_failed_rows_than_allowed_is_the_exit_code_of_the_job(cluster: Cluster, tmp_path: Path) -> None:
    rows = write_rows(tmp_path / "rows.jsonl", *["say NO", *["fine"] * 19])
    done = cluster.submit("--", *job(rows, tmp_path / "run", "engine.refuse_text=NO"))
    assert done.code == 3, done.err + done.out
    assert re.search(r"has ended: FAILED, exit code 3$", done.err, re.MULTILINE)


def test_a_job_is_left_looked_at_stopped_and_resumed_and_a_second_one_is_refused(cluster: Cluster, tmp_path: Path) -> None:
    output, count = tmp_path / "run", 400
    prompts = [" ".join(["word"] * (1 + i // 10)) for i in range(count)]  # each batch takes longer than the one before
    rows = write_rows(tmp_path / "rows.jsonl", *prompts)
    slow = job(rows, output, "engine.seconds_per_token=4", "cluster.drain_s=5")
    left = cluster.submit("--no-wait", "stop_wait_s=30", "--", *slow)
    submission = left.out.strip()
    assert left.code == 0 and re.fullmatch(r"fournee-run-[0-9a-f]{8}-1", submission), left.err
    for action in ("logs", "status", "stop"):
        assert f"fournee submit {action} {submission}" in left.err

    follower = cluster.start("logs", submission)
    interrupted = cluster.start("logs", submission)
    wait_for(lambda: len(list(output.glob("results/part-*.parquet"))) >= 2)

    second = cluster.submit("--", *slow, "cluster.workers=2")
    assert second.code == 1
    assert f"this run is alive as {submission}" in second.err
    status = cluster.submit("status", submission)
    assert status.code == 0
    assert re.search(r"status +\S+ RUNNING", status.out) and re.search(r"attempt +\S+ 1 ", status.out), status.out
    interrupted.send_signal(signal.SIGINT)
    interruption = finished(interrupted)
    assert interruption.code == 130
    assert f"{submission} goes on" in interruption.err

    stopped = cluster.submit("stop", submission)
    assert stopped.code == 0, stopped.err
    assert "STOPPED" in stopped.out
    followed = finished(follower)
    assert followed.code == 4, followed.err
    assert f"{submission} has ended: STOPPED, exit code 4" in followed.err
    survived = len(list(output.glob("results/part-*.parquet")))
    assert 2 <= survived < count / 10

    resumed = cluster.submit("--", *job(rows, output))
    assert resumed.code == 0, resumed.err + resumed.out
    assert f"submitted {submission[:-1]}2 to" in resumed.err
    done_rows = re.search(r"in \d+ batches of .+, (\d+) rows done", resumed.out)
    assert done_rows is not None and int(done_rows[1]) >= 20
    assert texts(output) == [(f"r{i:03d}", prompt) for i, prompt in enumerate(prompts)]


def test_plain_ray_job_submit_works_too(cluster: Cluster, tmp_path: Path) -> None:
    rows = write_rows(tmp_path / "rows.jsonl", "it's", "so")
    arguments = job(rows, tmp_path / "run", "cluster=job", "prompt.system='a, b'")[1:]
    done = subprocess.run(
        [BIN / "ray", "job", "submit", "--working-dir", ".", "--", "python", "jobs/batch.py", *arguments],
        cwd=ROOT, env=cluster.environment(RAY_AUTH_MODE="token"), capture_output=True, text=True, timeout=180, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert texts(tmp_path / "run") == [("r000", "it's"), ("r001", "so")]


@pytest.mark.parametrize(("more", "said"), [
    ({"RAY_AUTH_TOKEN_PATH": ""}, "Missing authentication token; `ray get-auth-token` on the head node"),
    ({"RAY_AUTH_TOKEN": "0" * 64}, "Invalid authentication token; `ray get-auth-token` on the head node"),
    ({"RAY_AUTH_MODE": "disabled"}, "RAY_AUTH_MODE=disabled keeps the token back: unset it"),
])  # fmt: skip
def test_a_token_that_is_missing_or_wrong_is_said_with_the_way_out(
    more: dict[str, str], said: str, cluster: Cluster, tmp_path: Path
) -> None:
    done = cluster.submit("status", "x", cwd=tmp_path, HOME=str(tmp_path), **more)
    assert done.code == 2
    assert said in done.err


def test_of_two_submissions_at_the_same_moment_one_is_refused(cluster: Cluster) -> None:
    racers = [cluster.start("--no-wait", "--", "inspect", "s3://bucket/raced") for _ in range(2)]
    done = sorted((finished(racer) for racer in racers), key=lambda one: one.code)
    assert [one.code for one in done] == [0, 1], done
    assert re.search(rf"this run (is alive|was submitted) as {done[0].out.strip()}", done[1].err)


def test_a_submission_that_does_not_exist_is_said(cluster: Cluster) -> None:
    for asked in [cluster.start(action, "fournee-x-1") for action in ("status", "stop", "logs")]:
        done = finished(asked)
        assert done.code == 2
        assert "fournee-x-1 does not exist" in done.err


class Link:
    """A way to the job server that can be cut: connections end after so many bytes, or are not taken."""

    def __init__(self, server: str):
        self._target = ("127.0.0.1", int(server.rpartition(":")[2]))
        self._door = socket.create_server(("127.0.0.1", 0))
        self.address = f"http://127.0.0.1:{self._door.getsockname()[1]}"
        self.cut_after: int | None = None
        self.num_cut = 0
        self._is_open = True
        self._carried: list[socket.socket] = []
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        """Drop what is carried, and take no more."""
        self._is_open = False
        with suppress(OSError):  # closed before
            self._door.shutdown(socket.SHUT_RDWR)
        self._door.close()
        for one in self._carried:
            with suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)

    def _accept(self) -> None:
        while self._is_open:
            try:
                client, _ = self._door.accept()
            except OSError:
                return
            self._carried.append(client)
            threading.Thread(target=self._carry, args=(client,), daemon=True).start()

    def _carry(self, client: socket.socket) -> None:
        with client, socket.create_connection(self._target) as server:
            request = client.recv(65536)
            server.sendall(request)
            left = self.cut_after if b"/logs/tail" in request else None
            threading.Thread(target=self._pump, args=(client, server), daemon=True).start()
            self._pump(server, client, left)

    def _pump(self, source: socket.socket, sink: socket.socket, left: int | None = None) -> None:
        with suppress(OSError):  # the other end is gone
            while data := source.recv(65536):
                if left is not None and len(data) >= left:
                    sink.sendall(data[:left])
                    self.num_cut += 1
                    break
                left = None if left is None else left - len(data)
                sink.sendall(data)
        for one in (source, sink):
            with suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)


def test_a_log_is_followed_through_dropped_connections_and_given_up_where_the_server_stays_away(cluster: Cluster) -> None:
    talk = "import time; [(print('line', i, 'x' * 40), time.sleep(0.1)) for i in range(6000)]"
    subprocess.run(
        [BIN / "ray", "job", "submit", "--no-wait", "--submission-id", "talker", "--", "python", "-c", talk],
        env=cluster.environment(RAY_AUTH_MODE="token"), capture_output=True, text=True, timeout=60, check=True,
    )  # fmt: skip
    with closing(Link(cluster.address)) as dropping, closing(Link(cluster.address)) as lost:
        dropping.cut_after = 3000
        patient = cluster.start("logs", "talker", "poll_s=5", RAY_API_SERVER_ADDRESS=dropping.address)
        impatient = cluster.start("logs", "talker", "poll_s=5", "patience_s=3", RAY_API_SERVER_ADDRESS=lost.address)
        assert impatient.stdout is not None
        assert any(line.startswith("line 5 ") for line in impatient.stdout)
        lost.close()
        gone = finished(impatient)
        assert gone.code == 1
        assert f"{lost.address} is out of reach for patience_s=3, while the job may go on" in gone.err

        wait_for(lambda: dropping.num_cut >= 3)
        assert "STOPPED" in cluster.submit("stop", "talker").out
        done = finished(patient)
    assert done.code == 4, done.err
    said = [int(number) for number in re.findall(r"^line (\d+) x{40}$", done.out, re.MULTILINE)]
    assert said == list(range(len(said))) and len(said) > 100
    assert said[-1] == int(re.findall(r"^line (\d+) x{40}$", cluster.submit("logs", "talker").out, re.MULTILINE)[-1])
