"""The batch job: answer every row of the input once. This page is the whole story; start reading here."""

import logging
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

import pyarrow as pa
import pyarrow.compute as pc

from pipelines.cluster import answer, connect
from pipelines.config import BatchConfig, VllmEngineConfig
from pipelines.engines.vllm import check_options
from pipelines.errors import Stopped
from pipelines.heartbeat import num_alive
from pipelines.model import pinned_revision
from pipelines.parts import committed
from pipelines.plan import PLAN_FILE, Plan, make_plan, make_shards
from pipelines.progress import progress
from pipelines.prompts import Renderer
from pipelines.run import Run, begin_attempt, open_run
from pipelines.sources import Source, list_sources
from pipelines.storage import Folder
from pipelines.summary import Summary, finish, read_summary
from pipelines.worker import Job

logger = logging.getLogger(__name__)


def run_batch(config: BatchConfig) -> tuple[Run, Summary]:
    """Answer every row of the input once; return the run and its totals.

    Raises ConfigError before Ray or a model starts, RunFailed where the job cannot go on, Stopped on Ctrl-C or SIGTERM.
    """
    check_engine(config)
    sources = list_sources(config.input)
    run = open_run(config, sources)
    if run.is_finished:
        logger.info("%s is finished; nothing to do", run.folder.url)
        return run, read_summary(run, config)
    plan = open_plan(config, sources, run.folder)
    begin_attempt(run)
    pending = plan.without(committed(run.folder))
    if len(pending):
        answer_pending(config, run, plan, pending)
    return run, finish(run, plan, config)


def check_engine(config: BatchConfig) -> None:
    """Refuse engine options that do not exist."""
    if isinstance(config.engine, VllmEngineConfig):
        check_options(config.engine.kwargs)


def open_plan(config: BatchConfig, sources: list[Source], folder: Folder) -> Plan:
    """Read the run's plan, or make it: from its first attempt on it never changes."""
    if folder.exists(PLAN_FILE):
        return Plan.load(folder)
    plan = plan_input(config, sources, folder)
    plan.save(folder)
    return plan


def plan_input(config: BatchConfig, sources: list[Source], folder: Folder) -> Plan:
    """Cut the input into batches."""
    needed = [*Renderer(config.prompt, config.input).columns, *([config.input.id_column] if config.input.id_column else [])]
    return make_plan(config.input, sources, needed, config.engine.rows_per_batch, folder)


def answer_pending(config: BatchConfig, run: Run, plan: Plan, pending: pa.Table) -> None:
    """Run the workers over the batches that have no part yet."""
    done_rows = plan.num_rows - pc.sum(pending["num_rows"]).as_py()
    logger.info("%s: %d rows in %d batches, %d rows done", run.folder.url, plan.num_rows, plan.num_batches, done_rows)
    warn_of_company(config, run)
    with connect(config) as placement:
        job = Job(
            config=config,
            run=run.folder,
            attempt=run.attempt,
            fingerprint=run.fingerprint,
            model_revision=pinned_revision(run.identity["model"]["digest"]),
            carried=plan.carried,
            device=placement.device,
            num_accelerators=placement.num_accelerators,
        )
        shards = make_shards(pending, config.cluster.max_workers or config.cluster.workers)
        cost_per_s = config.pricing.price_per_accelerator_hour * placement.num_accelerators / 3600
        with progress(config, total_rows=plan.num_rows, done_rows=done_rows, cost_per_worker_s=cost_per_s) as tally:
            answer(job, placement, shards, tally)


def warn_of_company(config: BatchConfig, run: Run) -> None:
    """Say that workers of another attempt seem to live: nothing is lost by that, but batches may be paid for twice."""
    count = num_alive(run.folder, within_s=3 * config.cluster.heartbeat_s)
    if count:
        logger.warning("%d worker(s) of another attempt at this run were alive a moment ago; is it running elsewhere?", count)


@contextmanager
def stop_on_signal() -> Iterator[None]:
    """Turn Ctrl-C and SIGTERM into Stopped while the block runs."""

    def stop(number: int, frame: FrameType | None) -> None:
        raise Stopped(signal.Signals(number).name)

    before = {one: signal.signal(one, stop) for one in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for one, handler in before.items():
            signal.signal(one, handler)
