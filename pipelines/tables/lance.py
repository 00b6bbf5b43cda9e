"""Lance tables."""

from collections.abc import Iterator

import pyarrow as pa

from pipelines.config import LanceInput
from pipelines.tables.table import READ_ROWS, Table, name_of, place_of

_AHEAD_BYTES = 64 * 2**20  # read ahead, instead of Lance's 2 GiB


def open_table(config: LanceInput) -> Table:
    """Find the table and its version."""
    import lance

    table = lance.dataset(place_of(config.path), version=config.version)

    def read() -> tuple[pa.Schema, Iterator[pa.RecordBatch]]:
        scanner = table.scanner(
            batch_size=READ_ROWS, batch_readahead=2, fragment_readahead=1, io_buffer_size=_AHEAD_BYTES, scan_in_order=True
        )
        return table.schema, scanner.to_reader()

    # A table made anew in the same place counts from 1 again, at another time.
    written = next(one["timestamp"] for one in table.versions() if one["version"] == table.version)
    return Table(name_of(config.path), f"{table.version}@{written.timestamp():.6f}", read)
