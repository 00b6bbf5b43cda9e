"""A row becomes a request: its prompt, its tools, its parameters and its seed."""

from collections.abc import Mapping, Sequence
from typing import Any

from pipelines.config import FORMS, BatchConfig, SamplingConfig
from pipelines.errors import ConfigError, ErrorKind, RowError
from pipelines.openai_requests import Body, body_of
from pipelines.parameters import changes_in, merge, row_seed, schema_of
from pipelines.prompts import Renderer, tools_of, without_nulls
from pipelines.rows import Request
from pipelines.structured import check_form
from pipelines.suggest import shown

Changes = dict[str, dict[str, Any]]
"""The parameters that a row sets, by the column that sets them."""


class RequestBuilder:
    """Turns rows into requests. Raises ConfigError where the settings cannot give any.

    A null in a struct is the same as an absent key: Parquet and its like give each row's structs the keys of all others.
    In JSON lines and in JSON text somebody wrote the null, and it stays where it is data (`conversation`, `tools_of`,
    `changes_in` say where). An empty text is no tools, parameters or schema at all: a CSV file has no other null.
    """

    def __init__(self, config: BatchConfig, special_tokens: Sequence[str] = ()):
        self._input = config.input
        self._run = config.sampling
        self._renderer = Renderer(config.prompt, config.input, special_tokens)
        if config.prompt.kind == "raw" and self._input.tools_column is not None:
            column = shown(self._input.tools_column)
            raise ConfigError(f"input.tools_column={column} needs prompt.kind=chat; set that, or input.tools_column=null")
        others = (self._input.request_column, self._input.tools_column, self._input.sampling_column, self._input.schema_column)
        named = [name for name in others if name is not None]
        expected = [self._input.expected_column] if self._input.expected_column is not None else []
        self.columns: list[str] = list(dict.fromkeys([*self._renderer.columns, *named, *expected]))
        structs = [*named, *([self._input.messages_column] if self._input.messages_column is not None else [])]
        self._filled = structs if self._input.format != "jsonl" else []

    def build(self, row: Mapping[str, Any], *, key: str, row_number: int, attempt: int) -> Request:
        """Return the request of a row; its number is that in the whole input; raises RowError."""
        try:
            if self._filled:
                row = {**row, **{name: without_nulls(row[name]) for name in self._filled if name in row}}
            return self._build(row, key, (row_number, attempt))
        except RecursionError:
            raise RowError(ErrorKind.INVALID_REQUEST, "the row is nested too deeply") from None

    def _build(self, row: Mapping[str, Any], key: str, draw: tuple[int, int]) -> Request:
        if self._input.request_column is not None:
            column = self._input.request_column
            body = body_of(row, column)
            name = column if isinstance(body.prompt, str) else f"{column}.messages"
            prompt, flags = self._renderer.complete(body.prompt, name)
            changes = {column: body.changes}
        else:
            prompt, flags = self._renderer.render(row)
            body = Body(prompt, tools=self._tools(row))
            changes = self._changes(row)
        sampling, own_sampling = self._sampling(changes, draw)
        return Request(
            key=key,
            prompt=prompt,
            sampling=sampling,
            embeds=body.is_embedding,
            tools=body.tools,
            chat_template_kwargs=body.chat_template_kwargs,
            flags=flags,
            own_sampling=own_sampling,
        )

    def _tools(self, row: Mapping[str, Any]) -> list[dict[str, Any]] | None:
        column = self._input.tools_column
        return None if column is None else tools_of(_given(row, column), column)

    def _changes(self, row: Mapping[str, Any]) -> Changes:
        changes: Changes = {}
        column, schema_column = self._input.sampling_column, self._input.schema_column
        if column is not None:
            changes[column] = changes_in(_given(row, column), column)
        if schema_column is not None and (schema := _given(row, schema_column)) is not None:
            for form in FORMS:
                if column is not None and form in changes[column]:
                    raise RowError(
                        ErrorKind.INVALID_PARAMETER,
                        f"an answer has one form, but {schema_column} and {column}.{form} are set; set one of them to null",
                    )
            changes[schema_column] = {"json_schema": schema_of(schema, schema_column)}
        return changes

    def _sampling(self, changes: Changes, draw: tuple[int, int]) -> tuple[SamplingConfig, str | None]:
        """The parameters to answer with, and their JSON text where the row has some of its own."""
        sampling = self._run
        for name, own in changes.items():
            sampling = merge(sampling, own, name)
        is_own = sampling is not self._run
        if is_own:
            check_form(sampling)
        names_seed = any(own.get("seed") is not None for own in changes.values())
        if sampling.seed is not None and not names_seed:
            sampling = sampling.model_copy(update={"seed": row_seed(sampling.seed, *draw)})
        return sampling, sampling.model_dump_json() if is_own else None


def _given(row: Mapping[str, Any], column: str) -> Any:
    value = row.get(column)
    return None if isinstance(value, str) and not value.strip() else value
