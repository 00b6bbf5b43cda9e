"""Iceberg tables."""

import re
from collections.abc import Iterator
from typing import Any

import pyarrow as pa

from pipelines.config import IcebergInput
from pipelines.errors import ConfigError
from pipelines.tables.table import Table

_SECRET = re.compile(r"(passw(or)?d|token|credential|secret|access-key|account-key|connection-string|authorization)$", re.I)
_URL_PASSWORD = re.compile(r"://[^/@]*:[^/@]+@")


def open_table(config: IcebergInput) -> Table:
    """Find the table and its snapshot.

    Not with Ray: its `read_iceberg` puts a table's files into another order, the largest first (ran).
    """
    from pyiceberg.catalog import load_catalog
    from pyiceberg.io.pyarrow import ArrowScan, schema_to_pyarrow

    _refuse_secrets(config)
    properties: dict[str, Any] = dict(config.catalog)
    table = load_catalog(properties.pop("name", None), **properties).load_table(config.table)
    snapshot = table.current_snapshot() if config.version is None else table.snapshot_by_id(config.version)
    if snapshot is None and config.version is not None:
        raise ConfigError(f"input.version={config.version}: the table {config.table} has no such snapshot")

    def read() -> tuple[pa.Schema, Iterator[pa.RecordBatch]]:
        scan = table.scan(snapshot_id=snapshot.snapshot_id if snapshot else None)
        reader = ArrowScan(table.metadata, table.io, scan.projection(), scan.row_filter)
        # One file at a time, because each call holds all files that it is given in memory. Where a list of structs is null,
        # pyiceberg 0.12 reads (and writes) an empty one: apache/iceberg-python#3833.
        rows = (batch for task in scan.plan_files() for batch in reader.to_record_batches([task]))
        return schema_to_pyarrow(scan.projection(), include_field_ids=False), rows

    return Table(f"{table.catalog.name}.{config.table}", str(snapshot.snapshot_id) if snapshot else "empty", read)


def _refuse_secrets(config: IcebergInput) -> None:
    """Settings are kept in the run's record, so what pyiceberg can take from elsewhere must not stand in them."""
    for key, value in config.catalog.items():
        if _SECRET.search(key) or (isinstance(value, str) and _URL_PASSWORD.search(value)):
            name = str(config.catalog.get("name", "default"))
            variable = f"PYICEBERG_CATALOG__{name}__{key.replace('.', '__').replace('-', '_')}".upper()
            raise ConfigError(
                f"input.catalog.{key} holds a secret, and would be kept in the run's record; "
                f"set the environment variable {variable} instead, or put it into ~/.pyiceberg.yaml"
            )
