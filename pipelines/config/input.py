"""The rows to answer, and what they are read from."""

from typing import Annotated, Literal

from pydantic import Field, JsonValue, PositiveInt

from pipelines.config.strict import Strict, Text, TextOrList


class AnyInput(Strict):
    """The rows to answer, whatever they are read from."""

    id_column: Text | None
    """The column that names a row; null takes the row's number. Ids are carried through as text, never used as keys."""
    ids: Literal["allow", "require_unique"]
    """Whether ids may be null or repeated; `require_unique` reads them all before the run starts."""
    prompt_column: Text | None
    """The column with the prompt's text."""
    messages_column: Text | None
    """The column with a whole conversation, instead of `prompt_column`."""
    request_column: Text | None
    """The column with a whole OpenAI request body, instead of `prompt_column`."""
    tools_column: Text | None
    """The column with the tools that the model may call, as OpenAI writes them."""
    sampling_column: Text | None
    """The column with a row's own sampling parameters: a struct or JSON text, merged over `sampling`."""
    schema_column: Text | None
    """The column with a row's own JSON schema for its answer, as JSON text."""
    expected_column: Text | None
    """The column with the expected answer: `correct` says whether `postprocess` makes the same of it and of the model's."""
    carry_columns: tuple[Text, ...]
    """Input columns to copy into the results."""
    limit: PositiveInt | None
    """Only the first so many rows."""
    order: Literal["as_is", "by_prefix"]
    """The order in which rows are answered; `by_prefix` puts those whose prompts begin alike one after the other."""
    on_bad_file: Literal["fail", "skip"]
    """What to do with a file that cannot be read: refuse the input, or note it in the run and end with exit code 3."""


class ParquetInput(AnyInput):
    """Parquet files."""

    format: Literal["parquet"]
    path: TextOrList
    """Files, folders or globs, local or on object storage; `package://<package>/<file>` is a file that a package ships."""


class JsonlInput(AnyInput):
    """One JSON object a line, plain or compressed."""

    format: Literal["jsonl"]
    path: TextOrList
    """As for Parquet."""


class CsvInput(AnyInput):
    """Delimited text; every value is text, character for character."""

    format: Literal["csv"]
    path: TextOrList
    """As for Parquet."""
    delimiter: Annotated[str, Field(min_length=1, max_length=1)]
    quote: Annotated[str, Field(min_length=1, max_length=1)] | None
    """The character around values that hold a delimiter or a line end; null takes every character as it is."""
    encoding: Text
    """As Python spells it, such as utf-8 or cp1252."""
    columns: tuple[Text, ...] | None
    """The columns' names where the file has no header line; null takes its first line."""


class FilesInput(AnyInput):
    """Files of several formats, each known by its ending; compressed ones too."""

    format: Literal["files"]
    path: TextOrList
    """As for Parquet."""
    encoding: Text
    """That of the CSV and TSV files, as Python spells it."""


class HuggingFaceInput(AnyInput):
    """A data set that `datasets` saved to disk."""

    format: Literal["huggingface"]
    path: Text
    """The folder that `save_to_disk` wrote."""
    split: Text | None
    """The split of a data set that has several."""


class SqlInput(AnyInput):
    """The rows of a SQL query."""

    format: Literal["sql"]
    query: Text
    """Add an `order by`: without one, databases give rows in any order."""
    connection: Text
    """An SQLAlchemy URL without a password, or `env:NAME` where the environment variable NAME holds the URL."""


class DeltaInput(AnyInput):
    """A Delta Lake table."""

    format: Literal["delta"]
    path: Text
    """The table's folder."""
    version: Annotated[int, Field(ge=0)] | None
    """The table's version; null takes the newest, and the run records which it was."""


class IcebergInput(AnyInput):
    """An Iceberg table."""

    format: Literal["iceberg"]
    table: Text
    """The table's identifier, such as namespace.name."""
    catalog: dict[str, JsonValue]
    """The catalog's name and properties, as pyiceberg's `load_catalog` takes them, but no secrets."""
    version: int | None
    """The snapshot id; null takes the newest, and the run records which it was."""


class LanceInput(AnyInput):
    """A Lance table."""

    format: Literal["lance"]
    path: Text
    """The table's folder."""
    version: PositiveInt | None
    """The table's version; null takes the newest, and the run records which it was."""


FileInput = ParquetInput | JsonlInput | CsvInput | FilesInput
TableInput = HuggingFaceInput | SqlInput | DeltaInput | IcebergInput | LanceInput
InputConfig = FileInput | TableInput
