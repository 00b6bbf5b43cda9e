"""What of the working folder goes up to the cluster, found by Ray's own rules, and whether that is not too much."""

import logging
import os
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ray._private.ray_constants import RAY_RUNTIME_ENV_IGNORE_GITIGNORE, get_runtime_env_default_excludes
from ray._private.runtime_env.packaging import GCS_STORAGE_MAX_SIZE, _dir_travel, _get_excludes

from pipelines.errors import ConfigError

_HEADERS = 76  # bytes that a zip file needs for each file in it, besides the name, twice
_NAMED = 5  # entries in an error message


@dataclass(frozen=True, slots=True)
class Upload:
    """The files that go up, and their sizes in bytes by path relative to the working folder."""

    sizes: dict[str, int]

    @property
    def num_bytes(self) -> int:
        """The size of the package: Ray's is a zip file that compresses nothing."""
        return sum(size + _HEADERS + 2 * len(path.encode()) for path, size in self.sizes.items())

    def largest(self) -> str:
        """Name the entries of the working folder that take most."""
        entries: Counter[str] = Counter()
        for path, size in self.sizes.items():
            entries["/".join(Path(path).parts[:2])] += size
        return ", ".join(f"{name} ({mib(size)})" for name, size in entries.most_common(_NAMED))


def find_upload(folder: Path, excludes: Sequence[str], config_dir: str | None = None) -> Upload:
    """Find what Ray would upload.

    Raises ConfigError where that is more than Ray takes, or where the job's own YAML is not in it.
    """
    sizes: dict[str, int] = {}

    def note(path: Path) -> None:
        if path.is_file():
            sizes[path.relative_to(folder).as_posix()] = path.stat().st_size

    logging.getLogger("ray._private.runtime_env.packaging").setLevel(logging.ERROR)  # its advice names no setting of ours
    # The walk that Ray itself packs by, called as Ray calls it: private, so to be looked at when Ray is updated.
    patterns = [*get_runtime_env_default_excludes(), *excludes]
    include_gitignore = os.environ.get(RAY_RUNTIME_ENV_IGNORE_GITIGNORE, "0") != "1"
    _dir_travel(folder, [_get_excludes(folder, patterns)], note, include_gitignore)
    upload = Upload(sizes)
    _check_size(folder, upload)
    if config_dir is not None:
        place = os.path.normpath(config_dir)
        if not any(Path(path).is_relative_to(place) for path in sizes):
            raise ConfigError(
                f"--config-dir={config_dir} is not uploaded: excludes, .gitignore or .rayignore leave it out; take it off there"
            )
    return upload


def mib(num_bytes: int) -> str:
    """A size in words."""
    return f"{num_bytes / 2**20:,.1f} MiB"


def _check_size(folder: Path, upload: Upload) -> None:
    if upload.num_bytes >= GCS_STORAGE_MAX_SIZE:
        raise ConfigError(
            f"working_dir={folder} comes to {mib(upload.num_bytes)}, and Ray takes less than {mib(GCS_STORAGE_MAX_SIZE)}; "
            f"largest: {upload.largest()}; leave out what the job does not need, in excludes or in a .rayignore file"
        )
