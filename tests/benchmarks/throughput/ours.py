"""Our batch job, as its command runs it: `python -m … rows measured [override ...]`."""

import subprocess
import sys
import tempfile
from pathlib import Path

import pyarrow.compute as pc
import pyarrow.dataset as ds

from tests.benchmarks.throughput.settings import Measured, settings_from_environment


def main() -> None:
    """Answer the rows of the first argument, and write what was measured to the second."""
    settings = settings_from_environment()
    options = [
        f"engine.kwargs.{key}={str(value).lower()}" for key, value in settings.engine_options.items() if key not in _OURS
    ]
    cpu = ["engine.cpu_threads=1", "engine.cpu_kv_cache_gib=1"] if settings.engine_core is not None else []
    rows = ["input=parquet", f"input.path={sys.argv[1]}", "input.prompt_column=prompt", "input.id_column=id"]
    lengths = ["input.sampling_column=sampling", "sampling.ignore_eos=true"]
    model = [f"model={settings.model}", f"model.max_model_len={settings.max_model_len}"]
    with tempfile.TemporaryDirectory() as folder:
        job = [sys.executable, "-m", "jobs.cli", "batch", f"output.path={folder}/run"]
        command = [*job, *rows, *lengths, *model, *cpu, *options, *sys.argv[3:]]
        subprocess.run(command, check=True)
        columns = ["num_prompt_tokens", "num_output_tokens", "arrived_at", "ttft_s", "generation_s"]
        answers = ds.dataset(f"{folder}/run/results").to_table(columns=columns)
    arrived_s = pc.divide(answers["arrived_at"].cast("int64").cast("float64"), 1e6)
    Measured(
        num_rows=len(answers),
        num_prompt_tokens=pc.sum(answers["num_prompt_tokens"]).as_py(),
        num_output_tokens=pc.sum(answers["num_output_tokens"]).as_py(),
        first_s=pc.min(arrived_s).as_py(),
        last_s=pc.max(pc.add(arrived_s, pc.add(answers["ttft_s"], answers["generation_s"]))).as_py(),
    ).write(Path(sys.argv[2]))


_OURS = {"max_model_len", "dtype", "enforce_eager"}  # said by the model's file, or by our engine on CPUs

if __name__ == "__main__":
    main()
