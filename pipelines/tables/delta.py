"""Delta Lake tables."""

from collections.abc import Iterator

import pyarrow as pa

from pipelines.config import DeltaInput
from pipelines.tables.table import Table, name_of, place_of


def open_table(config: DeltaInput) -> Table:
    """Find the table and its version.

    Not with Ray: its `read_delta` refuses tables with deletion vectors (ran) or renamed columns, as new Spark writes them.
    """
    from deltalake import DeltaTable, QueryBuilder

    table = DeltaTable(place_of(config.path), version=config.version)

    def read() -> tuple[pa.Schema, Iterator[pa.Table]]:
        schema = pa.schema(table.schema().to_arrow())
        # One partition: with several, the rows of different files come interleaved, anew each time (measured).
        builder = QueryBuilder({"datafusion.execution.target_partitions": "1"}).register("input", table)
        stream = pa.RecordBatchReader.from_stream(builder.execute("select * from input"))
        # By name: partition columns come last here, wherever they stand in the schema.
        return schema, (pa.Table.from_batches([batch]).select(schema.names) for batch in stream)

    # A table made anew in the same place counts from 0 again, with an id of its own.
    return Table(name_of(config.path), f"{table.version()}@{table.metadata().id}", read)
