"""Ray Data's own LLM processor, at its defaults or tuned: `python -m … rows measured [tuned]`."""

import sys
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq

from tests.benchmarks.throughput.settings import Measured, settings_from_environment, wall_time


def main() -> None:
    """Answer the rows of the first argument, and write what was measured to the second."""
    import ray
    from ray.data.llm import build_processor, vLLMEngineProcessorConfig

    settings = settings_from_environment()
    rows = pq.read_table(sys.argv[1]).select(["id", "prompt", "max_tokens"])
    is_tuned = sys.argv[3:] == ["tuned"]
    on_cpu: dict[str, Any] = (
        {} if settings.engine_core is None else {"placement_group_config": {"bundle_per_worker": {"CPU": 1}}}
    )
    # Tuned: small batches, many of them at once, so that the engine always has requests; its own advice.
    tuned: dict[str, Any] = {"batch_size": 16, "max_concurrent_batches": 32} if is_tuned else {}
    # Its stages are actors of one CPU each: on two, they would wait for each other for ever.
    ray.init("local", num_cpus=16, include_dashboard=False, runtime_env={"env_vars": settings.environment})
    config = vLLMEngineProcessorConfig(
        model_source=settings.folder(),
        engine_kwargs=settings.engine_options,
        concurrency=1,
        runtime_env={"env_vars": settings.environment},
        **tuned,
        **on_cpu,
    )
    processor = build_processor(
        config,
        preprocess=lambda row: {
            "messages": [{"role": "user", "content": row["prompt"]}],
            "sampling_params": {"temperature": 0, "max_tokens": row["max_tokens"], "ignore_eos": True},
        },
        postprocess=lambda row: {
            key: row[key] for key in ("num_input_tokens", "num_generated_tokens", "metrics", "generated_text")
        },
    )
    answers = processor(ray.data.from_arrow(rows)).take_all()
    times = [answer["metrics"] for answer in answers]
    Measured(
        num_rows=len(answers),
        num_prompt_tokens=sum(answer["num_input_tokens"] for answer in answers),
        num_output_tokens=sum(answer["num_generated_tokens"] for answer in answers),
        first_s=wall_time(min(one["queued_ts"] for one in times)),
        last_s=wall_time(max(one["last_token_ts"] for one in times)),
    ).write(Path(sys.argv[2]))
    ray.shutdown()


if __name__ == "__main__":
    main()
