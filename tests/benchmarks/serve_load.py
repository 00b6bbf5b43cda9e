"""Ask a running endpoint from many clients at once: every request must be answered rightly, or told to come again later.

`fournee serve`, and then `python -m tests.benchmarks.serve_load --clients 200 --requests 2`; the key is in FOURNEE_API_KEY.
"""

import argparse
import asyncio
import os
import sys
import time
from collections import Counter
from collections.abc import Sequence

import httpx
import numpy as np
from openai import APIStatusError, AsyncOpenAI, OpenAIError

_QUESTION = "What is the capital of France?"


async def _one(
    client: AsyncOpenAI, options: argparse.Namespace, found: "Counter[str]", times_s: list[tuple[float, float]]
) -> None:
    """Ask for one streamed answer, and note what came of it."""
    began, first_s, text = time.perf_counter(), None, ""
    try:
        stream = await client.chat.completions.create(
            model=options.model, messages=[{"role": "user", "content": _QUESTION}], max_tokens=options.tokens, stream=True
        )
        async for piece in stream:
            text += piece.choices[0].delta.content or "" if piece.choices else ""
            first_s = first_s or (time.perf_counter() - began if text else None)
    except APIStatusError as error:
        has_time = "retry-after" in error.response.headers
        found[f"{error.status_code}{'' if has_time or error.status_code != 429 else ' without Retry-After'}"] += 1
    except OpenAIError as error:
        found[type(error).__name__] += 1
    else:
        found["right" if options.expect in text else f"wrong: {text[:40]!r}"] += 1
        times_s.append((first_s or 0.0, time.perf_counter() - began))


async def _load(options: argparse.Namespace) -> tuple["Counter[str]", list[tuple[float, float]]]:
    found: Counter[str] = Counter()
    times_s: list[tuple[float, float]] = []
    # One pool without a limit: 200 pools would spend their time on reading certificates.
    http = httpx.AsyncClient(timeout=options.timeout_s, limits=httpx.Limits(max_connections=None))
    key = os.environ.get("FOURNEE_API_KEY", "none")
    async with AsyncOpenAI(base_url=f"{options.url}/v1", api_key=key, max_retries=0, http_client=http) as client:

        async def ask_in_turn() -> None:
            for _ in range(options.requests):
                await _one(client, options, found, times_s)

        await asyncio.gather(*(ask_in_turn() for _ in range(options.clients)))
    return found, times_s


def main(arguments: Sequence[str] | None = None) -> int:
    """Run it; returns 1 where a request came to anything but a right answer or a 429."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--url", default="http://127.0.0.1:8000")
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--clients", type=int, default=200)
    parser.add_argument("--requests", type=int, default=1, help="of each client, one after the other")
    parser.add_argument("--tokens", type=int, default=8)
    parser.add_argument("--expect", default="Paris", help="what a right answer holds")
    parser.add_argument("--timeout-s", type=float, default=300.0)
    options = parser.parse_args(arguments)
    began = time.perf_counter()
    found, times_s = asyncio.run(_load(options))
    took_s = time.perf_counter() - began
    sys.stdout.write(f"{options.clients} clients, {sum(found.values())} requests in {took_s:.1f} s: {dict(found)}\n")
    for name, values in zip(("first token", "whole answer"), zip(*times_s, strict=True), strict=False):
        sys.stdout.write(f"{name}: p50 {np.quantile(values, 0.5):.2f} s, p95 {np.quantile(values, 0.95):.2f} s\n")
    return 0 if set(found) <= {"right", "429"} and found["right"] else 1


if __name__ == "__main__":
    sys.exit(main())
