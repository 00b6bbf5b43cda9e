"""Raw vLLM: `vllm.LLM` in this process, all rows in one `chat`."""

import os
import sys
from pathlib import Path

import pyarrow.parquet as pq

from tests.benchmarks.throughput.settings import Measured, settings_from_environment, wall_time


def main() -> None:
    """Answer the rows of the first argument, and write what was measured to the second."""
    from vllm import LLM, SamplingParams

    rows = pq.read_table(sys.argv[1]).to_pylist()
    settings = settings_from_environment()
    more = {"distributed_executor_backend": "uni"} if settings.engine_core is not None else {}
    llm = LLM(model=settings.folder(), disable_log_stats=False, **settings.engine_options, **more)
    outputs = llm.chat(
        [[{"role": "user", "content": row["prompt"]}] for row in rows],
        [SamplingParams(temperature=0, max_tokens=row["max_tokens"], ignore_eos=True) for row in rows],
        use_tqdm=False,
    )
    times = [output.metrics for output in outputs]
    Measured(
        num_rows=len(outputs),
        num_prompt_tokens=sum(len(output.prompt_token_ids) for output in outputs),
        num_output_tokens=sum(len(output.outputs[0].token_ids) for output in outputs),
        first_s=wall_time(min(one.queued_ts for one in times)),
        last_s=wall_time(max(one.last_token_ts for one in times)),
    ).write(Path(sys.argv[2]))
    os._exit(0)  # nothing is left to say, and an engine takes seconds to go


if __name__ == "__main__":
    main()
