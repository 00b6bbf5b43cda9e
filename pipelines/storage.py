"""Folders on any fsspec file system, whose files appear whole or not at all."""

import errno
import logging
import os
import tempfile
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import IO, Any, TypeVar

import pyarrow.fs as pafs
from fsspec.implementations.local import LocalFileSystem

from pipelines.file_systems import arrow_file_system, file_system
from pipelines.patience import patiently

logger = logging.getLogger(__name__)

T = TypeVar("T")


@dataclass(frozen=True)
class Folder:
    """A folder whose files appear whole or not at all (elsewhere than on local disks: by one PUT). Cheap to send along.

    Whatever is asked of it is asked again for `patience_s` while its storage refuses for a while (`patience.is_passing`);
    then comes a TimeoutError.
    """

    url: str
    patience_s: float = 0.0

    @cached_property
    def _place(self) -> tuple[Any, str]:
        fs, path = file_system(self.url)
        return fs, path.rstrip("/")

    def __getstate__(self) -> dict[str, Any]:
        # The other process may run in another folder: a relative path would name another place there.
        url = self.path() if isinstance(self.fs, LocalFileSystem) else self.url
        return {"url": url, "patience_s": self.patience_s}

    @property
    def fs(self) -> Any:
        """The fsspec file system."""
        return self._place[0]

    @property
    def arrow(self) -> pafs.FileSystem:
        """The same file system for Arrow."""
        return arrow_file_system(self.fs)

    def path(self, name: str = "") -> str:
        """The path of a file in the folder, within its file system."""
        return f"{self._place[1]}/{name}" if name else self._place[1]

    def patiently(self, action: Callable[[], T], name: str = "") -> T:
        """Do something with a file of the folder that may be done twice, as patiently as the folder's own operations are."""
        return patiently(action, f"{self.url.rstrip('/')}/{name}", self.patience_s)

    def exists(self, name: str) -> bool:
        """Whether the file is there now (no cached listing is asked)."""

        def look() -> bool:
            self.fs.invalidate_cache()
            try:
                self.fs.info(self.path(name))  # not `exists`, which takes a local disk's errors for a no
            except (FileNotFoundError, NotADirectoryError):
                return False
            return True

        return self.patiently(look, name)

    def read(self, name: str) -> bytes:
        """Return the whole file."""
        content: bytes = self.patiently(lambda: self.fs.cat_file(self.path(name)), name)
        return content

    def write(self, name: str, content: bytes) -> None:
        """Write the whole file or nothing."""

        def put() -> None:
            if isinstance(self.fs, LocalFileSystem):
                with _create_local(Path(self.path(name))) as file:
                    file.write(content)
            else:
                self.fs.pipe_file(self.path(name), content)

        self.patiently(put, name)

    @contextmanager
    def create(self, name: str) -> Iterator[IO[bytes]]:
        """Open a file that appears only when the block ends well.

        Locally a temporary file, fsync, rename, fsync of the folder; elsewhere a temporary file that is uploaded as a whole
        (only there with patience: the block cannot be run twice).
        """
        path = self.path(name)
        if isinstance(self.fs, LocalFileSystem):
            with _create_local(Path(path)) as file:
                yield file
            return
        with tempfile.NamedTemporaryFile() as file:
            yield file
            file.flush()
            self.patiently(lambda: self.fs.put_file(file.name, path), name)

    def names(self, folder: str = "") -> list[str]:
        """Return the names of the files in a sub-folder, sorted; temporary ones are left out, a missing folder is empty."""
        entries = (entry for entry in self._entries(folder) if entry["type"] == "file")
        names = (entry["name"].rsplit("/", 1)[-1] for entry in entries)
        return sorted(name for name in names if not name.startswith("."))

    def is_empty(self) -> bool:
        """Whether nothing is there, or only what killed writers left."""
        return not any(entry["type"] == "directory" for entry in self._entries()) and not self.names()

    def _entries(self, folder: str = "") -> list[dict[str, Any]]:
        def look() -> list[dict[str, Any]]:
            self.fs.invalidate_cache()
            try:
                entries = self.fs.ls(self.path(folder), detail=True)
            except FileNotFoundError:
                return []
            # Consoles of object storage mark a folder by an empty file of its own name.
            return [entry for entry in entries if entry["name"].rstrip("/") != self.path(folder)]

        return self.patiently(look, folder)

    def delete(self, name: str) -> None:
        """Delete a file, if it is there."""
        with suppress(FileNotFoundError):  # a second try may find that the first was heard
            self.patiently(lambda: self.fs.rm_file(self.path(name)), name)

    def remove_below(self, folder: str) -> None:
        """Delete a sub-folder and all it holds, but for what somebody else writes there meanwhile."""
        try:
            self.patiently(lambda: self.fs.rm(self.path(folder), recursive=True), folder)
        except OSError as error:
            if not isinstance(error, FileNotFoundError) and error.errno != errno.ENOTEMPTY:
                raise

    def remove(self, *, first: str = "", last: str = "") -> None:
        """Delete the folder and all it holds, one file before all others and one after them, whatever interrupts it."""

        def empty() -> None:
            self.fs.invalidate_cache()
            if not self.fs.exists(self.path()):
                return
            if first and self.fs.exists(self.path(first)):
                self.fs.rm(self.path(first))
            for entry in self.fs.ls(self.path(), detail=False):
                if entry.rstrip("/").rsplit("/", 1)[-1] != last:
                    self.fs.rm(entry, recursive=True)
            if self.fs.exists(self.path()):  # on object storage, a folder goes with its last file
                self.fs.rm(self.path(), recursive=True)

        self.patiently(empty)

    def sweep(self, folder: str) -> None:
        """Delete what killed writers left in a sub-folder: temporary files, and on S3 the hidden halves of large uploads."""
        if isinstance(self.fs, LocalFileSystem):
            for leftover in Path(self.path(folder)).glob(".*.tmp"):
                leftover.unlink(missing_ok=True)
        elif hasattr(self.fs, "call_s3"):  # elsewhere such halves vanish after a week, and cost nothing
            try:
                self.patiently(lambda: self._abort_uploads(folder), folder)
            except OSError as error:  # they cost a little, and listing them is a right that nothing else here needs
                logger.info("%s/%s: unfinished uploads could not be looked for: %s", self.url, folder, error)

    def _abort_uploads(self, folder: str) -> None:
        bucket, prefix, _ = self.fs.split_path(f"{self.path(folder)}/")
        found = self.fs.call_s3("list_multipart_uploads", Bucket=bucket, Prefix=prefix)
        for upload in found.get("Uploads", []):
            self.fs.abort_mpu(bucket, upload["Key"], upload["UploadId"])


@contextmanager
def _create_local(path: Path) -> Iterator[IO[bytes]]:
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex}.tmp")
    try:
        with temporary.open("wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        _rename(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def _rename(temporary: Path, path: Path) -> None:
    try:
        temporary.replace(path)
    except FileNotFoundError:  # another driver has finished the run, and swept; that passes
        raise OSError(errno.ESTALE, "another driver swept this file away while it was written", str(path)) from None
