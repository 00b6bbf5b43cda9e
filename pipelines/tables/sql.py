"""The rows of a SQL query, typed by their values: each database describes a result's columns in its own way, or not at all.

Not with Ray: its `read_sql` holds the whole result in one task, and lets Arrow guess: the number 1 and the text 'x' in one
column end the job, an empty result has no columns (ran with Ray 2.60).
"""

import hashlib
import os
import pickle
import re
import tempfile
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from datetime import date, datetime, time, timedelta
from decimal import Decimal
from itertools import islice
from pathlib import Path
from typing import IO, Any
from urllib.parse import unquote_plus

import pyarrow as pa

from pipelines.config import SqlInput
from pipelines.errors import ConfigError
from pipelines.readers.jsonl import as_text
from pipelines.tables.table import Table

_ROWS = 4096  # fetched, noted and turned into Arrow at a time
_SECRET = re.compile(r"(?i)((?:passw|pwd|token|secret)[^=&;]*)=[^&;]*")
_EXACT_AS_FLOAT = 2**53
_INT64 = 2**63
_DECIMAL_DIGITS = 76
_TYPES = {
    "bool": pa.bool_(),
    "float": pa.float64(),
    "bytes": pa.binary(),
    "date": pa.date32(),
    "time": pa.time64("us"),
    "duration": pa.duration("us"),
    "datetime": pa.timestamp("us"),
    "datetime with a zone": pa.timestamp("us", "UTC"),
}


@dataclass(slots=True)
class _Column:
    """What the values of a column have been so far."""

    kinds: set[str] = field(default_factory=set)
    whole_digits: int = 0
    scale: int = 0

    def add(self, value: Any) -> None:
        if value is None:
            return
        self.kinds.add(_kind(value))
        if isinstance(value, Decimal) and value.is_finite():
            _, digits, exponent = value.as_tuple()
            self.whole_digits = max(self.whole_digits, len(digits) + int(exponent))
            self.scale = max(self.scale, -int(exponent))

    def type(self) -> pa.DataType:
        """The type that holds every value exactly; text where no other does, or where there is no value."""
        if self.kinds and self.kinds <= {"int", "long"}:
            return pa.int64()
        if self.kinds == {"int", "float"}:
            return pa.float64()
        if self.kinds == {"decimal"} and self.whole_digits + self.scale <= _DECIMAL_DIGITS:
            digits = max(1, self.whole_digits + self.scale)
            return pa.decimal128(digits, self.scale) if digits <= 38 else pa.decimal256(digits, self.scale)
        (kind,) = self.kinds if len(self.kinds) == 1 else ("text",)
        return _TYPES.get(kind, pa.string())


def open_table(config: SqlInput) -> Table:
    """Find the database, and a digest of query and connection: a database has no version.

    Raises ConfigError where the connection is no URL, holds a secret, or needs a driver that is missing.
    """
    url = _url(config)
    connection = _SECRET.sub(r"\1=", _without_password(url))
    digest = hashlib.sha256(f"{connection}\0{config.query}".encode()).hexdigest()
    return Table(_name(url), f"query:{digest[:32]}", lambda: _read(config, url))


def _read(config: SqlInput, url: Any) -> tuple[pa.Schema, Iterator[pa.RecordBatch]]:
    """Run the query.

    Its rows are kept in a temporary file until all are seen, so that no type depends on which of them came first.
    """
    from sqlalchemy import NullPool, create_engine

    notes = tempfile.TemporaryFile()  # noqa: SIM115 - closed with the rows below
    options = {
        "stream_results": True,  # else some drivers fetch the whole result at once
        "max_row_buffer": _ROWS,
        "no_parameters": True,  # a % in the query is a %
    }
    with create_engine(url, poolclass=NullPool).connect() as connection:
        result = connection.execution_options(**options).exec_driver_sql(config.query)
        if not result.returns_rows:
            raise ConfigError(f"input.query={config.query} returns no rows; use a select")
        names = list(result.keys())
        columns = _note(islice(result, config.limit), names, notes)
    schema = pa.schema([(name, column.type()) for name, column in zip(names, columns, strict=True)])
    return schema, _noted(notes, schema)


def _note(rows: Iterator[Any], names: Sequence[str], notes: IO[bytes]) -> list[_Column]:
    columns = [_Column() for _ in names]
    while some := list(islice(rows, _ROWS)):
        values = [
            [_plain(value, name) for value in column] for name, column in zip(names, zip(*some, strict=True), strict=True)
        ]
        for column, column_values in zip(columns, values, strict=True):
            for value in column_values:
                column.add(value)
        pickle.dump(values, notes)
    notes.seek(0)
    return columns


def _noted(notes: IO[bytes], schema: pa.Schema) -> Iterator[pa.RecordBatch]:
    with notes:
        while True:
            try:
                columns = pickle.load(notes)
            except EOFError:
                return
            arrays = [
                pa.array([as_text(value) for value in values] if field.type == pa.string() else values, field.type)
                for values, field in zip(columns, schema, strict=True)
            ]
            yield pa.RecordBatch.from_arrays(arrays, schema=schema)


def _plain(value: Any, name: str) -> Any:
    """The value as one of the types that `_kind` knows."""
    if value is None or isinstance(value, bool | int | float | str | bytes | Decimal | date | time | timedelta):
        return value
    if isinstance(value, memoryview | bytearray):
        return bytes(value)
    if isinstance(value, dict | list | uuid.UUID):  # JSON and array columns
        return as_text(value)
    raise ConfigError(
        f"input.query: the column {name} has values of the database's own type {type(value).__name__}; "
        "cast it to text, a number or a date in the query"
    )


def _kind(value: Any) -> str:
    if isinstance(value, int) and not isinstance(value, bool):
        if abs(value) <= _EXACT_AS_FLOAT:
            return "int"
        return "long" if -_INT64 <= value < _INT64 else "text"  # a long is exact as a whole number, but not as a float
    if isinstance(value, Decimal):
        return "decimal" if value.is_finite() else "text"
    if isinstance(value, datetime):
        return "datetime" if value.tzinfo is None else "datetime with a zone"
    if isinstance(value, time) and value.tzinfo is not None:
        return "text"
    kinds = {bool: "bool", float: "float", bytes: "bytes", date: "date", time: "time", timedelta: "duration"}
    return next((kind for one, kind in kinds.items() if isinstance(value, one)), "text")


def _url(config: SqlInput) -> Any:
    """The connection as SQLAlchemy's URL; no message here shows it, for the secrets that it may hold."""
    from sqlalchemy import create_engine, make_url
    from sqlalchemy.exc import ArgumentError, NoSuchModuleError

    variable = config.connection.removeprefix("env:") if config.connection.startswith("env:") else None
    asked = f"input.connection=env:{variable}" if variable else "input.connection"
    text = os.environ.get(variable) if variable else config.connection
    if text is None:
        raise ConfigError(f"{asked}: the environment variable {variable} is not set; set it to an SQLAlchemy URL")
    try:
        url = make_url(text)
        _check_settings(url, variable)
        create_engine(url)
    except NoSuchModuleError:
        raise ConfigError(f"{asked}: SQLAlchemy has no dialect {url.drivername}; install the package that brings it") from None
    except ConfigError:
        raise
    except (ArgumentError, ValueError):
        raise ConfigError(f"{asked} is no SQLAlchemy URL, such as postgresql+psycopg://user@host/database") from None
    except ModuleNotFoundError as error:
        raise ConfigError(f"{asked} needs the database's driver {error.name}; install it with pip") from None
    return url


def _check_settings(url: Any, variable: str | None) -> None:
    """Refuse a secret that would be recorded, and a misspelt SQLite file, of which SQLite would make a new one."""
    if variable is None and (url.password is not None or _SECRET.search(_without_password(url))):
        raise ConfigError(
            "input.connection holds a password, and would be kept in the run's record; "
            "put the URL into an environment variable and set input.connection=env:NAME"
        )
    is_file = url.get_backend_name() == "sqlite" and url.database not in (None, "", ":memory:")
    if is_file and not url.database.startswith("file:") and not Path(url.database).exists():
        raise ConfigError(f"input.connection: there is no SQLite file {url.database}")


def _without_password(url: Any) -> str:
    from sqlalchemy import URL

    plain = URL.create(url.drivername, url.username, None, url.host, url.port, url.database, url.query)
    return unquote_plus(plain.render_as_string())  # the options of an ODBC connection are encoded in one of the URL's


def _name(url: Any) -> str:
    """The database without user, password and options."""
    from sqlalchemy import URL

    name = URL.create(url.drivername, host=url.host, port=url.port, database=url.database)
    return str(name)
