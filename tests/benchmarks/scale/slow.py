"""A local folder that answers as slowly as object storage, and counts what it is asked: `slow://<folder>`."""

import threading
import time
from collections import Counter
from typing import Any, ClassVar

import fsspec
from fsspec.implementations.local import LocalFileSystem
from fsspec.spec import AbstractBufferedFile, AbstractFileSystem

_READ_AHEAD_BYTES = 50 * 2**20  # what s3fs reads beyond what it is asked for, unless it is told otherwise
_LIST_PAGE = 1000  # entries that S3 returns at a time


class SlowFileSystem(AbstractFileSystem):
    """Each request takes `request_s`, as many at once as threads ask."""

    protocol = "slow"
    cachable = False
    request_s = 0.03
    asked: ClassVar[Counter[str]] = Counter()
    _lock = threading.Lock()
    _disk = LocalFileSystem()

    @classmethod
    def request(cls, kind: str, count: int = 1) -> None:
        """Wait as long as a request takes."""
        with cls._lock:
            cls.asked[kind] += count
        time.sleep(cls.request_s * count)

    def info(self, path: str, **_: Any) -> dict[str, Any]:
        self.request("HEAD")
        return dict(self._disk.info(self._strip_protocol(path)))

    def ls(self, path: str, detail: bool = True, **_: Any) -> list[Any]:
        entries = self._disk.ls(self._strip_protocol(path), detail=detail)
        self.request("LIST", -(-len(entries) // _LIST_PAGE))
        return list(entries)

    def cat_file(self, path: str, start: int | None = None, end: int | None = None, **_: Any) -> bytes:
        self.request("GET")
        content: bytes = self._disk.cat_file(self._strip_protocol(path), start, end)
        with self._lock:
            self.asked["bytes"] += len(content)
        return content

    def pipe_file(self, path: str, value: bytes, **_: Any) -> None:
        self.request("PUT")
        self._disk.pipe_file(self._strip_protocol(path), value)

    def _open(self, path: str, mode: str = "rb", **options: Any) -> "_SlowFile":
        return _SlowFile(self, path, mode, block_size=options.get("block_size") or _READ_AHEAD_BYTES)

    @classmethod
    def _strip_protocol(cls, path: str) -> str:
        return "/" + str(path).removeprefix("slow://").strip("/")


class _SlowFile(AbstractBufferedFile):
    def _fetch_range(self, start: int, end: int) -> bytes:
        return self.fs.cat_file(self.path, start, end)


def register() -> None:
    """Make `slow://` known."""
    fsspec.register_implementation("slow", SlowFileSystem, clobber=True)
