"""The batch job: answer every row of the input once. This page is the whole story; start reading here."""

import logging
import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from types import FrameType

import pyarrow as pa
import pyarrow.compute as pc

from pipelines.board import Board
from pipelines.budget import ErrorBudget
from pipelines.cluster import answer, connect
from pipelines.config import BatchConfig, VllmEngineConfig
from pipelines.engines.vllm.options import check_options
from pipelines.errors import Stopped
from pipelines.handover import Job
from pipelines.heartbeat import heartbeats
from pipelines.lease import Lease, hold, wait_until_free
from pipelines.meter import Meter, SpendingLimit
from pipelines.metrics import RunMetrics, run_tags
from pipelines.model import check_chat_template, pinned_revision
from pipelines.openai_results import OUTPUT_FILE, write_openai
from pipelines.parts import PARTS, Parts
from pipelines.placement import Placement, cache_block_size
from pipelines.plan import PLAN_FILE, Plan, make_plan, make_shards
from pipelines.postprocess import Postprocessor
from pipelines.prefix_plan import order_by_prefix
from pipelines.preflight import check_space, check_writable
from pipelines.progress import Progress, show_progress
from pipelines.requests import RequestBuilder
from pipelines.run import Run, begin_attempt, find_run, open_run
from pipelines.schema import SUCCESS_FILE
from pipelines.sources import Source, list_sources
from pipelines.storage import Folder
from pipelines.summary import finish, read_summary
from pipelines.supervisor import Watch, answer_in_rounds
from pipelines.totals import Summary

logger = logging.getLogger(__name__)


def run_batch(config: BatchConfig, began: Callable[[Run], None]) -> tuple[Run, Summary]:
    """Answer every row of the input once; return the run and its totals. `began` is told of the run that there is work on.

    Raises ConfigError before Ray or a model starts, RunFailed where the job cannot go on, TooManyFailures where it cannot
    end well any more, Stopped on Ctrl-C or SIGTERM.
    """
    check_settings(config)
    sources = list_sources(config.input)
    wait_until_free(find_run(config, sources).folder)
    run = open_run(config, sources)
    if run.is_finished and not reopened(config, run):
        logger.info("%s is finished; nothing to do", run.folder.url)
        if config.output.openai and not run.folder.exists(OUTPUT_FILE):  # asked for afterwards: no part of what a run is
            write_openai(run.folder, Plan.load(run.folder), config.model.name)
            logger.info("wrote %s/%s", run.folder.url, OUTPUT_FILE)
        return run, read_summary(run, config)
    with hold(run.folder, run.attempt, config.cluster.heartbeat_s) as lease:
        began(run)
        plan = open_plan(config, sources, run.folder)
        begin_attempt(run)
        todo = find_todo(config, run, plan)
        if todo.num_rows:
            answer_pending(config, run, plan, todo, lease)
        return run, finish(run, plan, config)


def check_settings(config: BatchConfig) -> None:
    """Refuse what only more than the settings themselves can tell: engine options and functions that do not exist."""
    if isinstance(config.engine, VllmEngineConfig):
        check_options(config)
        check_chat_template(config)
    Postprocessor(config.postprocess)


def open_plan(config: BatchConfig, sources: list[Source], folder: Folder) -> Plan:
    """Read the run's plan, or make it: from its first attempt on it never changes."""
    if folder.exists(PLAN_FILE):
        return Plan.load(folder)
    plan = plan_input(config, sources, folder)
    plan.save(folder)
    for file in plan.bad_files:
        logger.warning("left out: %s: %s", file.path, file.reason)
    return plan


def plan_input(config: BatchConfig, sources: list[Source], folder: Folder) -> Plan:
    """Cut the input into batches, of rows in the order that the settings ask for."""
    needed = [*RequestBuilder(config).columns, *([config.input.id_column] if config.input.id_column else [])]
    plan = make_plan(
        config.input,
        sources,
        needed,
        folder,
        rows_per_batch=config.engine.rows_per_batch,
        num_workers=config.cluster.max_workers or config.cluster.workers,
    )
    return order_by_prefix(config, plan, folder, cache_block_size(config)) if config.input.order == "by_prefix" else plan


@dataclass(frozen=True)
class Todo:
    """The batches to work on, and how many of their rows."""

    batches: pa.Table
    num_rows: int
    kept: Sequence[int]
    """The batches that are left as they are."""


def find_todo(config: BatchConfig, run: Run, plan: Plan) -> Todo:
    """What has no part yet, and with `retry_failed` what failed."""
    parts = Parts(run.folder)
    done = parts.batch_ids
    failed = parts.failures(done, run.attempt) if config.retry_failed else {}
    kept = [batch_id for batch_id in done if batch_id not in failed]
    missing = plan.without(done)
    return Todo(plan.without(kept), (pc.sum(missing["num_rows"]).as_py() or 0) + sum(failed.values()), kept)


def answer_pending(config: BatchConfig, run: Run, plan: Plan, todo: Todo, lease: Lease) -> None:
    """Run the workers over what is to be done."""
    done_rows = plan.num_rows - todo.num_rows
    logger.info(
        "%s: %d rows in %d batches of %s, %d rows done; answers of at most %d tokens",
        run.folder.url, plan.num_rows, plan.num_batches, plan.batch_size, done_rows, config.sampling.max_tokens,
    )  # fmt: skip
    check_writable(run.folder)
    check_space(run.folder, todo.num_rows)
    with connect(config) as placement:
        failing = ErrorBudget(
            config.errors, plan.num_rows, lambda: sum(Parts(run.folder).failures(todo.kept, run.attempt).values())
        )
        meter = meter_of(config, run, placement)
        progress = Progress(plan.num_rows, done_rows, meter, lambda: failing.num_failed_before)
        check = limits(config, lease, failing, progress)
        check()  # a budget that is used up starts no worker
        job, board = job_of(config, run, plan, placement), Board()
        metrics = RunMetrics(job.tags, config.pricing.currency, run.attempt)
        with show_progress(config, board, progress, metrics.update):

            def answer_round(batches: pa.Table) -> None:
                shards = make_shards(batches, config.cluster.max_workers or config.cluster.workers)
                with closing(Watch(config.cluster, board, check)) as watch:
                    answer(job, placement, shards, board, watch.check)

            answer_in_rounds(todo.batches, lambda: find_todo(config, run, plan).batches, answer_round)


def meter_of(config: BatchConfig, run: Run, placement: Placement) -> Meter:
    """What the run has cost so far, and goes on to cost."""
    return Meter(
        config.pricing,
        num_workers=config.cluster.workers,
        num_accelerators=placement.num_accelerators,
        beats_before=heartbeats(run.folder),
    )


def limits(config: BatchConfig, lease: Lease, failing: ErrorBudget, progress: Progress) -> Callable[[], None]:
    """What is checked again and again while the workers run; raises Stopped, TooManyFailures, or whatever the lease does."""
    spending = SpendingLimit(config.budget, config.cluster.drain_s)

    def check() -> None:
        lease.check()
        failing.check(progress.num_failed, progress.num_left)
        spending.check(progress.meter)

    return check


def job_of(config: BatchConfig, run: Run, plan: Plan, placement: Placement) -> Job:
    """What the workers must know."""
    return Job(
        config=config,
        run=run.folder,
        attempt=run.attempt,
        fingerprint=run.fingerprint,
        model_revision=pinned_revision(run.identity["model"]["digest"]),
        carried=plan.carried,
        device=placement.device,
        num_accelerators=placement.num_accelerators,
        tags=run_tags(config, run.folder, run.fingerprint),
    )


def reopened(config: BatchConfig, run: Run) -> bool:
    """Whether a finished run goes on, because its failed rows are to be answered again."""
    if not (config.retry_failed and read_summary(run, config).num_failed):
        return False
    run.folder.remove_below(PARTS)  # what a worker that outlived the run has left there must not count again
    run.folder.delete(SUCCESS_FILE)
    return True


@contextmanager
def stop_on_signal() -> Iterator[None]:
    """Turn Ctrl-C and SIGTERM into Stopped while the block runs.

    After it the job has ended: what is left, to say how and to leave, is done whoever asks to stop, and the exit code stands.
    """

    def stop(number: int, frame: FrameType | None) -> None:
        raise Stopped(signal.Signals(number).name)

    def all_to(handler: Callable[[int, FrameType | None], None] | signal.Handlers) -> None:
        for one in (signal.SIGINT, signal.SIGTERM):
            signal.signal(one, handler)

    all_to(stop)
    try:
        yield
    finally:
        all_to(signal.SIG_IGN)
