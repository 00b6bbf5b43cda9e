"""Look at the output before a model loads: may the job write there, and is there room?"""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager

from fsspec.implementations.local import LocalFileSystem

from pipelines.errors import ConfigError
from pipelines.storage import Folder

_PROBE = "results/.probe.tmp"
# Measured with zstd: an answer of one word takes 94 bytes in batches of 256 rows and 38 in batches of 4096, one of 400
# letters 296 and 235. Without compression it is more.
_LEAST_ROW_BYTES = 32


@contextmanager
def refusals_explained(run: Folder) -> Iterator[None]:
    """Turn what the storage of a run refuses for good, while the block runs, into a ConfigError that says what to do."""
    try:
        yield
    except (ConfigError, TimeoutError):  # it is explained already, or it refuses for a while
        raise
    except Exception as error:
        raise ConfigError(f"output.path={run.url} cannot be used: {type(error).__name__}: {error}; {_remedy(run)}") from error


def check_writable(run: Folder) -> None:
    """Write a file among the results and delete it. Raises ConfigError where that is refused for good."""
    with refusals_explained(run):
        run.write(_PROBE, b"")
        run.delete(_PROBE)


def check_space(run: Folder, num_rows: int) -> None:
    """Refuse a local disk that cannot hold so many more rows, however short their answers. Raises ConfigError."""
    if not isinstance(run.fs, LocalFileSystem):
        return
    free, needed = shutil.disk_usage(run.path()).free, num_rows * _LEAST_ROW_BYTES
    if free < needed:
        raise ConfigError(
            f"output.path={run.url} has {free / 2**20:,.0f} MiB free, and {num_rows:,} rows take at least "
            f"{needed / 2**20:,.0f} MiB; make room there, or name another disk"
        )


def _remedy(run: Folder) -> str:
    if isinstance(run.fs, LocalFileSystem):
        return "name a folder that this user may write to"
    return (
        "check the bucket's name, and that the environment or the instance gives credentials that may list, read, write "
        "and delete there"
    )
