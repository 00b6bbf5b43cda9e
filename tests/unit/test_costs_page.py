"""docs/costs.md: its example adds up by the code's own arithmetic, and its questions are asked of a run."""

import json
import re
import shlex
import subprocess
from datetime import date
from pathlib import Path
from typing import Any

import duckdb
import pyarrow as pa
import pytest

from pipelines.compose import compose_settings
from pipelines.config import BatchConfig, PricingConfig
from pipelines.costs import Costs, Tokens, costs_of
from pipelines.ledger import check_ledger, wall_s_of, worker_table
from pipelines.metrics import OF_RUN, OF_WORKER
from pipelines.parse import parse_config
from pipelines.summary import finish
from pipelines.totals import Summary
from tests.unit.nights import night
from tests.unit.story import answer
from tests.unit.test_ledger import batches, beat, share

PAGE = (Path(__file__).parents[2] / "docs/costs.md").read_text(encoding="utf-8")
LINES = [[cell.strip() for cell in line.strip("|").split("|")] for line in PAGE.splitlines() if line.startswith("|")]
PHASES = ("loading", "prefill", "decode", "idle", "lost")


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)


def composed(command: str, *more: str) -> BatchConfig:
    """The settings of a command of the page, as it stands there."""
    words = shlex.split(command)[2:]
    folder = words[words.index("--config-dir") + 1] if "--config-dir" in words else None
    overrides = [word for word in words if "=" in word]
    return parse_config(compose_settings("batch", [*overrides, *more], folder))


@pytest.fixture
def pricing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> PricingConfig:
    """The page's own price file, chosen by the page's own command."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my_conf/pricing").mkdir(parents=True)
    (tmp_path / "my_conf/pricing/our_h100.yaml").write_text(blocks("yaml")[0], encoding="utf-8")
    return composed(blocks("bash")[0]).pricing


def workers() -> tuple[dict[str, dict[str, float]], pa.Table]:
    """The example's workers as the page has them, and as the ledger makes them of heartbeats and batches."""
    shown = {
        name: dict(zip((*PHASES, "lifetime", "cost"), (float(cell.replace(",", "")) for cell in cells), strict=True))
        for name, *cells in LINES
        if name in ("a", "b", "c", "all") and len(cells) == 7
    }
    beats, shares = [], []
    for name, starts_s in (("a", 0), ("b", 0), ("c", 1520)):
        one = shown[name]
        times = {"lifetime_s": one["lifetime"], "loading_s": one["loading"]}
        busy_s = one["prefill"] + one["decode"] + one["lost"]
        beats.append(beat(name, busy_s=busy_s, price=3.6, currency="EUR", started_at=starts_s * 1_000_000, **times))
        shares.append([share(name, one["prefill"], one["decode"], one["lifetime"], price=3.6)])
    table = worker_table(beats, committed := batches(*shares))
    check_ledger(table, committed)
    return shown, table


def test_the_workers_of_the_example_are_those_of_the_ledger() -> None:
    shown, table = workers()
    for line in table.to_pylist():
        for name, value in shown[line["worker"]].items():
            assert line[name if name == "cost" else f"{name}_s"] == pytest.approx(value), (line["worker"], name)
    for name in (*PHASES, "lifetime", "cost"):
        assert shown["all"][name] == pytest.approx(sum(shown[worker][name] for worker in "abc"))
    assert wall_s_of(table) == 4000


def test_the_bill_of_the_example_is_that_of_the_code(pricing: PricingConfig) -> None:
    _, table = workers()
    costs = costs_of(table, pricing, Tokens(prompt=40_000_000, cached=10_000_000, output=20_000_000), wall_s_of(table))
    shown = {cells[0].split("`")[1]: cells[1] for cells in LINES if len(cells) == 3 and re.fullmatch(r"\d+\.\d+", cells[1])}
    assert set(shown) == set(Costs.model_fields) - {"currency"}
    (hosted,) = costs.hosted
    for name, value in shown.items():
        found = hosted.cost if name == "hosted" else getattr(costs, name)
        assert f"{found:.{len(value.partition('.')[2])}f}" == value, name


def test_what_the_page_names_is_there() -> None:
    assert set(re.findall(r"`costs\.(\w+)`", PAGE)) <= set(Costs.model_fields)
    exported = {name for metric in (*OF_WORKER, *OF_RUN.values()) for name in metric.exported}
    assert set(re.findall(r"`(ray_\w+)`", PAGE)) <= exported


@pytest.fixture
def tickets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Summary:
    """The run of the page, with the echo engine and one worker that was killed; the nights beside it."""
    monkeypatch.chdir(tmp_path)
    make, run_it = blocks("bash")[1].splitlines()
    subprocess.run(make, shell=True, check=True)
    config = composed(run_it, "engine=echo", "engine.rows_per_batch=2", "engine.seconds_per_token=0.001")
    run, plan, _ = answer(config)
    (name,) = (name for name in run.folder.names("attempts") if name.startswith("worker-"))
    killed: dict[str, Any] = {
        **json.loads(run.folder.read(f"attempts/{name}")), "worker": "deadbeef", "lifetime_s": 30.0, "loading_s": 10.0,
        "busy_s": 12.0, "in_flight": [[1, 0, 1]], "death": "its process ended without a word",
    }  # fmt: skip
    run.folder.write("attempts/worker-0001-deadbeef.json", json.dumps(killed).encode())
    for day in (29, 30):
        night(Path(f"runs/nightly/2026-11-{day}"), date(2026, 11, day), run_date=None if day == 29 else date(2026, 11, 30))
    return finish(run, plan, config)


def test_the_questions_are_answered_and_all_sums_are_the_bill(tickets: Summary) -> None:
    db, costs = duckdb.connect(), tickets.costs
    view, customers, failed, killed, nights = blocks("sql")
    db.execute(view)
    ((engine_cost,),) = db.sql("SELECT sum(engine_cost) FROM row_costs").fetchall()
    assert engine_cost == pytest.approx(costs.prefill + costs.decode)

    bills = db.sql(customers).to_arrow_table().to_pylist()
    assert {line["customer"]: line["num_rows"] for line in bills} == {"acme": 2, "zenith": 1}
    assert sum(line["bill"] for line in bills) == pytest.approx(costs.total)

    kinds = {line["error_kind"]: line["engine_cost"] for line in db.sql(failed).to_arrow_table().to_pylist()}
    assert kinds["missing_value"] == 0 < kinds["postprocess_error"]

    (dead,) = db.sql(killed).to_arrow_table().to_pylist()
    assert (dead["worker"], dead["num_in_flight"]) == ("deadbeef", 1)
    assert dead["lost_cost"] == pytest.approx(costs.lost)
    assert dead["loading_cost"] == pytest.approx(10 / 3600 * 0.0893)

    days = db.sql(nights).to_arrow_table().to_pylist()
    assert [(line["day"].day, line["model"], line["cost"]) for line in days] == [(29, "qwen3-8b", 2.0), (30, "qwen3-8b", 2.0)]
    assert [line["share_without_tokens"] for line in days] == pytest.approx([0.2, 0.2])

    exec(blocks("python")[0], {})
