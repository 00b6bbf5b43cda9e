"""Sources that are tables and not files: copied into one Parquet file, from which the run is planned.

Each is read with its own package, in this process, and not with Ray Data's readers. All rows end in one file that one
process writes, so a cluster adds only the way through its object store: 600,000 rows took 0.9 s from Delta and 0.8 s from
Lance, and through Ray 2.60 4.2 and 2.3 s on the same two cores, without its start. Besides, four of its five readers refuse,
reorder or retype some tables, or hold them whole; each module here says how. And a wrong table is noticed before Ray starts.
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from typing import IO

import pyarrow as pa
import pyarrow.parquet as pq

from pipelines.config import DeltaInput, HuggingFaceInput, IcebergInput, LanceInput, SqlInput, TableInput
from pipelines.errors import ConfigError, RunFailed
from pipelines.tables import delta, huggingface, iceberg, lance, sql
from pipelines.tables.table import Rows, Table

_PACKAGES = {"huggingface": "datasets", "sql": "sqlalchemy", "delta": "deltalake", "iceberg": "pyiceberg", "lance": "lance"}
"""What each format is read with; the format is also the name of the extra that installs it."""
_GROUP_ROWS = 16384  # rows in a row group of the copy; fewer where they are long
_GROUP_BYTES = 64 * 2**20  # from which on a row group is written: it has less than twice as many


def identify(config: TableInput) -> tuple[str, str]:
    """Return a table's name, which holds no secret, and its version, which changes when its rows do.

    Delta, Iceberg and Lance number their versions, `datasets` keeps a fingerprint. A database has no version, so that of a
    query only says which query of which database it is. Raises ConfigError where there is no such table or version, or
    where a package is missing.
    """
    table = _open(config)
    return table.name, table.version


def spool(config: TableInput, target: IO[bytes], version: str) -> None:
    """Write the rows of the table into one Parquet file, as they were in the version that `identify` returned.

    Raises RunFailed where that version is gone meanwhile, or where it cannot be read to its end.
    """
    table = _open(_pinned(config, version))
    if table.version != version:
        raise RunFailed(f"{table.name} changed from version {version} to {table.version} while it was planned; start again")
    with _explained(config):
        schema, rows = table.read()
    with pq.ParquetWriter(target, schema, compression="zstd", write_page_checksum=True) as writer:
        for group in _row_groups(_checked(rows, table), schema, config.limit):
            writer.write_table(group)


def _open(config: TableInput) -> Table:
    package = _PACKAGES[config.format]
    if find_spec(package) is None:
        raise ConfigError(f"input.format={config.format} needs the package {package}: pip install 'fournee[{config.format}]'")
    with _explained(config):
        match config:
            case HuggingFaceInput():
                return huggingface.open_table(config)
            case SqlInput():
                return sql.open_table(config)
            case DeltaInput():
                return delta.open_table(config)
            case IcebergInput():
                return iceberg.open_table(config)
            case LanceInput():
                return lance.open_table(config)


def _pinned(config: TableInput, version: str) -> TableInput:
    """The settings that read the version which `identify` named, where they can say so."""
    number = version.partition("@")[0]
    if isinstance(config, DeltaInput | IcebergInput | LanceInput) and number.isdecimal():
        return config.model_copy(update={"version": int(number)})
    return config


@contextmanager
def _explained(config: TableInput) -> Iterator[None]:
    """Turn what goes wrong with a table into an error that names the setting."""
    try:
        yield
    except ConfigError:
        raise
    except Exception as error:  # noqa: BLE001 - five packages, each lets through whatever its network stack raises
        raise ConfigError(f"{_asked(config)} cannot be read: {_first_line(error)}") from None


def _checked(rows: Iterable[Rows], table: Table) -> Iterator[Rows]:
    try:
        yield from rows
    except Exception as error:  # noqa: BLE001 - as above
        raise RunFailed(f"{table.name} cannot be read to its end: {_first_line(error)}; start again") from None


def _asked(config: TableInput) -> str:
    match config:
        case SqlInput():
            return f"input.query={config.query}"
        case IcebergInput():
            asked = f"input.table={config.table}"
        case _:
            asked = f"input.path={config.path}"
    version = None if isinstance(config, HuggingFaceInput) else config.version
    return asked if version is None else f"{asked} with input.version={version}"


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0] or type(error).__name__


def _row_groups(rows: Iterable[Rows], schema: pa.Schema, limit: int | None) -> Iterator[pa.Table]:
    """Put rows together, or take them apart, so that a row group fits into memory whatever the length of its rows."""
    held: list[pa.Table] = []
    num_rows = num_bytes = 0
    for piece in _pieces(rows, schema, limit):
        held.append(piece)
        num_rows, num_bytes = num_rows + len(piece), num_bytes + piece.nbytes
        if num_rows >= _GROUP_ROWS or num_bytes >= _GROUP_BYTES:
            yield pa.concat_tables(held)
            held, num_rows, num_bytes = [], 0, 0
    if held:
        yield pa.concat_tables(held)


def _pieces(rows: Iterable[Rows], schema: pa.Schema, limit: int | None) -> Iterator[pa.Table]:
    left = limit
    for some in rows:
        table = pa.table(some).cast(schema).slice(0, left)
        size = max(1, min(_GROUP_ROWS, len(table) * _GROUP_BYTES // max(1, table.nbytes)))
        yield from (table.slice(first, size) for first in range(0, len(table), size))
        if left is not None:
            left -= len(table)
            if left == 0:
                return
