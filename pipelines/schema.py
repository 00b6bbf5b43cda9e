"""The columns of everything a run writes: one Arrow schema per table, never inferred from data."""

import pyarrow as pa

from pipelines.errors import ConfigError

RUN_FILE = "run.json"  # a folder that has it is a run's
SUCCESS_FILE = "_SUCCESS"  # and with this one, a finished run's
RUN_TABLE = "stats/run.parquet"
BATCH_TABLE = "stats/batches.parquet"

_TOKEN_LOGPROB = pa.struct([("token_id", pa.int32()), ("logprob", pa.float32()), ("rank", pa.int32()), ("text", pa.string())])
_COMPLETION = pa.struct(
    [
        ("text", pa.string()),
        ("finish_reason", pa.string()),
        ("stop_reason", pa.string()),
        ("num_output_tokens", pa.int64()),
        ("reasoning", pa.string()),
        ("tool_calls", pa.string()),
        ("parsed", pa.string()),
        ("filtered_by", pa.string()),
        ("error_kind", pa.string()),
        ("error_message", pa.string()),
    ]
)

_SHARE = pa.struct(
    [
        pa.field("worker", pa.string(), nullable=False),
        pa.field("prefill_s", pa.float64(), nullable=False),
        pa.field("decode_s", pa.float64(), nullable=False),
        pa.field("cost", pa.float64(), nullable=False),
        pa.field("lifetime_s", pa.float64(), nullable=False),  # the worker's age when it committed
        pa.field("busy_s", pa.float64(), nullable=False),  # and for how long its engine had been busy by then
    ]
)

PLAN = pa.schema(
    [
        pa.field("batch_id", pa.int64(), nullable=False),
        # The input file, as the results name it; of rows that were put into another order the copy of them, as `spooled` does.
        pa.field("source", pa.string(), nullable=False),
        pa.field("spooled", pa.string()),  # the Parquet copy to read instead, where the source has no positions
        pa.field("source_bytes", pa.int64(), nullable=False),
        pa.field("source_version", pa.string(), nullable=False),  # etag or modification time
        pa.field("first_row", pa.int64(), nullable=False),  # within the source; JSONL counts lines
        pa.field("num_rows", pa.int64(), nullable=False),
        pa.field(
            "rows_before", pa.int64(), nullable=False
        ),  # of the whole input, before this batch; of an ordered copy, of the plan
        pa.field("first_byte", pa.int64()),
        pa.field("num_bytes", pa.int64()),
        pa.field("row_group", pa.int64()),  # the Parquet row group of the first row
    ]
)

RESULT = pa.schema(
    [
        pa.field("id", pa.string()),
        pa.field("source", pa.string(), nullable=False),
        pa.field("source_row", pa.int64(), nullable=False),
        pa.field("status", pa.string(), nullable=False),  # ok | failed
        pa.field("prompt_kind", pa.string()),  # chat | text: what the row was rendered to
        pa.field("text", pa.string()),
        pa.field("finish_reason", pa.string()),
        pa.field("stop_reason", pa.string()),
        pa.field("num_prompt_tokens", pa.int64()),
        pa.field("num_cached_tokens", pa.int64()),
        pa.field("num_output_tokens", pa.int64()),
        pa.field("num_truncated_tokens", pa.int64()),  # cut from the prompt, before num_prompt_tokens was counted
        pa.field("arrived_at", pa.timestamp("us", tz="UTC")),  # in the engine
        pa.field("queue_s", pa.float64()),  # from arrival in the engine to the first scheduling
        pa.field("ttft_s", pa.float64()),  # from arrival in the engine to the first token
        pa.field("generation_s", pa.float64()),  # from the first token to the last
        pa.field("error_kind", pa.string()),
        pa.field("error_message", pa.string()),
        pa.field("attempts", pa.int32(), nullable=False),
        pa.field("request_key", pa.string(), nullable=False),
        pa.field("flags", pa.list_(pa.string()), nullable=False),  # errors.Flag
        pa.field("filtered_by", pa.string()),  # the name of the post-processing filter that the answer ran into
        pa.field("sampling", pa.string()),  # JSON text: the effective parameters, where the row has some of its own
        pa.field("completions", pa.list_(_COMPLETION)),  # the answers after the first, where n > 1
        pa.field("logprobs", pa.list_(pa.list_(_TOKEN_LOGPROB))),  # a list of candidates for each output token
        pa.field("prompt_logprobs", pa.list_(pa.list_(_TOKEN_LOGPROB))),  # the same for the prompt; its first is empty
        pa.field("reasoning", pa.string()),
        pa.field("tool_calls", pa.string()),  # JSON text
        pa.field("parsed", pa.string()),  # JSON text
        pa.field("correct", pa.bool_()),  # whether the answer is the expected one; null where the input expects none
        pa.field("embedding", pa.list_(pa.float32())),  # where the model embeds instead of answering
    ]
)

_QUANTILES = ("p50", "p95", "p99")
LATENCIES = ("queue_s", "ttft_s", "time_per_output_token_s", "latency_s")

BATCH = pa.schema(
    [
        pa.field("batch_id", pa.int64(), nullable=False),
        pa.field("num_rows", pa.int64(), nullable=False),
        pa.field("num_ok", pa.int64(), nullable=False),
        pa.field("num_failed", pa.int64(), nullable=False),
        pa.field("num_marked", pa.int64(), nullable=False),  # rows whose `correct` is not null
        pa.field("num_correct", pa.int64(), nullable=False),
        pa.field("num_prompt_tokens", pa.int64(), nullable=False),
        pa.field("num_cached_tokens", pa.int64(), nullable=False),
        pa.field("num_output_tokens", pa.int64(), nullable=False),
        pa.field("started_at", pa.timestamp("us", tz="UTC"), nullable=False),
        pa.field("wall_s", pa.float64(), nullable=False),  # from handing the batch to the engine to its last answer
        pa.field("prefill_s", pa.float64(), nullable=False),  # its share of the engine's time, until first tokens
        pa.field("decode_s", pa.float64(), nullable=False),  # and after them
        pa.field("shares", pa.list_(_SHARE), nullable=False),  # of whose engines: several where failed rows were answered again
        pa.field("output_tokens_per_s", pa.float64()),  # over wall_s
        pa.field("total_tokens_per_s", pa.float64()),
        *(pa.field(f"{name}_{q}", pa.float64()) for name in LATENCIES for q in _QUANTILES),
        pa.field("finish_reasons", pa.map_(pa.string(), pa.int64()), nullable=False),
        pa.field("error_kinds", pa.map_(pa.string(), pa.int64()), nullable=False),
        pa.field("error_examples", pa.map_(pa.string(), pa.string()), nullable=False),  # the first row's id of each kind
        pa.field("flags", pa.map_(pa.string(), pa.int64()), nullable=False),
        pa.field("worker", pa.string(), nullable=False),
        pa.field("node", pa.string(), nullable=False),
        pa.field("accelerator", pa.string(), nullable=False),
        pa.field("num_accelerators", pa.int64(), nullable=False),
        pa.field("attempt", pa.int64(), nullable=False),
        pa.field("client", pa.string()),  # the API key's name, at the endpoint; null in a batch job
        pa.field("currency", pa.string(), nullable=False),
        pa.field("cost", pa.float64(), nullable=False),  # (prefill_s + decode_s) x accelerators x price
        pa.field("cost_per_million_output_tokens", pa.float64()),
        pa.field("cost_per_million_total_tokens", pa.float64()),
    ]
)

WORKER = pa.schema(
    [
        pa.field("worker", pa.string(), nullable=False),
        pa.field("attempt", pa.int64(), nullable=False),
        pa.field("node", pa.string(), nullable=False),
        pa.field("pid", pa.int64(), nullable=False),
        pa.field("accelerator", pa.string(), nullable=False),
        pa.field("num_accelerators", pa.int64(), nullable=False),
        pa.field("started_at", pa.timestamp("us", tz="UTC"), nullable=False),
        pa.field("lifetime_s", pa.float64(), nullable=False),  # up to its last sign; the sum of the next five
        pa.field("loading_s", pa.float64(), nullable=False),
        pa.field("prefill_s", pa.float64(), nullable=False),  # of committed batches
        pa.field("decode_s", pa.float64(), nullable=False),  # of committed batches
        pa.field("idle_s", pa.float64(), nullable=False),  # nothing ran in its engine
        pa.field("lost_s", pa.float64(), nullable=False),  # it worked on what it did not commit
        pa.field("request_s", pa.float64(), nullable=False),  # each busy second, once for every request that ran in it
        pa.field("starved_s", pa.map_(pa.string(), pa.float64()), nullable=False),  # it had room; by what it waited for
        pa.field("num_batches", pa.int64(), nullable=False),  # committed
        pa.field("num_generated_tokens", pa.int64(), nullable=False),  # whatever became of them
        pa.field("num_flops", pa.int64(), nullable=False),  # of each accelerator, as vLLM estimates them
        pa.field("num_moved_bytes", pa.int64(), nullable=False),  # to and from each accelerator's memory, likewise
        pa.field("price_per_accelerator_hour", pa.float64(), nullable=False),
        pa.field("currency", pa.string(), nullable=False),
        pa.field("cost", pa.float64(), nullable=False),  # lifetime_s x accelerators x price
        pa.field("hardware", pa.string(), nullable=False),  # the node's GPUs or processor
        pa.field("engine", pa.string()),  # JSON text: what the engine resolved its options to; null while it loads
        pa.field("num_in_flight", pa.int64(), nullable=False),  # batches begun and not committed at the last heartbeat
        pa.field("death", pa.string()),  # why its engine died, if it did
    ]
)

RUN = pa.schema(
    [
        pa.field("fingerprint", pa.string(), nullable=False),
        pa.field("workload", pa.string(), nullable=False),  # a digest of the job without its rows: run.workload_of
        pa.field("run_date", pa.date32()),
        pa.field("experiment", pa.string()),
        pa.field("model", pa.string()),  # null where no model ran: the echo engine
        pa.field("model_digest", pa.string()),
        pa.field("engine", pa.string(), nullable=False),
        pa.field("input_format", pa.string(), nullable=False),
        pa.field("num_files", pa.int64(), nullable=False),
        pa.field("input_bytes", pa.int64()),  # null for tables, which do not say
        pa.field("num_rows", pa.int64(), nullable=False),
        pa.field("num_ok", pa.int64(), nullable=False),
        pa.field("num_failed", pa.int64(), nullable=False),
        pa.field("num_marked", pa.int64(), nullable=False),  # rows whose `correct` is not null
        pa.field("num_correct", pa.int64(), nullable=False),
        pa.field("num_prompt_tokens", pa.int64(), nullable=False),
        pa.field("num_cached_tokens", pa.int64(), nullable=False),
        pa.field("num_output_tokens", pa.int64(), nullable=False),
        pa.field("num_generated_tokens", pa.int64(), nullable=False),  # whatever became of them
        pa.field("num_batches", pa.int64(), nullable=False),
        pa.field("num_attempts", pa.int64(), nullable=False),
        pa.field("num_workers", pa.int64(), nullable=False),  # lifetimes, over all attempts
        pa.field("num_deaths", pa.int64(), nullable=False),  # of them
        pa.field("started_at", pa.timestamp("us", tz="UTC"), nullable=False),  # the run's folder was made
        pa.field("finished_at", pa.timestamp("us", tz="UTC"), nullable=False),  # everything was counted
        pa.field("wall_s", pa.float64(), nullable=False),  # with workers, summed over the attempts
        pa.field("worker_s", pa.float64(), nullable=False),  # all workers' lifetimes; the sum of the next five
        pa.field("loading_s", pa.float64(), nullable=False),
        pa.field("prefill_s", pa.float64(), nullable=False),
        pa.field("decode_s", pa.float64(), nullable=False),
        pa.field("idle_s", pa.float64(), nullable=False),
        pa.field("lost_s", pa.float64(), nullable=False),
        pa.field("output_tokens_per_s", pa.float64()),  # over wall_s
        pa.field("total_tokens_per_s", pa.float64()),
        pa.field("busy_output_tokens_per_s", pa.float64()),  # over prefill_s + decode_s
        *(pa.field(f"{name}_{q}", pa.float64()) for name in LATENCIES for q in _QUANTILES),
        pa.field("currency", pa.string(), nullable=False),
        pa.field("cost", pa.float64(), nullable=False),  # the sum of the next six
        pa.field("loading_cost", pa.float64(), nullable=False),
        pa.field("prefill_cost", pa.float64(), nullable=False),
        pa.field("decode_cost", pa.float64(), nullable=False),
        pa.field("idle_cost", pa.float64(), nullable=False),
        pa.field("lost_cost", pa.float64(), nullable=False),
        pa.field("overhead_cost", pa.float64(), nullable=False),
        pa.field("cost_per_million_output_tokens", pa.float64()),
        pa.field("cost_per_million_total_tokens", pa.float64()),
        pa.field("cost_per_million_uncached_tokens", pa.float64()),
        pa.field("accelerator", pa.string(), nullable=False),
        pa.field("num_accelerators", pa.int64()),  # of one worker; null where none ran
        pa.field("exit_code", pa.int64(), nullable=False),
        pa.field("fournee_version", pa.string()),
        pa.field("vllm_version", pa.string()),  # null where no model ran
    ]
)


def result_schema(carried: pa.Schema) -> pa.Schema:
    """Return the schema of every part of a run that copies the `carried` columns.

    Raises ConfigError where a carried column has the name of one of ours.
    """
    clashes = sorted(set(carried.names) & set(RESULT.names))
    if clashes:
        raise ConfigError(
            f"input.carry_columns={clashes} have the names of result columns; rename them in the input "
            f"(result columns: {', '.join(RESULT.names)})"
        )
    return pa.schema([*RESULT, *(field.with_nullable(True).remove_metadata() for field in carried)])
