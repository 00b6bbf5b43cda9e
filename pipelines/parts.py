"""Parts: the Parquet file that a batch commits, its rows and its statistics in one object."""

import io
import json
import re
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from pipelines.errors import RunFailed
from pipelines.rows import Batch, Block, Completion, Settled
from pipelines.schema import RESULT
from pipelines.sources import is_bad_file
from pipelines.storage import Folder

RESULTS = "results"
_STATISTICS = b"fournee.batch"
_PART_NAME = re.compile(r"part-(\d{8,})\.parquet")
_FOOTER_THREADS = 64  # where a request takes 30 ms, 16 threads read 150 footers a second, 64 read 550; on a disk all the same
_FOOTERS_AT_ONCE = 1000


def part_name(batch_id: int) -> str:
    """The name of a batch's part follows from its number alone."""
    return f"{RESULTS}/part-{batch_id:08d}.parquet"


def committed(run: Folder) -> list[int]:
    """The batches that have a part: one listing, whatever the number of rows."""
    matches = (_PART_NAME.fullmatch(name) for name in run.names(RESULTS))
    return [int(match[1]) for match in matches if match]


def commit(run: Folder, table: pa.Table, statistics: dict[str, Any], compression: str) -> None:
    """Write a batch's part, whole or not at all; a second writer replaces it with answers to the same rows."""
    sink = io.BytesIO()
    pq.write_table(table.replace_schema_metadata({_STATISTICS: json.dumps(statistics)}), sink, compression=compression)
    run.write(part_name(statistics["batch_id"]), sink.getvalue())


def read_part(run: Folder, batch_id: int) -> pa.Table:
    """The rows of a part, with its statistics in their metadata."""
    return pq.read_table(pa.BufferReader(run.read(part_name(batch_id))))


def statistics_in(part: pa.Table) -> dict[str, Any]:
    """The statistics that ride with the rows of a part."""
    statistics: dict[str, Any] = json.loads(part.schema.metadata[_STATISTICS])
    return statistics


def read_statistics(run: Folder, batch_ids: Sequence[int]) -> Iterator[list[dict[str, Any]]]:
    """Yield the statistics of the given parts from their footers, some at a time; `num_rows_written` is what each holds.

    Raises RunFailed where a part is damaged or gone.
    """

    def read(batch_id: int) -> dict[str, Any]:
        name = part_name(batch_id)
        try:
            metadata = run.patiently(lambda: pq.read_metadata(run.path(name), filesystem=run.arrow), name)
        except Exception as error:
            if not is_bad_file(error):
                raise
            raise RunFailed(f"{name} cannot be read: {error}; delete it and resume the run") from None
        statistics: dict[str, Any] = json.loads((metadata.metadata or {}).get(_STATISTICS, b"{}"))
        return {**statistics, "num_rows_written": metadata.num_rows}

    with ThreadPoolExecutor(_FOOTER_THREADS) as pool:
        for start in range(0, len(batch_ids), _FOOTERS_AT_ONCE):
            yield list(pool.map(read, batch_ids[start : start + _FOOTERS_AT_ONCE]))


def failures(run: Folder, batch_ids: Sequence[int], before_attempt: int) -> dict[int, int]:
    """How many rows failed in each of the given parts that an earlier attempt wrote, those of none left out."""
    lines = (line for some in read_statistics(run, batch_ids) for line in some)
    return {line["batch_id"]: line["num_failed"] for line in lines if line["num_failed"] and line["attempt"] < before_attempt}


def result_table(
    batch: Batch, block: Block, ids: Sequence[str | None], settled: Sequence[Settled], attempts: Sequence[int]
) -> pa.Table:
    """Build the rows of a part, or those of them that the block holds, in its order."""
    answers = [one.answer for one in settled]
    errors = [one.error for one in settled]
    requests = [one.request for one in settled]
    first = [answer and answer.completions[0] for answer in answers]
    columns: dict[str, Sequence[Any]] = {
        "id": ids,
        "source": block.sources_in(batch),
        "source_row": block.source_rows,
        "status": ["ok" if error is None else "failed" for error in errors],
        "prompt_kind": [r and ("text" if isinstance(r.prompt, str) else "chat") for r in requests],
        "text": [one and one.text for one in first],
        "finish_reason": [one and one.finish_reason for one in first],
        "stop_reason": [one and one.stop_reason for one in first],
        "num_prompt_tokens": [a and a.num_prompt_tokens for a in answers],
        "num_cached_tokens": [a and a.num_cached_tokens for a in answers],
        "num_output_tokens": [a and sum(one.num_output_tokens for one in a.completions) for a in answers],
        "num_truncated_tokens": [a and a.num_truncated_tokens for a in answers],
        "arrived_at": [a and int(a.engine_time.arrived_at_s * 1e6) for a in answers],
        "queue_s": [a and a.queue_s for a in answers],
        "ttft_s": [a and a.ttft_s for a in answers],
        "generation_s": [a and a.generation_s for a in answers],
        "error_kind": [e and e.kind.value for e in errors],
        "error_message": [e and e.message for e in errors],
        "attempts": attempts,
        "request_key": [request_key(batch, offset) for offset in block.places],
        "flags": [one.flags for one in settled],
        "filtered_by": [one and one.filtered_by for one in first],
        "sampling": [r and r.own_sampling for r in requests],
        "completions": [(a and [_as_struct(one) for one in a.completions[1:]]) or None for a in answers],
        "logprobs": [one and one.logprobs for one in first],
        "prompt_logprobs": [a and a.prompt_logprobs for a in answers],
        "reasoning": [one and one.reasoning for one in first],
        "tool_calls": [one and one.tool_calls for one in first],
        "parsed": [one and one.parsed for one in first],
        "embedding": [one and one.embedding for one in first],
    }
    arrays = [pa.array(columns[field.name], field.type) for field in RESULT]
    schema = pa.schema([*RESULT, *block.carried.schema])
    return pa.Table.from_arrays([*arrays, *block.carried.columns], schema=schema)


def failed_offsets(part: pa.Table) -> list[int]:
    """Which rows of a part failed."""
    return np.flatnonzero(pc.equal(part["status"], "failed").to_numpy()).tolist()  # type: ignore[no-any-return]


def merged(part: pa.Table, fresh: pa.Table, offsets: Sequence[int]) -> pa.Table:
    """Put fresh rows in the place of those of a part at the given offsets."""
    order = np.arange(len(part))
    order[list(offsets)] = len(part) + np.arange(len(fresh))
    return pa.concat_tables([part.replace_schema_metadata(), fresh.replace_schema_metadata()]).take(order)


def request_key(batch: Batch, offset: int) -> str:
    """A row's own name within its run, whatever its id is."""
    return f"{batch.batch_id:08d}-{offset}"


def _as_struct(one: Completion) -> dict[str, Any]:
    return {
        "text": one.text,
        "finish_reason": one.finish_reason,
        "stop_reason": one.stop_reason,
        "num_output_tokens": one.num_output_tokens,
        "reasoning": one.reasoning,
        "tool_calls": one.tool_calls,
        "parsed": one.parsed,
        "filtered_by": one.filtered_by,
        "error_kind": one.error and one.error.kind.value,
        "error_message": one.error and one.error.message,
    }
