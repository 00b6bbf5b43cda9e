"""Run a measurement in a process of its own, so that what it takes of memory is its own; and take its times."""

import resource
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from multiprocessing import get_context
from typing import Any

Numbers = dict[str, float]


def peak_mib() -> float:
    """The most memory that this process has had."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def apart(function: Callable[..., Numbers], *arguments: Any) -> Numbers:
    """What the function returns."""
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        return pool.submit(function, *arguments).result()


@contextmanager
def timed(found: Numbers, name: str) -> Iterator[None]:
    """Enter how long the block takes."""
    started = time.perf_counter()
    yield
    found[name] = time.perf_counter() - started
