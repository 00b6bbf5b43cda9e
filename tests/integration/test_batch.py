"""The story end to end on a real local Ray, with the echo engine: what comes out, and what a stop, a kill or a rerun does."""

import json
import math
import os
import random
import signal
import string
import subprocess
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import duckdb
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from openai.types import Completion
from openai.types.chat import ChatCompletion

from pipelines.ledger import PHASES
from tests.integration.conftest import Fournee

Jsonl = Callable[..., Path]
WaitUntil = Callable[[Callable[[], bool], "subprocess.Popen[str]"], None]


def echo(path: Path, *more: str) -> list[str]:
    return [
        "engine=echo",
        "engine.rows_per_batch=10",
        "engine.max_num_seqs=10",
        "input=jsonl",
        f"input.path={path}",
        "input.id_column=id",
        *more,
    ]


def rows(count: int) -> list[dict[str, Any]]:
    return [{"id": f"r{i:03d}", "prompt": f"row {i} says {'word ' * (i % 5 + 1)}", "topic": i % 3} for i in range(count)]


def ids(fournee: Fournee) -> Sequence[str]:
    return sorted(fournee.table()["id"].to_pylist())


def test_answers_failures_statistics_and_cost_come_out_in_one_schema(fournee: Fournee, jsonl: Jsonl) -> None:
    good = rows(200)
    path = jsonl(
        [*good, {"id": "null", "prompt": None}, {"id": "long", "prompt": "w " * 5000}, {"id": "no", "prompt": "say NO"}]
    )
    done = fournee.run(
        *echo(path, "cluster.workers=2", "cluster.cpus_per_worker=0.5", "engine.refuse_text=NO", "input.carry_columns=[topic]"),
        "errors.max_failed_rows=2", "engine.rows_per_batch=250",
    )  # fmt: skip
    assert done.code == 3, done.err  # 3 of 203 rows failed

    table = fournee.table()
    assert ids(fournee) == sorted([row["id"] for row in good] + ["long", "no", "null"])
    answers = {row["id"]: row for row in table.to_pylist()}
    for row in good:
        assert answers[row["id"]]["text"] == row["prompt"].strip()
        assert answers[row["id"]]["topic"] == str(row["topic"])
    assert {i: answers[i]["error_kind"] for i in ("null", "long", "no")} == {
        "null": "missing_value",
        "long": "prompt_too_long",
        "no": "engine_refused",
    }
    assert "5000 tokens; engine.max_model_len=4096 allows 4095" in answers["long"]["error_message"]

    batches = pq.read_table(fournee.folder / "stats" / "batches.parquet")
    workers = pq.read_table(fournee.folder / "stats" / "workers.parquet")
    summary = json.loads((fournee.folder / "stats" / "summary.json").read_text())
    assert sum(batches["num_rows"].to_pylist()) == 203 == summary["num_rows"]
    assert summary["error_kinds"] == {"missing_value": 1, "prompt_too_long": 1, "engine_refused": 1}
    assert summary["exit_code"] == 3
    assert summary["costs"]["total"] == pytest.approx(sum(workers["cost"].to_pylist()))
    assert set(batches["worker"].to_pylist()) <= set(workers["worker"].to_pylist())
    assert (fournee.folder / "_SUCCESS").exists()
    for said in ("ECHO ENGINE", "203: 200 ok, 3 failed", "time to first token", "USD per million"):
        assert said in done.out


def test_the_results_read_as_one_table_by_arrow_duckdb_and_pandas(fournee: Fournee, jsonl: Jsonl) -> None:
    first_all_failed = [{"id": f"bad{i}", "prompt": None} for i in range(10)]
    assert fournee.run(*echo(jsonl([*first_all_failed, *rows(30)]), "errors.max_failed_fraction=1")).code == 0
    results = fournee.folder / "results"
    counts = duckdb.sql(f"select status, count(*) from '{results}/*.parquet' group by status order by status").fetchall()
    assert counts == [("failed", 10), ("ok", 30)]
    assert len(pd.read_parquet(results)) == len(fournee.table()) == 40
    share = duckdb.sql(f"select sum(num_output_tokens) from '{fournee.folder}/stats/batches.parquet'").fetchall()
    assert share == [(sum(n for n in fournee.table()["num_output_tokens"].to_pylist() if n),)]


def test_a_finished_run_is_left_alone_and_another_run_is_refused(fournee: Fournee, jsonl: Jsonl) -> None:
    command = echo(jsonl(rows(30)))
    assert fournee.run(*command).code == 0
    before = fournee.parts()
    again = fournee.run(*command)
    assert again.code == 0
    assert "is finished; nothing to do" in again.err
    assert fournee.parts() == before

    other = fournee.run(*command, "sampling.max_tokens=3")
    assert other.code == 2
    assert "sampling.max_tokens: 128 in the folder, 3 now" in other.err
    assert fournee.parts() == before

    assert fournee.run(*command, "sampling.max_tokens=3", "output.on_existing=replace").code == 0
    assert max(fournee.table()["num_output_tokens"].to_pylist()) == 3


def test_a_driver_killed_twice_and_rerun_loses_and_repeats_nothing(
    fournee: Fournee, jsonl: Jsonl, wait_until: WaitUntil
) -> None:
    command = echo(jsonl(rows(400)))
    for enough in (2, 20):
        process = fournee.start(*command, "engine.seconds_per_token=0.3")
        wait_until(lambda enough=enough: len(fournee.parts()) >= enough, process)
        process.kill()
        process.communicate()
    survived = fournee.parts()
    assert 20 <= len(survived) < 40

    assert fournee.run(*command).code == 0
    assert ids(fournee) == [row["id"] for row in rows(400)]
    assert {row["id"]: row["text"] for row in fournee.table().to_pylist()} == {r["id"]: r["prompt"].strip() for r in rows(400)}
    changed = {name for name, written in survived.items() if fournee.parts()[name] != written}
    assert not changed, "a batch that was committed was paid for twice"
    summary = json.loads((fournee.folder / "stats" / "summary.json").read_text())
    assert (summary["num_attempts"], summary["num_workers"]) == (3, 3)


def test_a_killed_worker_costs_at_most_what_it_had_in_flight(fournee: Fournee, jsonl: Jsonl, wait_until: WaitUntil) -> None:
    process = fournee.start(*echo(jsonl(rows(400)), "engine.seconds_per_token=0.3", "cluster.heartbeat_s=0.3"))

    def beat_now() -> dict[str, Any]:
        (path,) = fournee.folder.glob("attempts/worker-*.json")
        told: dict[str, Any] = json.loads(path.read_text())
        return told

    wait_until(lambda: len(fournee.parts()) >= 10, process)
    busy_s = beat_now()["busy_s"]
    wait_until(lambda: beat_now()["busy_s"] > busy_s + 1, process)  # in the middle of the next batches
    beat = beat_now()
    before = fournee.parts()
    os.kill(beat["pid"], signal.SIGKILL)
    out, err = process.communicate(timeout=300)
    assert process.returncode == 0, err

    assert ids(fournee) == [row["id"] for row in rows(400)]
    assert {name: fournee.parts()[name] for name in before} == before, "a batch that was committed was answered again"
    summary = json.loads((fournee.folder / "stats" / "summary.json").read_text())
    assert (summary["num_attempts"], summary["num_workers"]) == (1, 2)
    assert "400: 400 ok" in out
    workers = pq.read_table(fournee.folder / "stats" / "workers.parquet").to_pylist()
    assert [line["lost_s"] > 0.1 for line in workers] == [True, False]  # what the killed one had in flight
    for line in workers:
        assert math.fsum(line[phase] for phase in PHASES) == pytest.approx(line["lifetime_s"])
    assert summary["costs"]["lost"] == pytest.approx(
        workers[0]["lost_s"] * workers[0]["cost"] / workers[0]["lifetime_s"], rel=0.05
    )


def test_a_run_is_stopped_before_it_costs_more_than_it_may_and_goes_on_when_it_may(fournee: Fournee, jsonl: Jsonl) -> None:
    command = echo(
        jsonl(rows(400)), "engine.seconds_per_token=0.5", "pricing.price_per_accelerator_hour=3600", "cluster.heartbeat_s=1",
        "cluster.drain_s=4",
    )  # fmt: skip
    stopped = fournee.run(*command, "budget.max_cost=12")
    assert stopped.code == 4, stopped.err
    assert "budget.max_cost=12: " in stopped.err and "raise it to go on" in stopped.err
    num_parts = len(fournee.parts())
    assert 0 < num_parts < 40
    spent = json.loads((fournee.folder / "status.json").read_text())["cost"]
    assert 4 < spent <= 12

    again = fournee.run(*command, "budget.max_cost=12")
    assert again.code == 4 and len(fournee.parts()) == num_parts  # no worker was started
    assert fournee.run(*command, "engine.seconds_per_token=0.0").code == 0
    assert ids(fournee) == [row["id"] for row in rows(400)]


@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGINT])
def test_a_stop_is_clean_says_how_to_resume_and_is_resumed(
    fournee: Fournee, jsonl: Jsonl, wait_until: WaitUntil, how: signal.Signals
) -> None:
    command = echo(jsonl(rows(400)))
    process = fournee.start(*command, "engine.seconds_per_token=0.3")
    wait_until(lambda: len(fournee.parts()) >= 3, process)
    process.send_signal(how)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 4, err
    assert "the same command resumes" in err
    assert not (fournee.folder / "_SUCCESS").exists()
    assert all(len(pq.read_table(fournee.folder / "results" / name)) == 10 for name in fournee.parts())

    assert fournee.run(*command).code == 0
    assert ids(fournee) == [row["id"] for row in rows(400)]
    assert not list(fournee.folder.rglob("*.tmp"))


def test_a_worker_that_dies_again_and_again_ends_the_job_with_what_is_done(fournee: Fournee, jsonl: Jsonl) -> None:
    deadly = [*rows(50), *({"id": f"poison{i}", "prompt": "DIE"} for i in range(50))]
    done = fournee.run(*echo(jsonl(deadly), "engine.die_text=DIE", "cluster.worker_restarts=1"))
    assert done.code == 1
    assert "the run failed" in done.err
    assert "cluster.worker_restarts" in done.err
    assert "the same command resumes" in done.err
    assert "Traceback" not in done.err
    assert set(fournee.parts()) <= {f"part-{i:08d}.parquet" for i in range(5)}
    assert not (fournee.folder / "_SUCCESS").exists()


def test_a_row_that_kills_engines_is_found_and_failed_and_every_other_row_is_answered(fournee: Fournee, jsonl: Jsonl) -> None:
    poisoned = [*rows(57), {"id": "poison", "prompt": "DIE"}, *rows(100)[57:]]
    expected = "input.expected_column=prompt"  # which the echo engine answers
    done = fournee.run(*echo(jsonl(poisoned), "engine.die_text=DIE", "errors.max_failed_fraction=0.1", expected))
    assert done.code == 0, done.err
    by_id = {row["id"]: row for row in fournee.table().to_pylist()}
    assert sorted(by_id) == sorted(["poison", *(row["id"] for row in rows(100))])
    poison = by_id.pop("poison")
    assert (poison["error_kind"], poison["correct"]) == ("engine_killed", False)
    assert {row["correct"] for row in by_id.values()} == {True}
    assert {i: row["text"] for i, row in by_id.items()} == {row["id"]: row["prompt"].strip() for row in rows(100)}
    assert len(fournee.table()) == 101

    summary = json.loads((fournee.folder / "stats" / "summary.json").read_text())
    assert 3 <= summary["num_deaths"] <= 4  # perhaps in a crowd, in its batch alone, alone twice
    assert summary["error_kinds"] == {"engine_killed": 1}
    assert "engine_killed" in done.out and "such as poison" in done.out


def test_a_row_that_hangs_the_engine_is_found_and_failed_too(fournee: Fournee, jsonl: Jsonl) -> None:
    endless = [*rows(57), {"id": "endless", "prompt": "HANG"}, *rows(100)[57:]]
    done = fournee.run(
        *echo(jsonl(endless), "engine.hang_text=HANG", "errors.max_failed_fraction=0.1"),
        "cluster.hang_timeout_s=3", "cluster.heartbeat_s=0.5",
    )  # fmt: skip
    assert done.code == 0, done.err
    by_id = {row["id"]: row for row in fournee.table().to_pylist()}
    assert sorted(by_id) == sorted(["endless", *(row["id"] for row in rows(100))])
    assert by_id["endless"]["error_kind"] == "engine_killed"
    workers = pq.read_table(fournee.folder / "stats" / "workers.parquet")
    assert {death for death in workers["death"].to_pylist() if death} == {"no progress for 3 s (cluster.hang_timeout_s)"}


@pytest.mark.slow
def test_a_job_does_not_wait_for_ever_for_room(fournee: Fournee, jsonl: Jsonl, tmp_path: Path, wait_until: WaitUntil) -> None:
    path = jsonl(rows(4000))
    all_cpus = "cluster.cpus_per_worker=4"
    holder = Fournee(tmp_path / "other", fournee.address)
    process = holder.start(*echo(path, all_cpus, "engine.seconds_per_token=0.3"))
    wait_until(lambda: len(holder.parts()) >= 1, process)
    done = fournee.run(*echo(path, all_cpus, "cluster.start_timeout_s=3"))
    process.terminate()
    process.communicate(timeout=60)
    assert process.returncode == 4
    assert done.code == 1
    assert "no room for a worker" in done.err and "cluster.start_timeout_s" in done.err


def test_a_job_whose_rows_fail_is_stopped_early_with_exit_code_3_and_can_go_on(fournee: Fournee, jsonl: Jsonl) -> None:
    bad = [{"id": f"r{i}", "prompt": None if i % 2 else "fine"} for i in range(2000)]
    command = echo(jsonl(bad), "engine.seconds_per_token=0.5", "errors.max_failed_fraction=1")
    done = fournee.run(*command, "errors.max_failed_rows=20")
    assert done.code == 3, done.err
    assert "rows have failed, and" in done.err and "errors.max_failed_rows=20 allows 20" in done.err
    assert 0 < len(fournee.parts()) < 200
    assert not (fournee.folder / "_SUCCESS").exists()

    again = fournee.run(*command, "errors.max_failed_rows=20")
    assert again.code == 3  # what earlier attempts found still counts
    assert fournee.run(*command, "engine.seconds_per_token=0.0").code == 0
    assert len(fournee.table()) == 2000


def test_an_openai_batch_comes_back_as_openai_writes_it(fournee: Fournee, jsonl: Jsonl) -> None:
    def line(name: str, url: str, **body: Any) -> dict[str, Any]:
        return {"custom_id": name, "method": "POST", "url": url, "body": {"model": "gpt-any", **body}}

    hello = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "one two three"}]
    lines = [
        line("chat", "/v1/chat/completions", messages=hello, max_completion_tokens=2, n=2, temperature=1),
        line("text", "/v1/completions", prompt="four five", max_tokens=16),
        line("embed", "/v1/embeddings", input="six"),
        line("none", "/v1/chat/completions", messages=[]),
        line("stream", "/v1/chat/completions", messages=hello, stream=True),
        line("unknown", "/v1/chat/completions", messages=hello, best=1),
    ]
    done = fournee.run(
        "engine=echo", "input=openai", f"input.path={jsonl(lines)}", "output.openai=true", "errors.max_failed_fraction=1"
    )
    assert done.code == 0, done.err
    output = [json.loads(text) for text in (fournee.folder / "openai" / "output.jsonl").open()]
    assert [one["custom_id"] for one in output] == ["chat", "text"]
    chat = ChatCompletion.model_validate(output[0]["response"]["body"], strict=True)
    assert [choice.message.content for choice in chat.choices] == ["one two", "one two"]
    assert [choice.finish_reason for choice in chat.choices] == ["length", "length"]
    text = Completion.model_validate(output[1]["response"]["body"], strict=True)
    assert (text.choices[0].text, text.choices[0].finish_reason) == ("four five", "stop")
    assert chat.model_dump(exclude_unset=True) == output[0]["response"]["body"]  # unchanged
    errors = {one["custom_id"]: one for one in map(json.loads, (fournee.folder / "openai" / "errors.jsonl").open())}
    assert set(errors) == {"embed", "none", "stream", "unknown"}
    assert {one["response"]["status_code"] for one in errors.values()} == {400}
    assert "stream" in errors["stream"]["response"]["body"]["error"]["message"]


def test_failed_rows_of_a_finished_run_are_answered_again_on_request(fournee: Fournee, jsonl: Jsonl) -> None:
    mixed = [*rows(30), {"id": "null", "prompt": None}]
    command = echo(jsonl(mixed), "errors.max_failed_fraction=0.5")
    assert fournee.run(*command).code == 0
    before = fournee.parts()
    done = fournee.run(*command, "retry_failed=true")
    assert done.code == 0, done.err
    assert sum(fournee.parts()[name] != written for name, written in before.items()) == 1
    table = fournee.table()
    assert len(table) == 31
    assert {row["id"]: row["attempts"] for row in table.to_pylist() if row["attempts"] > 1} == {"null": 2}
    assert (fournee.folder / "_SUCCESS").exists()


@pytest.mark.slow
def test_the_pool_grows_up_to_max_workers(fournee_alone: Fournee, jsonl: Jsonl) -> None:
    done = fournee_alone.run(
        *echo(jsonl(rows(800)), "engine.seconds_per_token=0.8", "cluster.max_workers=2", "cluster.cpus_per_worker=0.5")
    )
    assert done.code == 0, done.err
    assert len(set(pq.read_table(fournee_alone.folder / "stats" / "batches.parquet")["worker"].to_pylist())) == 2
    assert len(pq.read_table(fournee_alone.folder / "stats" / "workers.parquet")) == 2, "a worker was loaded in vain"


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A disk that is soon full."""
    disk = tmp_path / "disk"
    disk.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=300k", "tmpfs", disk], capture_output=True, check=False).returncode:
        pytest.skip("mounting a small disk needs root")
    yield disk
    subprocess.run(["umount", disk], check=True)


def test_a_full_disk_ends_the_job_and_the_run_goes_on_when_there_is_room(
    ray_address: str, jsonl: Jsonl, small_disk: Path
) -> None:
    run = Fournee(small_disk / "run", ray_address)
    noise = random.Random(7)
    bulky = [{"id": f"r{i:03d}", "prompt": "".join(noise.choices(string.ascii_letters, k=3000))} for i in range(400)]
    command = echo(jsonl(bulky), "engine.seconds_per_token=0.1")
    done = run.run(*command)
    assert done.code == 1, done.err
    assert "No space left on device" in done.err
    before = run.parts()
    assert 0 < len(before) < 40
    assert all(len(pq.read_table(run.folder / "results" / name)) == 10 for name in before)  # whole or not there
    assert not (run.folder / "_SUCCESS").exists()

    subprocess.run(["mount", "-o", "remount,size=50m", small_disk], check=True)
    assert run.run(*command).code == 0
    assert {name: run.parts()[name] for name in before} == before
    assert ids(run) == [row["id"] for row in bulky]
    assert not list(run.folder.rglob("*.tmp"))


def test_one_file_keeps_two_workers_busy_and_one_row_needs_only_one(fournee: Fournee, jsonl: Jsonl) -> None:
    two = ["cluster.workers=2", "cluster.cpus_per_worker=0.5"]
    assert fournee.run(*echo(jsonl(rows(200)), "engine.seconds_per_token=0.3", *two)).code == 0
    lines = pq.read_table(fournee.folder / "stats" / "batches.parquet").to_pylist()
    shares = Counter(line["worker"] for line in lines for _ in range(line["num_rows"]))
    assert len(shares) == 2 and min(shares.values()) >= 40
    assert fournee.run(*echo(jsonl(rows(1)), *two, "output.on_existing=replace")).code == 0
    assert len(fournee.table()) == 1


def test_many_files_and_row_groups_of_every_size_come_out_whole(fournee: Fournee, tmp_path: Path) -> None:
    folder = tmp_path / "in"
    folder.mkdir()
    for number, (count, group) in enumerate([(1, 1), (7, 2), (300, 300), (95, 10), (0, 10)]):
        table = pa.table(
            {"uid": [number * 1000 + i for i in range(count)], "question": [f"file {number} row {i}" for i in range(count)]}
        )
        table = table.cast(pa.schema([("uid", pa.int64()), ("question", pa.string())]))
        pq.write_table(table, folder / f"{number}.parquet", row_group_size=group)
    done = fournee.run(
        "engine=echo", "engine.rows_per_batch=20", "engine.max_num_seqs=20",
        "input=parquet", f"input.path={folder}", "input.id_column=uid",
        "input.prompt_column=null", "prompt.template='Answer: {{ question }}'", "input.carry_columns=[uid]",
    )  # fmt: skip
    assert done.code == 0, done.err
    table = fournee.table()
    assert table.num_rows == 403
    assert table["uid"].type == pa.int64()
    for row in table.to_pylist():
        assert row["id"] == str(row["uid"])
        assert row["text"] == f"Answer: file {row['uid'] // 1000} row {row['uid'] % 1000}"


def test_a_compressed_file_gives_the_rows_of_the_plain_one(fournee: Fournee, jsonl: Jsonl) -> None:
    plain = jsonl(rows(55))
    subprocess.run(["gzip", "-k", plain], check=True)
    assert fournee.run(*echo(Path(f"{plain}.gz"))).code == 0
    assert ids(fournee) == [row["id"] for row in rows(55)]
    assert set(fournee.table()["source"].to_pylist()) == {f"{plain}.gz"}


def test_more_workers_than_the_machine_holds_are_refused_at_once(fournee_alone: Fournee, jsonl: Jsonl) -> None:
    done = fournee_alone.run(*echo(jsonl(rows(10)), "cluster.workers=500"))
    assert done.code == 2
    assert "cluster.workers=500 need 1 CPU each" in done.err and "lower cluster.workers" in done.err
