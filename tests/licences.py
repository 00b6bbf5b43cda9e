"""Write the tables of docs/licences.md: the licence of each package in the images' locks, as it states it (`make licences`).

What is installed here is asked itself; of the rest, pip asks the package index for the metadata alone.
"""

import json
import re
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping
from importlib.metadata import distributions
from itertools import groupby
from pathlib import Path
from typing import Any

from packaging.licenses import InvalidLicenseExpression, canonicalize_license_expression
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs/licences.md"
IMAGES = {"cpu": ("image-cpu.lock", "torch-cpu.lock"), "gpu": ("image-gpu.lock",)}
TABLES = "## Not permissive\n"  # they begin here; what stands above is written by hand
PERMISSIVE = frozenset(
    {
        "0BSD", "Apache", "Apache-2.0", "BSD", "BSD-2-Clause", "BSD-3-Clause", "BSL-1.0", "CC0-1.0", "CNRI-Python", "ISC",
        "MIT", "MIT-0", "MIT-CMU", "PSF-2.0", "Unlicense",
    }
)  # fmt: skip
_PIP = "pip@26.1"  # one that reads metadata without fetching the package
# What stands where SPDX has an identifier, in small letters and without the words that all have.
_NAMES = {
    "apache": "Apache",
    "apache 2.0": "Apache-2.0",
    "bsd": "BSD",
    "3 clause bsd": "BSD-3-Clause",
    "isc": "ISC",
    "mit": "MIT",
}
_WORDS = re.compile(r"[^a-z0-9.]+|\b(?:the|licen[cs]e|software|version)\b")
Pin = tuple[str, str]


def pins(lock: str) -> dict[str, str]:
    """The packages of a lock and their versions."""
    text = (ROOT / "infra" / lock).read_text(encoding="utf-8")
    return dict(re.findall(r"^([a-z0-9][\w.-]*)==(\S+)", text, re.MULTILINE))


def images() -> dict[Pin, str]:
    """What is installed in the images, and in which."""
    found: dict[Pin, list[str]] = {}
    for image, locks in IMAGES.items():
        for pin in (pin for lock in locks for pin in pins(lock).items()):
            found.setdefault(pin, []).append(image)
    return {pin: " ".join(found[pin]) for pin in sorted(found)}


def licence_of(metadata: Mapping[str, Any]) -> str:
    """What core metadata say: an SPDX identifier or expression where it can be told, else the package's own words."""
    words = [str(metadata[key]).strip() for key in ("license_expression", "license") if metadata.get(key)]
    kinds = [one.rpartition(" :: ")[2] for one in metadata.get("classifier", ()) if one.startswith("License :: ")]
    for stated in ([one.partition("\n")[0] for one in words[:1]], kinds):
        if known := {_identifier(one) for one in stated} - {None}:
            return ", ".join(sorted(map(str, known)))
    return next((one for one in (*words, *kinds) if "\n" not in one), "not stated")  # some have the whole text there


def is_permissive(licence: str) -> bool:
    """Whether one may pass it on by keeping its notices; of alternatives one is enough."""
    plain = licence.replace(" WITH LLVM-exception", "")
    return any(PERMISSIVE.issuperset(re.split(r" AND |, ", one)) for one in plain.split(" OR "))


def tables(licences: Mapping[Pin, str]) -> str:
    """The page's tables."""
    where = images()
    counts = sorted(((len(group), licence) for licence, group in _by_licence(licences)), key=lambda one: (-one[0], one[1]))
    others = [
        (licence, ", ".join(f"{name} ({where[name, version]})" for name, version in group))
        for licence, group in _by_licence(licences)
        if not is_permissive(licence)
    ]
    every = [(name, version, licence, where[name, version]) for (name, version), licence in licences.items()]
    return "\n".join(
        [
            TABLES,
            *_table(("licence", "packages (images)"), others),
            "\n## Count by licence\n",
            *_table(("licence", "packages"), ((licence, str(count)) for count, licence in counts)),
            "\n## All packages\n",
            *_table(("package", "version", "licence", "images"), every),
            "",
        ]
    )


def _identifier(text: str) -> str | None:
    try:
        return str(canonicalize_license_expression(text))
    except InvalidLicenseExpression:
        return _NAMES.get(" ".join(_WORDS.sub(" ", text.lower()).split()))


def _by_licence(licences: Mapping[Pin, str]) -> list[tuple[str, list[Pin]]]:
    by: Callable[[Pin], str] = licences.__getitem__
    return [(licence, list(group)) for licence, group in groupby(sorted(licences, key=by), key=by)]


def _table(head: tuple[str, ...], lines: Iterable[tuple[str, ...]]) -> list[str]:
    return [f"| {' | '.join(cells)} |" for cells in (head, ("---",) * len(head), *lines)]


def _installed() -> dict[Pin, Mapping[str, Any]]:
    return {(canonicalize_name(one.metadata["Name"]), one.version): one.metadata.json for one in distributions()}


def _from_index(missing: Iterable[Pin]) -> dict[Pin, Mapping[str, Any]]:
    asked = [f"{name}==={version}" for name, version in missing]  # the very version, and not its CPU build
    install = ["install", "--dry-run", "--ignore-installed", "--no-deps", "--quiet", "--report", "-", *asked]
    command = [Path(sys.executable).with_name("uv"), "tool", "run", "--python", sys.executable, _PIP, *install]
    done = subprocess.run(command, stdout=subprocess.PIPE, check=True)
    found = [one["metadata"] for one in json.loads(done.stdout)["install"]]
    return {(canonicalize_name(one["name"]), one["version"]): one for one in found}


def main() -> None:
    """Renew the tables in the page."""
    here = _installed()
    metadata = here | _from_index(pin for pin in images() if pin not in here)
    by_hand = PAGE.read_text(encoding="utf-8").partition(TABLES)[0]
    PAGE.write_text(by_hand + tables({pin: licence_of(metadata[pin]) for pin in images()}), encoding="utf-8")


if __name__ == "__main__":
    main()
