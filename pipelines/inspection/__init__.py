"""Look into a run's folder, whether the run is finished, stopped or going on: only what is committed counts."""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from pipelines.errors import ConfigError
from pipelines.parts import Parts
from pipelines.plan import PLAN_FILE, Plan
from pipelines.readers import SUFFIXES, suffix_of
from pipelines.schema import RUN_FILE, SUCCESS_FILE
from pipelines.storage import Folder

_LINE_FORMATS = ("jsonl", "csv")  # their rows are numbered by line


@dataclass(frozen=True, slots=True)
class WrittenRun:
    """A run as its folder shows it now."""

    folder: Folder
    fingerprint: str
    plan: Plan
    parts: Parts
    batches: pa.Table
    """Those of the plan that are committed."""
    is_finished: bool
    input_format: str

    @property
    def has_all_parts(self) -> bool:
        """Whether every batch is committed."""
        return len(self.batches) == self.plan.num_batches

    def rows(self, batch_ids: Sequence[int], wanted: pc.Expression, columns: Sequence[str] | None = None) -> Iterator[pa.Table]:
        """The wanted rows of each of some batches, in the order given."""
        return (rows.filter(wanted).replace_schema_metadata() for rows in self.parts.read(batch_ids, columns))

    def first_rows(
        self, limit: int, batch_ids: Sequence[int], wanted: pc.Expression, columns: Sequence[str] | None = None
    ) -> list[pa.Table]:
        """So many of the wanted rows, some at a time."""
        found, num_rows = [], 0
        for rows in self.rows(batch_ids, wanted, columns):
            found.append(rows.slice(0, limit - num_rows))
            num_rows += len(found[-1])
            if num_rows >= limit:
                break
        return found

    def line_of(self, source: str, source_row: int) -> int | None:
        """The line that an editor shows for a row, where its source has lines."""
        own_format = SUFFIXES.get(suffix_of(source)) if self.input_format == "files" else self.input_format
        return source_row + 1 if own_format in _LINE_FORMATS else None


def read_run(url: str) -> WrittenRun:
    """Read what a run's folder says about itself. Raises ConfigError where it holds no run that has been planned."""
    folder = Folder(url)
    if not folder.exists(RUN_FILE):
        raise ConfigError(f"{url} holds no run: there is no {RUN_FILE}; name the folder that `fournee batch` wrote to")
    try:
        record = json.loads(folder.read(RUN_FILE))
        fingerprint, input_format = record["fingerprint"], record["config"]["input"]["format"]
    except (ValueError, TypeError, KeyError):
        raise ConfigError(f"{url} holds a {RUN_FILE} that no run of ours wrote") from None
    if not folder.exists(PLAN_FILE):
        raise ConfigError(f"{url} has no plan yet: its input is still being looked into, or that failed; see the job's output")
    plan, is_finished = Plan.load(folder), folder.exists(SUCCESS_FILE)  # before the listing: a finished run has all its parts
    parts = Parts(folder)
    batches = plan.batches.filter(pc.is_in(plan.batches["batch_id"], pa.array(parts.batch_ids, pa.int64())))
    return WrittenRun(folder, fingerprint, plan, parts, batches, is_finished, input_format)


def row_of(table: pa.Table, index: int) -> dict[str, Any]:
    """The values of one row that are not null."""
    return {name: _value(table[name][index]) for name in table.column_names if table[name][index].is_valid}


def _value(scalar: pa.Scalar) -> Any:
    try:
        return scalar.as_py()
    except (ValueError, OverflowError):  # such as a carried date after the year 9999
        return pa.array([scalar]).to_string()
