"""Input files of any size, and a folder to work in."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from shutil import copyfile, rmtree
from tempfile import mkdtemp

import pyarrow as pa
import pyarrow.parquet as pq

_ROWS_PER_FILE = 1_000_000
_ROWS_PER_GROUP = 50_000


@contextmanager
def work_folder(kept: Path | None) -> Iterator[Path]:
    """A folder of its own, deleted afterwards; or the given one, which stays."""
    folder = kept or Path(mkdtemp(prefix="scale-"))
    folder.mkdir(parents=True, exist_ok=True)
    try:
        yield folder
    finally:
        if kept is None:
            rmtree(folder)


def write_rows(folder: Path, num_rows: int) -> Path:
    """Rows with an id and a prompt of about 100 characters, a million to a file; files that are there already stay."""
    place = folder / f"rows-{num_rows}"
    place.mkdir(parents=True, exist_ok=True)
    for number, first in enumerate(range(0, num_rows, _ROWS_PER_FILE)):
        path = place / f"{number:05d}.parquet"
        if not path.exists():
            rows = range(first, min(first + _ROWS_PER_FILE, num_rows))
            questions = [f"what is the sum of {i} and {i * 7}, and how would you explain it to a child of ten?" for i in rows]
            prompts = [f"Question {i}: {question}" for i, question in zip(rows, questions, strict=True)]
            table = pa.table({"id": [f"row-{i}" for i in rows], "prompt": prompts})
            pq.write_table(table, path, row_group_size=_ROWS_PER_GROUP)
    return place


def write_footers(folder: Path, num_files: int, num_rows: int) -> Path:
    """Files that claim so many rows together; a footer counts a column of nulls as it does any other, in some bytes."""
    place = folder / f"footers-{num_files}-{num_rows}"
    place.mkdir(parents=True, exist_ok=True)
    each = num_rows // num_files
    first = place / "00000.parquet"
    table = pa.table({"id": pa.nulls(each, pa.string()), "prompt": pa.nulls(each, pa.string())})
    pq.write_table(table, first, row_group_size=_ROWS_PER_GROUP)
    for number in range(1, num_files):
        copyfile(first, place / f"{number:05d}.parquet")
    return place
