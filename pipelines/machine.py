"""Facts about this machine: packages, GPUs, processor, memory, disk, and whether an address answers. Judges nothing."""

import os
import shutil
import socket
import subprocess
from collections import Counter
from collections.abc import Iterable
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, distribution, version
from pathlib import Path

import psutil

_NVIDIA_SMI_TIMEOUT_S = 20.0  # eight GPUs without the persistence daemon take a while
_CONNECT_TIMEOUT_S = 2.0


def installed_versions(names: Iterable[str]) -> dict[str, str]:
    """The versions of those packages that are installed, from their metadata: nothing is imported."""
    found = {}
    for name in names:
        with suppress(PackageNotFoundError):
            found[name] = version(name)
    return found


def torch_version_file() -> str:
    """The text of torch/version.py, which says what torch was built with; importing torch takes seconds."""
    with suppress(PackageNotFoundError, FileNotFoundError):
        return Path(str(distribution("torch").locate_file("torch/version.py"))).read_text(encoding="utf-8")
    return ""


def list_gpus() -> tuple[Counter[str], str]:
    """Count the GPUs by "name, memory", as nvidia-smi says them; where there is none, the text says why."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return Counter(), "no nvidia-smi"
    command = [program, "--query-gpu=name,memory.total", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_NVIDIA_SMI_TIMEOUT_S, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return Counter(), str(error)
    if done.returncode != 0:
        return Counter(), f"nvidia-smi: {' '.join((done.stdout + done.stderr).split())}"
    return Counter(line.strip() for line in done.stdout.splitlines() if line.strip()), "nvidia-smi lists none"


def describe_hardware() -> str:
    """The GPUs of this machine, else its processor, in words."""
    gpus, _ = list_gpus()
    if gpus:
        return ", ".join(f"{count} x {name}" for name, count in gpus.items())
    return f"{psutil.cpu_count()} cores of {cpuinfo().get('model name', 'an unknown processor')}"


def cpuinfo() -> dict[str, str]:
    """The first processor's fields in /proc/cpuinfo; empty where there is no such file."""
    return parse_cpuinfo(_read("/proc/cpuinfo"))


def parse_cpuinfo(text: str) -> dict[str, str]:
    """Read the first processor's fields."""
    lines = (line.partition(":") for line in text.strip().partition("\n\n")[0].splitlines())
    return {key.strip(): value.strip() for key, _, value in lines}


def memory_bytes() -> tuple[int, int]:
    """Memory in all and available: the machine's, or at most what this container may use."""
    memory, limit = psutil.virtual_memory(), _read("/sys/fs/cgroup/memory.max").strip()
    most = int(limit) if limit.isdigit() else memory.total
    return min(memory.total, most), min(memory.available, most)


def disk_space(folder: Path) -> tuple[int, bool]:
    """Bytes free for a folder that need not exist yet, and whether it can be written to."""
    place = next(path for path in (folder.absolute(), *folder.absolute().parents) if path.exists())
    return shutil.disk_usage(place).free, os.access(place, os.W_OK)


def folder_sizes(parent: Path) -> dict[str, int]:
    """The folders in a folder and their sizes in bytes, without those whose names start with a dot."""
    folders = sorted(path for path in parent.glob("[!.]*") if path.is_dir())
    return {folder.name: sum(path.stat().st_size for path in folder.rglob("*") if path.is_file()) for folder in folders}


def connection_error(host: str, port: int) -> str | None:
    """Say why nothing answers at a port; None where something does."""
    try:
        socket.create_connection((host, port), timeout=_CONNECT_TIMEOUT_S).close()
    except (OSError, OverflowError) as error:
        return str(error)
    return None


def _read(path: str) -> str:
    return Path(path).read_text(encoding="utf-8") if Path(path).exists() else ""
