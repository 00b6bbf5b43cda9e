"""The rows of a part: built from what became of them, and put in the places of those that failed before."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from pipelines.rows import Batch, Block, Completion, Settled
from pipelines.schema import RESULT


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
        "correct": [one.is_correct for one in settled],
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
