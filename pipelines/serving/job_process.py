"""Run a batch that came over the endpoint in a process of its own: a driver takes signals, and leaves Ray when it ends."""

import asyncio
import os
import signal
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

_POLL_S = 1.0


async def run_in_process(settings: str, is_cancelled: Callable[[], bool], environment: Mapping[str, str]) -> int:
    """Run a job as `fournee batch` does, with its settings handed over on its standard input."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "jobs.served_batch", stdin=asyncio.subprocess.PIPE, env={**os.environ, **environment},
        cwd=Path(__file__).parents[2],
    )  # fmt: skip
    assert process.stdin is not None
    try:
        process.stdin.write(settings.encode())
        process.stdin.close()
        is_told = False
        while True:
            try:
                return await asyncio.wait_for(asyncio.shield(process.wait()), _POLL_S)
            except TimeoutError:
                if not is_told and await asyncio.to_thread(is_cancelled):
                    process.send_signal(signal.SIGTERM)
                    is_told = True
    finally:
        if process.returncode is None:
            process.send_signal(signal.SIGTERM)
