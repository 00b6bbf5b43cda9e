"""File systems by URL, for fsspec and for Arrow: local ones, object storage, and files that an installed package ships."""

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import fsspec
import pyarrow as pa
import pyarrow.fs as pafs
from fsspec.implementations.local import LocalFileSystem

from pipelines.errors import ConfigError

_READ_AHEAD_BYTES = 256 * 2**10  # gcsfs wants a multiple of this
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
    return pafs.PyFileSystem(_Handler(fs))


class _Handler(pafs.FSSpecHandler):  # type: ignore[misc]
    def open_input_file(self, path: str) -> pa.PythonFile:
        """Open a file for Arrow, which knows what it wants: s3fs would fetch 50 MiB with every column's first byte.

        And it does not ask twice whether the file is there.
        """
        return pa.PythonFile(self.fs.open(path, mode="rb", block_size=_READ_AHEAD_BYTES), mode="r")
