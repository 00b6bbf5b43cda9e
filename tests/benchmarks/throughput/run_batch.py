"""`vllm run-batch`: a file of OpenAI batch requests in, one of responses out."""

import json
import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pyarrow.parquet as pq

from tests.benchmarks.throughput.settings import Measured, settings_from_environment

_BEGINS = re.compile(r"Running batch")  # its progress bar: the engine is there


def main() -> None:
    """Answer the rows of the first argument, and write what was measured to the second."""
    settings = settings_from_environment()
    folder = settings.folder()
    with tempfile.TemporaryDirectory() as scratch:
        asked, answered = Path(scratch) / "in.jsonl", Path(scratch) / "out.jsonl"
        with asked.open("w") as file:
            for row in pq.read_table(sys.argv[1]).to_pylist():
                body = {
                    "model": folder, "messages": [{"role": "user", "content": row["prompt"]}], "temperature": 0,
                    "max_completion_tokens": row["max_tokens"], "ignore_eos": True,
                }  # fmt: skip
                request = {"custom_id": row["id"], "method": "POST", "url": "/v1/chat/completions", "body": body}
                file.write(f"{json.dumps(request)}\n")
        options = [
            f"--{key.replace('_', '-')}" if value is True else f"--{key.replace('_', '-')}={value}"
            for key, value in settings.engine_options.items()
        ]
        command = [
            sys.executable, "-m", "vllm.entrypoints.openai.run_batch", "-i", str(asked), "-o", str(answered), "--model", folder,
        ]  # fmt: skip
        environment = {**os.environ, "VLLM_LOGGING_LEVEL": "INFO"}
        process = subprocess.Popen([*command, *options], stderr=subprocess.PIPE, text=True, env=environment)
        first_s = 0.0
        assert process.stderr is not None
        for line in process.stderr:
            if not first_s and _BEGINS.search(line):
                first_s = time.time()
        if process.wait() != 0 or not first_s:
            sys.exit(f"run-batch ended with {process.returncode}")
        last_s = answered.stat().st_mtime
        usages = [json.loads(line)["response"]["body"]["usage"] for line in answered.read_text().splitlines()]
    Measured(
        num_rows=len(usages),
        num_prompt_tokens=sum(usage["prompt_tokens"] for usage in usages),
        num_output_tokens=sum(usage["completion_tokens"] for usage in usages),
        first_s=first_s,
        last_s=last_s,
    ).write(Path(sys.argv[2]))


if __name__ == "__main__":
    main()
