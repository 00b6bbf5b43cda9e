"""Uploaded files, kept below `serve.folder`: the content, and beside it a record of what it is and whose."""

import json
import threading
import time
import uuid
from collections.abc import Collection, Iterator
from http import HTTPStatus
from typing import IO, Any

from pipelines.serving.faults import ApiError
from pipelines.storage import Folder

_CHUNK_BYTES = 2**20


class Records:
    """JSON records of one kind, each in a file named by its id; a client sees its own only."""

    def __init__(self, folder: Folder, kind: str, prefix: str):
        self._folder = folder
        self._kind = kind
        self._prefix = prefix
        self._lock = threading.Lock()

    def new_id(self) -> str:
        """An id that nothing has."""
        return f"{self._prefix}{uuid.uuid4().hex[:24]}"

    def put(self, record: dict[str, Any]) -> dict[str, Any]:
        """Write a record, whole or not at all."""
        self._folder.write(self._name(record["id"]), json.dumps(record).encode())
        return record

    def get(self, record_id: str, client: str) -> dict[str, Any]:
        """A client's record; raises ApiError (404)."""
        record = self._read(record_id) if record_id.removeprefix(self._prefix).isalnum() else None
        if record is None or record["client"] != client:
            raise ApiError(HTTPStatus.NOT_FOUND, f"there is no {self._kind} {record_id[:100]!r}", code="not_found")
        return record

    def update(self, record_id: str, *, after: Collection[str] | None = None, **changes: Any) -> dict[str, Any]:
        """Change a record that is there, whoever else changes it.

        One whose status is none of `after` is left, and returned, as it is; None takes any status.
        """
        with self._lock:
            record = self._read(record_id)
            assert record is not None, f"{record_id} is gone"
            if after is not None and record["status"] not in after:
                return record
            return self.put({**record, **changes})

    def all(self) -> list[dict[str, Any]]:
        """All records, the newest first."""
        ids = [name.removesuffix(".json") for name in self._folder.names(self._kind) if name.endswith(".json")]
        found = [record for record in map(self._read, ids) if record is not None]
        return sorted(found, key=lambda record: (record["created_at"], record["id"]), reverse=True)

    def delete(self, record_id: str) -> None:
        """Forget a record."""
        self._folder.delete(self._name(record_id))

    def _read(self, record_id: str) -> dict[str, Any] | None:
        name = self._name(record_id)
        if not self._folder.exists(name):
            return None
        record: dict[str, Any] = json.loads(self._folder.read(name))
        return record

    def _name(self, record_id: str) -> str:
        return f"{self._kind}/{record_id}.json"


class Files:
    """The files of one endpoint."""

    def __init__(self, folder: Folder, most_bytes: int):
        self._folder = folder
        self._most_bytes = most_bytes
        self.records = Records(folder, "files", "file-")

    def add(self, content: IO[bytes], *, name: str, purpose: str, client: str) -> dict[str, Any]:
        """Keep an uploaded file; raises ApiError (413) where it is too large."""
        file_id, num_bytes = self.records.new_id(), 0
        with self._folder.create(self._content(file_id)) as kept:
            while chunk := content.read(_CHUNK_BYTES):
                num_bytes += len(chunk)
                if num_bytes > self._most_bytes:
                    message = f"the file is larger than {self._most_bytes} bytes"
                    raise ApiError(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, message)
                kept.write(chunk)
        return self.note(file_id, self._content(file_id), num_bytes=num_bytes, name=name, purpose=purpose, client=client)

    def note(self, file_id: str, content: str, *, num_bytes: int, name: str, purpose: str, client: str) -> dict[str, Any]:
        """Make a file of what lies in the folder already."""
        return self.records.put({
            "id": file_id, "object": "file", "bytes": num_bytes, "created_at": int(time.time()), "filename": name,
            "purpose": purpose, "status": "processed", "client": client, "content": content,
        })  # fmt: skip

    def url(self, record: dict[str, Any]) -> str:
        """Where a file's content lies, for a job to read."""
        return f"{self._folder.url.rstrip('/')}/{record['content']}"

    def read(self, record: dict[str, Any]) -> Iterator[bytes]:
        """A file's content, piece by piece."""
        with self._folder.fs.open(self._folder.path(record["content"]), "rb") as content:
            while chunk := content.read(_CHUNK_BYTES):
                yield chunk

    def delete(self, record: dict[str, Any]) -> None:
        """Delete a file; what a batch wrote stays in its run folder."""
        self.records.delete(record["id"])
        if record["content"] == self._content(record["id"]):
            self._folder.delete(record["content"])

    def _content(self, file_id: str) -> str:
        return f"files/{file_id}.jsonl"


def shown(record: dict[str, Any]) -> dict[str, Any]:
    """A record as a client sees it."""
    return {key: value for key, value in record.items() if key not in ("client", "content")}
