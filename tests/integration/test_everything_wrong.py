"""One folder with a file of every format and every fault that rows and files are known to have, through one job.

Each fault is a public bug report's: the row fails alone, with a reason, and all others are answered as they were written.
"""

import gzip
import json
from collections import Counter
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from tests.integration.conftest import Fournee

LONG = "word " * 300

# Every line of the JSON lines file, and what becomes of it: an error kind, or None for an answer.
LINES: list[tuple[Any, str | None]] = [
    ({"id": "007", "prompt": "2024-01-01"}, None),
    ({"id": 9007199254740993, "prompt": "an id beyond 2^53"}, None),
    ({"id": 2**70, "prompt": "an id beyond every integer type"}, None),
    ({"id": None, "prompt": "an id that is null"}, None),
    ({"id": "same", "prompt": "an id that stands twice"}, None),
    ({"id": "same", "prompt": "the second of them"}, None),
    ({"id": "emoji", "prompt": "👩‍👩‍👧 مرحبا \u0000 a" + "\u0301" * 1000}, None),
    ({"id": "marker", "prompt": "ignore this <|echo|> and go on"}, None),  # flagged
    ({"id": "cool", "prompt": "with parameters of its own", "sampling": {"max_tokens": 2, "temperature": None}}, None),
    ({"id": "true", "prompt": '{"a": 1}', "schema": '{"type": "object", "properties": {"a": {"type": "integer"}}}'}, None),
    ("{broken", "malformed_row"),
    ('"a bare text"', "malformed_row"),
    ("[1, 2]", "malformed_row"),
    ('{"id": "half", "prompt": "half an emoji \\ud83d"}', "invalid_text"),
    ({"id": "number", "prompt": 12}, "invalid_text"),
    ({"id": "list", "prompt": ["a", "b"]}, "invalid_text"),
    ({"id": "null", "prompt": None}, "missing_value"),
    ({"id": "absent"}, "missing_value"),
    ({"id": "empty", "prompt": ""}, "empty_prompt"),
    ({"id": "space", "prompt": " \n\t "}, "empty_prompt"),
    ({"id": "long", "prompt": LONG}, "prompt_too_long"),
    ({"id": "cold", "prompt": "hi", "sampling": {"temperature": -1}}, "invalid_parameter"),
    ({"id": "text", "prompt": "hi", "sampling": {"temperature": "0.5"}}, "invalid_parameter"),
    ({"id": "none", "prompt": "hi", "sampling": {"max_tokens": 0}}, "invalid_parameter"),
    ({"id": "stop", "prompt": "hi", "sampling": {"stop": [""]}}, "invalid_parameter"),
    ({"id": "unknown", "prompt": "hi", "sampling": {"guided_decoding": {}}}, "invalid_parameter"),
    ({"id": "twice", "prompt": "hi", "sampling": {"n": 3, "temperature": 0}}, "invalid_parameter"),
    ({"id": "schema", "prompt": "hi", "schema": "{not json"}, "invalid_schema"),
    ({"id": "type", "prompt": "hi", "schema": '{"type": "nonsense"}'}, "invalid_schema"),
    ({"id": "said", "prompt": "no JSON at all", "schema": '{"type": "object"}'}, "invalid_json"),
    ({"id": "other", "prompt": '{"a": "x"}', "schema": '{"properties": {"a": {"type": "integer"}}}'}, "invalid_output"),
    (
        {"id": "cut", "prompt": '{"a": "b c d e"}', "schema": '{"type": "object"}', "sampling": {"max_tokens": 2}},
        "truncated",
    ),
]

# Text of a CSV file, line by line: every value is text, character for character.
CSV = [
    ("id,prompt,note", "header"),
    ("007,true,a", None),
    ("2024-01-01,12,NA", None),
    ('q,"two\nlines, and a comma",b', None),
    ("few,values", "malformed_row"),
    ("many,values,in,here", "malformed_row"),
    ("e,,c", "empty_prompt"),
]


def write_everything(folder: Path) -> None:
    folder.mkdir()
    lines = [line if isinstance(line, str) else json.dumps(line, ensure_ascii=False) for line, _ in LINES]
    (folder / "a.jsonl").write_text(
        "\ufeff" + "\n\n".join(lines), encoding="utf-8"
    )  # a byte order mark, blank lines, no last end
    with gzip.open(folder / "b.ndjson.gz", "wt", encoding="utf-8") as file:
        file.write('{"id": "zipped", "prompt": "from a compressed file"}\n{"id": "bad"\n')
    (folder / "c.csv").write_text("\n".join(line for line, _ in CSV), encoding="utf-8")
    (folder / "d.tsv").write_text('id\tprompt\tnote\nx\ta "quoted" word\t\n', encoding="utf-8")
    own = [{"max_tokens": 1, "temperature": None}, {"max_tokens": None, "temperature": 0.5}, None]
    table = pa.table(
        {
            "id": pa.array([9007199254740993, None, 3], pa.int64()),
            "prompt": pa.array(["one two", "three four", None], pa.large_string()),
            "sampling": pa.array(own, pa.struct([("max_tokens", pa.int64()), ("temperature", pa.float64())])),
        }
    )
    pq.write_table(table, folder / "e.parquet")
    pq.write_table(table.slice(0, 0), folder / "f.parquet")  # no rows
    (folder / "g.jsonl").write_text("")  # no rows

    whole = (folder / "e.parquet").read_bytes()
    (folder / "bad_garbage.parquet").write_bytes(b"this is no Parquet file at all")
    (folder / "bad_cut.parquet").write_bytes(whole[:-20])
    (folder / "bad_empty.parquet").write_bytes(b"")
    (folder / "bad_cut.jsonl.gz").write_bytes((folder / "b.ndjson.gz").read_bytes()[:-10])


def test_every_row_of_everything_that_is_wrong_comes_out_once(fournee: Fournee, tmp_path: Path) -> None:
    folder = tmp_path / "in"
    write_everything(folder)
    command = [
        "engine=echo", "engine.max_model_len=200", "engine.rows_per_batch=16", "input=files", f"input.path={folder}",
        "input.id_column=id", "input.sampling_column=sampling", "input.schema_column=schema", "sampling.max_tokens=100",
        "errors.max_failed_fraction=1",
    ]  # fmt: skip
    refused = fournee.run(*command)
    assert refused.code == 2
    for name in ("bad_garbage.parquet", "bad_cut.parquet", "bad_empty.parquet", "bad_cut.jsonl.gz"):
        assert name in refused.err  # all of them at once

    done = fournee.run(*command, "input.on_bad_file=skip")
    assert done.code == 3, done.err  # files are missing, so nobody may take it for complete
    rows = fournee.table().to_pylist()
    by_file: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        by_file.setdefault(Path(row["source"]).name, []).append(row)

    assert [row["error_kind"] for row in by_file["a.jsonl"]] == [kind for _, kind in LINES]
    assert [row["error_kind"] for row in by_file["b.ndjson.gz"]] == [None, "malformed_row"]
    assert [row["error_kind"] for row in by_file["c.csv"]] == [kind for _, kind in CSV[1:]]
    assert [row["text"] for row in by_file["d.tsv"]] == ['a "quoted" word']
    assert [row["error_kind"] for row in by_file["e.parquet"]] == [None, None, "missing_value"]
    assert set(by_file) == {"a.jsonl", "b.ndjson.gz", "c.csv", "d.tsv", "e.parquet"}

    expected = Counter(kind for _, kind in LINES) + Counter(kind for _, kind in CSV[1:])
    expected += Counter({"malformed_row": 1, "missing_value": 1})
    del expected[None]
    summary = json.loads((fournee.folder / "stats" / "summary.json").read_text())
    assert summary["error_kinds"] == dict(expected)
    assert summary["num_rows"] == summary["num_ok"] + summary["num_failed"] == len(rows) == len(LINES) + 6 + 2 + 1 + 3
    assert summary["num_failed"] == sum(expected.values())
    assert {Path(path).name for path in summary["bad_files"]} == {
        "bad_garbage.parquet", "bad_cut.parquet", "bad_empty.parquet", "bad_cut.jsonl.gz",
    }  # fmt: skip

    answered = {row["id"]: row for row in by_file["a.jsonl"] if row["status"] == "ok"}
    assert {"007", "9007199254740993", str(2**70), "same", "emoji"} <= set(answered)
    assert [row["id"] for row in by_file["a.jsonl"]].count("same") == 2
    for row, (line, kind) in zip(by_file["a.jsonl"], LINES, strict=True):
        if kind is None and row["sampling"] is None:
            assert row["text"] == " ".join(line["prompt"].split())  # what the echo engine makes of it, and nothing else
    assert answered["marker"]["flags"] == ["special_tokens"]
    assert (answered["cool"]["num_output_tokens"], json.loads(answered["cool"]["sampling"])["max_tokens"]) == (2, 2)
    assert json.loads(answered["true"]["parsed"]) == {"a": 1}
    cut = next(row for row in by_file["a.jsonl"] if row["id"] == "cut")
    assert (cut["text"], cut["finish_reason"]) == ('{"a": "b', "length")  # what was paid for is kept
    assert [row["id"] for row in by_file["c.csv"][:3]] == ["007", "2024-01-01", "q"]
    assert [row["text"] for row in by_file["c.csv"][:3]] == ["true", "12", "two lines, and a comma"]
    assert [row["id"] for row in by_file["e.parquet"]] == ["9007199254740993", None, "3"]
    assert [row["num_output_tokens"] for row in by_file["e.parquet"]] == [1, 2, None]

    for kind in list(expected)[:3]:
        assert kind in done.out or "other kinds" in done.out
    again = fournee.run(*command, "input.on_bad_file=skip")
    assert (again.code, "is finished; nothing to do" in again.err) == (3, True)
