"""Many runs at once: DuckDB over the statistics of every finished run below a folder."""

import glob
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import date
from typing import Any

import duckdb
import pyarrow as pa
from fsspec.implementations.local import LocalFileSystem

from pipelines.errors import ConfigError
from pipelines.file_systems import file_system
from pipelines.schema import BATCH, BATCH_TABLE, RUN, RUN_FILE, RUN_TABLE, SUCCESS_FILE

BEFORE = 14
"""How many lines back a line's changes look."""
TIMES = ("date", "week")
_KEYS = {
    "date": "day",
    "week": "date_trunc('week', day)::DATE",
    "model": "model",
    "experiment": "experiment",
    "accelerator": "accelerator",
    "node": "node",
    "client": "client",
}
_OF_BATCH = ("node", "client")
"""What only batches know."""
KEYS = tuple(_KEYS)
"""What lines can be made by; times are those that have an order."""
CHANGING = ("output_tokens_per_s", "cost_per_million_output_tokens", "cost_per_million_total_tokens")
_THREADS = 32  # of requests to object storage
# A total over what not every run or batch says is no total.
_TOTAL = "CREATE MACRO total(x) AS CASE WHEN count(x) = count(*) THEN sum(x) END"
_TYPES = {
    pa.string(): "VARCHAR",
    pa.int64(): "BIGINT",
    pa.float64(): "DOUBLE",
    pa.date32(): "DATE",
    pa.timestamp("us", tz="UTC"): "TIMESTAMPTZ",
}


def _files(schema: pa.Schema, columns: Sequence[str]) -> str:
    """SQL for the rows of many files, with a null for every column that an older run does not have."""
    # As SQL and not as an empty Arrow table: DuckDB imports pandas to look at one, which takes a second.
    nulls = ", ".join(f"NULL::{_TYPES[schema.field(name).type]} AS {name}" for name in columns)
    files = "SELECT * FROM read_parquet($files, union_by_name = true, filename = true)"
    return f"(SELECT {nulls} WHERE false UNION ALL BY NAME {files})"


_RUN_COLUMNS = (
    "run_date", "started_at", "finished_at", "workload", "experiment", "model", "engine", "accelerator", "input_bytes",
    "num_rows", "num_failed", "num_marked", "num_correct", "num_prompt_tokens", "num_output_tokens", "wall_s", "prefill_s",
    "decode_s", "ttft_s_p95", "output_tokens_per_s", "currency", "cost", "cost_per_million_output_tokens",
    "cost_per_million_total_tokens",
)  # fmt: skip
_BATCH_COLUMNS = (
    "node", "client", "accelerator", "currency", "num_rows", "num_failed", "num_marked", "num_correct", "num_prompt_tokens",
    "num_output_tokens", "prefill_s", "decode_s", "cost",
)  # fmt: skip
# Only these columns: opening a thousand files is most of the time, and each column more takes its part.
_RUNS = f"""
CREATE TABLE runs AS
SELECT {", ".join(_RUN_COLUMNS)},
       left(filename, -{len(RUN_TABLE) + 1}) AS run,
       coalesce(run_date, make_timestamp(epoch_us(started_at))::DATE) AS day,
       prefill_s + decode_s AS busy_s,
       num_failed / nullif(num_rows, 0) AS failed_share,
       num_correct / nullif(num_marked, 0) AS accuracy
FROM {_files(RUN, _RUN_COLUMNS)}
"""
_OF_RUNS = "SELECT * FROM runs"
# A batch knows its own share of the engines, and nothing of the input's size or of time in which nothing ran.
_OF_BATCHES = f"""
SELECT batches.*, day, model, experiment, NULL::BIGINT AS input_bytes, NULL::DOUBLE AS wall_s
FROM (SELECT left(filename, -{len(BATCH_TABLE) + 1}) AS run, node, client, accelerator, currency,
             total(num_rows) AS num_rows, total(num_failed) AS num_failed, total(num_marked) AS num_marked,
             total(num_correct) AS num_correct, total(num_prompt_tokens) AS num_prompt_tokens,
             total(num_output_tokens) AS num_output_tokens, total(prefill_s + decode_s) AS busy_s, total(cost) AS cost
      FROM {_files(BATCH, _BATCH_COLUMNS)}
      GROUP BY ALL) AS batches
JOIN (SELECT run, day, model, experiment FROM runs) USING (run)
"""
_LINES = """
SELECT {keys},
       currency,
       count(DISTINCT run) AS num_runs,
       total(num_rows)::BIGINT AS num_rows,
       total(num_failed) / nullif(total(num_rows), 0) AS failed_share,
       total(num_correct) / nullif(total(num_marked), 0) AS accuracy,
       total(input_bytes)::BIGINT AS input_bytes,
       total(num_prompt_tokens)::BIGINT AS num_prompt_tokens,
       total(num_output_tokens)::BIGINT AS num_output_tokens,
       total(num_output_tokens) / nullif(total(wall_s), 0) AS output_tokens_per_s,
       total(num_output_tokens) / nullif(total(busy_s), 0) AS busy_output_tokens_per_s,
       total(cost) AS cost,
       total(cost) / nullif(total(num_output_tokens), 0) * 1e6 AS cost_per_million_output_tokens,
       total(cost) / nullif(total(num_prompt_tokens) + total(num_output_tokens), 0) * 1e6 AS cost_per_million_total_tokens
FROM ({facts})
WHERE ($since IS NULL OR day >= $since) AND ($until IS NULL OR day <= $until)
GROUP BY ALL
"""


class History:
    """The finished runs below a folder, as tables for DuckDB: `runs` has one row for each, with its folder and its day.

    Raises ConfigError where there is no such folder, or no finished run in it.
    """

    def __init__(self, url: str):
        self.url = url
        self._fs, self.root = file_system(url)
        self._fs.invalidate_cache()
        if not self._fs.exists(self.root):
            raise ConfigError(f"{url} does not exist; name the folder that holds the run folders")
        self._runs = _finished_runs(self._fs, self.root.rstrip("/"))
        self._db = duckdb.connect(config={"autoload_known_extensions": False})
        if not isinstance(self._fs, LocalFileSystem):
            self._db.register_filesystem(self._fs)
            self._db.execute(f"SET threads = {_THREADS}")
        self._db.execute(_TOTAL)
        self._db.execute(_RUNS, {"files": self._paths(RUN_TABLE)})

    def sql(self, query: str, **values: Any) -> pa.Table:
        """What a query finds."""
        return self._db.sql(query, params=values).to_arrow_table()

    def lines(self, by: Sequence[str], since: date | None = None, until: date | None = None) -> pa.Table:
        """The runs from one day to another, summed up by some of `KEYS`, in order; the first and last day included.

        Where time is one of the keys, each line's changes are against the median of the up to `BEFORE` lines before it that
        have the same other keys. Null where there is nothing to divide by, or where a run or batch does not say.
        """
        facts, files = (_OF_BATCHES, {"files": self._paths(BATCH_TABLE)}) if set(_OF_BATCH) & set(by) else (_OF_RUNS, {})
        lines = _LINES.format(keys=", ".join(f"{_KEYS[key]} AS {key}" for key in by), facts=facts)
        others = ", ".join(key for key in (*by, "currency") if key not in TIMES)
        times = ", ".join(key for key in by if key in TIMES)
        window = f"(PARTITION BY {others} ORDER BY {times} ROWS BETWEEN {BEFORE} PRECEDING AND 1 PRECEDING)"
        changes = [f"{x} / nullif(median({x}) OVER {window}, 0) - 1 AS {x}_change" for x in CHANGING] if times else []
        order = ", ".join(filter(None, (times, others)))
        query = f"SELECT {', '.join(['*', *changes])} FROM ({lines}) ORDER BY {order}"
        return self.sql(query, since=since, until=until, **files)

    def _paths(self, name: str) -> list[str]:
        """The files of a table in all runs, as DuckDB finds them."""
        paths = [f"{run}/{name}" for run, names in self._runs.items() if name.rpartition("/")[2] in names]
        if not paths:
            raise ConfigError(f"{self.url} holds no finished run; name the folder that holds the run folders")
        if not isinstance(self._fs, LocalFileSystem):
            paths = [self._fs.unstrip_protocol(path) for path in paths]
        return [glob.escape(path) for path in paths]


def _finished_runs(fs: Any, root: str) -> dict[str, set[str]]:
    """The folders of all finished runs, and what each has in `stats`. What lies in a run's folder is not walked through."""
    found, level = [], [root]
    with ThreadPoolExecutor(_THREADS) as pool:
        while level:
            below: list[str] = []
            for folder, entries in zip(level, pool.map(lambda folder: _look(fs, folder), level), strict=True):
                if RUN_FILE not in entries:
                    below += [f"{folder}/{name}" for name, is_folder in entries.items() if is_folder]
                elif SUCCESS_FILE in entries:
                    found.append(folder)
            level = below
        return dict(zip(found, pool.map(lambda run: set(_look(fs, f"{run}/stats")), found), strict=True))


def _look(fs: Any, folder: str) -> dict[str, bool]:
    """The names in a folder, and which of them are folders to look into: no links, which may lead round in circles."""
    try:
        entries = fs.ls(folder, detail=True)
    except (FileNotFoundError, NotADirectoryError):  # gone since, or never a folder
        return {}
    return {
        entry["name"].rstrip("/").rpartition("/")[2]: entry["type"] == "directory" and not entry.get("islink")
        for entry in entries
    }
