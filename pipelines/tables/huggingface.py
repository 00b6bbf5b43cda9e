"""Data sets that `datasets` saved to disk."""

import json
from collections.abc import Iterator

import pyarrow as pa

from pipelines.config import HuggingFaceInput
from pipelines.errors import ConfigError
from pipelines.file_systems import file_system
from pipelines.suggest import did_you_mean
from pipelines.tables.table import READ_ROWS, Table, name_of, place_of


def open_table(config: HuggingFaceInput) -> Table:
    """Find the data set and its fingerprint.

    Not with Ray: its `from_huggingface` holds the whole set in memory, and asks the hub first (read in its source).
    """
    path = _split_of(config)
    fs, folder = file_system(path)
    try:
        state = json.loads(fs.cat_file(f"{folder}/state.json"))
    except FileNotFoundError:
        raise ConfigError(
            f"input.path={config.path} holds no data set that save_to_disk wrote; files are read with input=parquet or jsonl"
        ) from None

    def read() -> tuple[pa.Schema, Iterator[pa.Table]]:
        from datasets import DatasetInfo, load_from_disk

        if not state["_data_files"]:  # a set without rows, which datasets 5.2 saves but cannot load
            return DatasetInfo.from_directory(path).features.arrow_schema.remove_metadata(), iter(())
        # Arrow format: nothing is decoded (a picture stays bytes), and a selection or shuffling is followed row by row.
        # The files are mapped into memory: what this process seems to grow by is the system's cache of them.
        rows = load_from_disk(path).with_format("arrow")
        return rows.data.schema.remove_metadata(), rows.iter(READ_ROWS)

    return Table(name_of(path), state["_fingerprint"], read)


def _split_of(config: HuggingFaceInput) -> str:
    path = place_of(config.path).rstrip("/")
    fs, folder = file_system(path)
    if not fs.exists(f"{folder}/dataset_dict.json"):
        if config.split is not None:
            raise ConfigError(f"input.split={config.split}: {config.path} is no data set with splits; set it to null")
        return path
    splits = json.loads(fs.cat_file(f"{folder}/dataset_dict.json"))["splits"]
    if config.split not in splits:
        raise ConfigError(
            f"input.split={config.split or 'null'}: {config.path} has splits{did_you_mean(config.split or '', splits)}"
        )
    return f"{path}/{config.split}"
