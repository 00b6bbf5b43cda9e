"""Folders and files on any fsspec file system, local ones and object storage alike."""

import os
import tempfile
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from importlib.util import find_spec
from pathlib import Path
from typing import IO, Any

import fsspec
import pyarrow.fs as pafs
from fsspec.implementations.local import LocalFileSystem

from pipelines.errors import ConfigError

PACKAGE_SCHEME = "package://"
_EXTRAS = {"s3": "s3", "s3a": "s3", "gs": "gcs", "gcs": "gcs", "abfs": "azure", "abfss": "azure", "az": "azure"}


def package_file(url: str) -> str:
    """Return the local path of `package://<package>/<file>`, a file that an installed package ships."""
    package, _, name = url.removeprefix(PACKAGE_SCHEME).partition("/")
    try:
        spec = find_spec(package)
    except (ImportError, ValueError):  # the package that would hold it is missing, or this is no package's name
        spec = None
    if spec is None or not spec.submodule_search_locations:
        raise ConfigError(f"{url}: the Python package {package} is not installed; try: pip install --no-deps {package}")
    path = Path(spec.submodule_search_locations[0]) / name
    if not path.is_file():
        raise ConfigError(f"{url}: the package {package} has no file {name}")
    return str(path)


def file_system(url: str) -> tuple[Any, str]:
    """Return the fsspec file system of a URL or local path, and the path within it.

    Raises ConfigError for a scheme that no installed package reads.
    """
    if url.startswith(PACKAGE_SCHEME):
        url = package_file(url)
    try:
        fs, path = fsspec.core.url_to_fs(url)
    except (ImportError, ValueError) as error:
        scheme = url.partition("://")[0]
        extra = _EXTRAS.get(scheme)
        remedy = f"pip install 'fournee[{extra}]'" if extra else "use a local path, s3://, gs:// or abfs://"
        raise ConfigError(f"{url}: {error}; {remedy}") from None
    return fs, path


def arrow_file_system(fs: Any) -> pafs.FileSystem:
    """Wrap an fsspec file system for Arrow; local files take Arrow's own faster way."""
    if isinstance(fs, LocalFileSystem):
        return pafs.LocalFileSystem()
    return pafs.PyFileSystem(pafs.FSSpecHandler(fs))


@dataclass(frozen=True)
class Folder:
    """A folder whose files appear whole or not at all (elsewhere than on local disks: by one PUT). Cheap to send along."""

    url: str

    @cached_property
    def _place(self) -> tuple[Any, str]:
        fs, path = file_system(self.url)
        return fs, path.rstrip("/")

    def __getstate__(self) -> dict[str, str]:
        # The other process may run in another folder: a relative path would name another place there.
        return {"url": self.path() if isinstance(self.fs, LocalFileSystem) else self.url}

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

    def exists(self, name: str) -> bool:
        """Whether the file is there now (no cached listing is asked)."""
        self.fs.invalidate_cache()
        return bool(self.fs.exists(self.path(name)))

    def read(self, name: str) -> bytes:
        """Return the whole file."""
        content: bytes = self.fs.cat_file(self.path(name))
        return content

    def write(self, name: str, content: bytes) -> None:
        """Write the whole file or nothing."""
        if isinstance(self.fs, LocalFileSystem):
            with self.create(name) as file:
                file.write(content)
        else:
            self.fs.pipe_file(self.path(name), content)

    @contextmanager
    def create(self, name: str) -> Iterator[IO[bytes]]:
        """Open a file that appears only when the block ends well.

        Locally a temporary file, fsync, rename, fsync of the folder; elsewhere a temporary file that is uploaded as a whole.
        """
        path = self.path(name)
        if isinstance(self.fs, LocalFileSystem):
            with _create_local(Path(path)) as file:
                yield file
            return
        with tempfile.NamedTemporaryFile() as file:
            yield file
            file.flush()
            self.fs.put_file(file.name, path)

    def names(self, folder: str = "") -> list[str]:
        """Return the names of the files in a sub-folder, sorted; temporary ones are left out, a missing folder is empty."""
        self.fs.invalidate_cache()
        try:
            entries = self.fs.ls(self.path(folder), detail=True)
        except FileNotFoundError:
            return []
        names = (entry["name"].rsplit("/", 1)[-1] for entry in entries if entry["type"] == "file")
        return sorted(name for name in names if not name.startswith("."))

    def delete(self, name: str) -> None:
        """Delete a file."""
        self.fs.rm_file(self.path(name))

    def remove(self, *, first: str = "", last: str = "") -> None:
        """Delete the folder and all it holds, one file before all others and one after them, whatever interrupts it."""
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

    def sweep(self, folder: str) -> None:
        """Delete what killed writers left in a local sub-folder."""
        if isinstance(self.fs, LocalFileSystem):
            for leftover in Path(self.path(folder)).glob(".*.tmp"):
                leftover.unlink(missing_ok=True)


@contextmanager
def _create_local(path: Path) -> Iterator[IO[bytes]]:
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex}.tmp")
    try:
        with temporary.open("wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)
