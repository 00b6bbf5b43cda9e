"""Find the input's files, and notice when one of them changes or is damaged."""

import hashlib
import lzma
import os.path
import re
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import PurePosixPath
from typing import Any, TypeVar

import pyarrow as pa
from fsspec.implementations.local import LocalFileSystem

from pipelines import tables
from pipelines.config import FileInput, InputConfig
from pipelines.errors import ConfigError, RunFailed
from pipelines.file_systems import file_system
from pipelines.readers import SUFFIXES, suffix_of
from pipelines.rows import Batch

_WILDCARD = re.compile(r"[*?[]")
T = TypeVar("T")

_VERSION_KEYS = ("ETag", "etag", "mtime", "LastModified", "last_modified", "created")


@dataclass(frozen=True, slots=True)
class Source:
    """One input file or table as it was when it was listed."""

    path: str
    num_bytes: int
    version: str


def list_sources(config: InputConfig) -> list[Source]:
    """Return the input's files in a stable order, each once; or its one table.

    Raises ConfigError where a path matches nothing.
    """
    if not isinstance(config, FileInput):
        name, version = tables.identify(config)
        return [Source(name, 0, version)]
    paths = [config.path] if isinstance(config.path, str) else config.path
    found: dict[str, Source] = {}
    for path in paths:
        found |= {source.path: source for source in _expand(path, config.format)}
    return [found[path] for path in sorted(found)]


def is_bad_file(error: Exception) -> bool:
    """Whether what a file holds is at fault, or that it is gone; not the way to it: credentials, rights, the network."""
    if isinstance(error, pa.ArrowException):  # damage may come to light as any of them
        return not isinstance(error, MemoryError | pa.ArrowCancelled)
    if type(error) is OSError:  # Arrow's word for damage; network libraries have subclasses, the system has an errno
        return error.errno is None
    return isinstance(error, EOFError | UnicodeError | FileNotFoundError | zlib.error | lzma.LZMAError)


def read_each(
    batches: Iterable[Batch], config: InputConfig, read: Callable[[Sequence[Batch]], Iterator[T]]
) -> Iterator[tuple[Batch, T | None]]:
    """Read batches one by one; None in the place of one that is damaged. `read` is given neighbours of one source, so that
    it decodes the source once.

    Raises ConfigError for the first that is damaged, unless the settings allow to leave it out.
    """
    for _, group in groupby(batches, key=lambda batch: batch.source):
        left = list(group)
        while left:
            try:
                for found in read(tuple(left)):
                    yield left.pop(0), found
            except Exception as error:
                if not is_bad_file(error):
                    raise
                batch = left.pop(0)
                if config.on_bad_file == "fail":
                    raise ConfigError(
                        f"{batch.source}, rows from {batch.first_row}, cannot be read: {error}; "
                        "put the file right, or set input.on_bad_file=skip"
                    ) from None
                yield batch, None


def check_unchanged(batch: Batch) -> None:
    """Refuse a source that is not what it was when the run was planned, unless a copy is read.

    Raises RunFailed where it changed, FileNotFoundError where it is gone: a bad file as any other (`is_bad_file`).
    """
    if batch.spooled is not None:
        return
    fs, place = file_system(batch.source)
    try:
        now = _source(fs, fs.info(place))
    except FileNotFoundError:
        raise FileNotFoundError(f"{batch.source} is gone since the run was planned; put it back") from None
    if (now.num_bytes, now.version) != (batch.source_bytes, batch.source_version):
        raise RunFailed(
            f"{batch.source} changed since the run was planned ({batch.source_bytes} bytes, version {batch.source_version}; "
            f"now {now.num_bytes}, {now.version}); put it back, or start a run of its own"
        )


def snapshot(sources: Sequence[Source]) -> str:
    """A digest over path, size and version of every file: another digest means another input."""
    digest = hashlib.sha256()
    for source in sources:
        digest.update(f"{source.path}\0{source.num_bytes}\0{source.version}\n".encode())
    return digest.hexdigest()


def _expand(path: str, format_name: str) -> list[Source]:
    fs, place = file_system(path)
    if isinstance(fs, LocalFileSystem):
        place = os.path.normpath(place)  # a/./b and a/../a/b are a/b: a file is listed once however it is spelt
    wildcard = _WILDCARD.search(place)
    if wildcard and not fs.exists(place):
        matches = fs.glob(place, detail=True)
        first = place.rfind("/", 0, wildcard.start()) + 1
        infos = [info for name, info in matches.items() if info["type"] != "directory" and not _is_hidden(name[first:])]
        if not infos:
            raise ConfigError(f"input.path={path} matches no file (hidden ones are left out)")
    elif fs.isdir(place):
        everything = fs.find(place, detail=True)
        infos = [info for name, info in everything.items() if _is_data(name.removeprefix(place), format_name)]
        if not infos:
            seen = sorted({PurePosixPath(name).suffix or PurePosixPath(name).name for name in everything})
            raise ConfigError(
                f"input.path={path} holds no {format_name} file ({', '.join(_suffixes(format_name))}); "
                f"it has: {', '.join(seen) or 'nothing'}. Name the files, or set input.format"
            )
    elif fs.exists(place):
        infos = [fs.info(place)]
    else:
        raise ConfigError(f"input.path={path} does not exist")
    return [_source(fs, info) for info in infos]


def _source(fs: Any, info: dict[str, Any]) -> Source:
    if info.get("islink") and fs.exists(info["name"]):
        info = fs.info(info["name"])  # listings show a symbolic link's own time; what counts is the file behind it
    return Source(_name(fs, info["name"]), info["size"], _version(info))


def _is_data(name: str, format_name: str) -> bool:
    """Whether a file found in a folder is input: by its ending, and not hidden or a marker such as _SUCCESS."""
    if _is_hidden(name, marks=(".", "_")):
        return False
    suffix = PurePosixPath(name).suffix.lower() if format_name == "parquet" else suffix_of(name)
    return suffix in _suffixes(format_name)


def _suffixes(format_name: str) -> list[str]:
    """The endings of a format's files; of all formats where there may be several."""
    return sorted(suffix for suffix, known in SUFFIXES.items() if format_name in ("files", known))


def _is_hidden(name: str, marks: tuple[str, ...] = (".",)) -> bool:
    return any(part.startswith(marks) for part in PurePosixPath(name).parts)


def _name(fs: Any, path: str) -> str:
    return path if isinstance(fs, LocalFileSystem) else str(fs.unstrip_protocol(path))


def _version(info: dict[str, Any]) -> str:
    return next((str(info[key]) for key in _VERSION_KEYS if info.get(key) is not None), "")
