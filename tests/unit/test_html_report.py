"""A run's page: what stands in it for runs of all kinds, and that nothing that a row holds breaks out of its place."""

import json
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from jobs import cli
from pipelines.config import BatchConfig
from pipelines.errors import ExitCode
from pipelines.histograms import SECONDS, TOKENS, Counter
from pipelines.html_report import html_report
from pipelines.row_profile import RowProfile
from pipelines.run import Run
from pipelines.schema import LATENCIES, WORKER
from pipelines.summary import finish
from pipelines.timeline import TimelineCounter
from pipelines.totals import Summary
from tests.unit.story import answer, echo
from tests.unit.test_findings import summary
from tests.unit.test_row_profile import worker

Config = Callable[..., BatchConfig]
Jsonl = Callable[..., Path]
ALL_SECTIONS = ["findings", "timeline", "time", "distributions", "cost", "outcomes", "rows", "engine", "record"]


class Page(HTMLParser):
    """What a browser would find in a page."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str | None]] = []
        self.texts: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += attributes

    def handle_data(self, data: str) -> None:
        self.texts.append(data)

    @property
    def sections(self) -> list[str]:
        found = [value for name, value in self.attributes if name == "id" and value]
        return [one for one in found if one in ALL_SECTIONS]

    @property
    def text(self) -> str:
        return " ".join(" ".join(self.texts).split())


def finished(config: BatchConfig) -> tuple[Run, Summary, Page]:
    run, plan, _ = answer(config)
    totals = finish(run, plan, config)
    return run, totals, Page(run.folder.read("report.html").decode())


def test_a_run_with_failures_and_a_resume_has_every_section(batch_config: Config, jsonl: Jsonl, tmp_path: Path) -> None:
    rows = [{"id": f"r{i}", "prompt": None if i % 20 == 7 else "word " * (i % 9 + 1)} for i in range(200)]
    config = batch_config(*echo(jsonl(rows), str(tmp_path / "run"), "sampling.max_tokens=5", "engine.seconds_per_token=0.001"))
    answer(config, most_shards=4)
    _, totals, page = finished(config)
    assert page.sections == ALL_SECTIONS
    assert page.tags.count("figure") == page.tags.count("svg") == 3 + 1 + 5 + 1 + 1
    for fragment in (
        "190 ok, 10 failed", "attempt 2", "missing_value", "r7", "prompt is null", "gpt-4o-mini, OpenAI batch API",
        "Echo engine: no model ran", "sampling.max_tokens=5",
    ):  # fmt: skip
        assert fragment in page.text
    assert list(totals.findings) == ["failed rows", "cut answers"]


def test_nothing_breaks_out_and_nothing_is_fetched(batch_config: Config, jsonl: Jsonl, tmp_path: Path) -> None:
    evil = "</title></style></svg><script>alert(1)</script><img src=x onerror=alert(2)>{{ 7 * 7 }}"
    rows = [{"id": f"{evil}{i}", "prompt": None if i % 2 else f"{evil} {i}"} for i in range(20)]
    hosted = [{"name": evil, "input_per_million_tokens": 1.0, "output_per_million_tokens": 1.0, "source": evil}]
    config = batch_config(*echo(jsonl(rows), str(tmp_path / "run"), "engine.seconds_per_token=0.001"))
    pricing = config.pricing.model_validate({**config.pricing.model_dump(), "hosted": hosted}, strict=False)
    _, _, page = finished(config.model_copy(update={"pricing": pricing}))
    assert not {"script", "img", "iframe", "object", "embed", "image", "use", "foreignobject", "a"} & set(page.tags)
    assert not [name for name, _ in page.attributes if name.startswith("on")]
    assert [value for name, value in page.attributes if name in ("href", "src", "xlink:href")] == ["data:,"]
    assert "7 * 7" in page.text
    assert page.text.count("<script>alert(1)</script>") > 5


@pytest.mark.parametrize(("rows", "sections"), [
    ([], ["findings", "time", "cost", "record"]),
    ([{"id": str(i), "prompt": None} for i in range(20)], ["findings", "time", "cost", "outcomes", "record"]),
])  # fmt: skip
def test_a_run_without_answers_has_a_report_without_empty_charts(
    batch_config: Config, tmp_path: Path, rows: list[dict[str, Any]], sections: list[str]
) -> None:
    table = pa.Table.from_pylist(rows, schema=pa.schema([("id", pa.string()), ("prompt", pa.string())]))
    pq.write_table(table, tmp_path / "rows.parquet")
    _, totals, page = finished(batch_config(*echo(tmp_path / "rows.parquet", str(tmp_path / "run"), "input=parquet")))
    assert (totals.num_rows, totals.num_ok) == (len(rows), 0)
    assert page.sections == sections
    assert not [word for word in ("nan", "inf", "None") if word in page.text.partition("Record")[0].split()]


def page_of(totals: Summary, workers: pa.Table) -> Page:
    """The page of a run of which only totals and workers are known."""
    counters = {name: Counter(TOKENS) for name in ("num_prompt_tokens", "num_output_tokens")}
    counters |= {name: Counter(SECONDS) for name in LATENCIES}
    histograms = {name: counter.histogram() for name, counter in counters.items()}
    profile = RowProfile(histograms, TimelineCounter({}).timeline(), (), (), {})
    whole = {"model": {"name": "m"}, "command": "fournee batch", "versions": {}, **totals.record}
    return Page(html_report("runs/x", totals.model_copy(update={"record": whole}), workers, profile))


def test_of_very_many_workers_the_others_share_a_bar() -> None:
    lines = [{**worker(1, 0, 100), "worker": f"w{i}", "loading_s": 20.0, "decode_s": 80.0, "death": None} for i in range(64)]
    page = page_of(summary(), pa.Table.from_pylist(lines, schema=WORKER))
    assert page.text.count("worker 40") == 1
    assert "worker 41" not in page.text
    assert "other 24, their mean" in page.text


def test_a_run_that_never_had_a_worker_has_a_page() -> None:
    nothing = summary(num_rows=0, num_ok=0, num_workers=0, finish_reasons={})
    assert page_of(nothing, WORKER.empty_table()).sections == ["findings", "cost", "engine", "record"]


def test_a_worker_that_died_is_named() -> None:
    lines = [{**worker(attempt, 0, 100), "worker": f"w{attempt}", "death": "killed"} for attempt in (1, 2)]
    assert "worker 2, attempt 2, died" in page_of(summary(), pa.Table.from_pylist(lines, schema=WORKER)).text


def test_a_report_that_cannot_be_written_does_not_undo_the_run(
    batch_config: Config, jsonl: Jsonl, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config = batch_config(*echo(jsonl([{"id": "a", "prompt": "hi"}]), str(tmp_path / "run")))
    run, plan, _ = answer(config)
    (tmp_path / "run" / "report.html").mkdir()
    assert finish(run, plan, config).exit_code == ExitCode.OK
    assert run.is_finished
    assert "report.html could not be made: IsADirectoryError" in caplog.text


def test_fournee_report_shows_runs_writes_their_pages_and_compares_them(
    batch_config: Config, jsonl: Jsonl, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    urls = [str(tmp_path / name) for name in ("one", "two")]
    for url, size in zip(urls, (10, 20), strict=True):
        finished(batch_config(*echo(jsonl([{"id": str(i), "prompt": "a b"} for i in range(size)]), url)))
        (Path(url) / "report.html").unlink()
    assert cli.main(["report", *urls]) == ExitCode.OK
    out = capsys.readouterr().out
    assert all(Page((Path(url) / "report.html").read_text(encoding="utf-8")).sections for url in urls)
    assert "20: 20 ok, 0 failed" in out
    assert "loading" in out
    assert "per million input + output" in out

    assert cli.main(["report", urls[0], "--html", str(tmp_path / "pages")]) == ExitCode.OK
    assert len(list((tmp_path / "pages").glob("report-*.html"))) == 1
    assert "per million input + output" not in capsys.readouterr().out


def test_fournee_report_refuses_what_is_no_finished_run(
    batch_config: Config, jsonl: Jsonl, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = batch_config(*echo(jsonl([{"id": str(i), "prompt": "a"} for i in range(40)]), str(tmp_path / "run")))
    run, plan, _ = answer(config, most_shards=1)
    assert cli.main(["report", str(tmp_path / "nothing")]) == ExitCode.BAD_CONFIG
    assert cli.main(["report", str(tmp_path / "run")]) == ExitCode.BAD_CONFIG
    answer(config)
    finish(run, plan, config)
    totals = json.loads(run.folder.read("stats/summary.json"))
    del totals["findings"]
    run.folder.write("stats/summary.json", json.dumps(totals).encode())
    assert cli.main(["report", str(tmp_path / "run")]) == ExitCode.BAD_CONFIG
    err = " ".join(capsys.readouterr().err.split())
    for message in ("holds no run", "is not finished; the command that began it resumes it", "another version"):
        assert message in err
