"""The manifests as kustomize renders them, and the binaries that check what is in infra/."""

import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parents[2]
INFRA = ROOT / "infra"
OVERLAYS = ("dev", "prod")
Manifest = dict[str, Any]


def tool(name: str) -> str:
    """A binary of the dev extra, or of Debian; skips where it is missing."""
    found = shutil.which(name, path=os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")]))
    if found is None:
        pytest.skip(f"{name} is not installed")
    return found


@cache
def rendered(overlay: str) -> tuple[Manifest, ...]:
    """What `kubectl apply -k` would send."""
    command = [tool("kubectl"), "kustomize", INFRA / "k8s/overlays" / overlay]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return tuple(yaml.safe_load_all(done.stdout))


def manifest(overlay: str, kind: str) -> Manifest:
    """The only one of its kind."""
    (one,) = (one for one in rendered(overlay) if one["kind"] == kind)
    return one


def clusters(overlay: str) -> dict[str, Manifest]:
    """The specs of Ray clusters, by the kind that brings one."""
    return {
        "RayCluster": manifest(overlay, "RayCluster")["spec"],
        "RayJob": manifest(overlay, "RayJob")["spec"]["rayClusterSpec"],
        "RayCronJob": manifest(overlay, "RayCronJob")["spec"]["jobTemplate"]["rayClusterSpec"],
        "RayService": manifest(overlay, "RayService")["spec"]["rayClusterConfig"],
    }


def ray_pods(cluster: Manifest) -> list[Manifest]:
    """The head's template, then those of the worker groups."""
    return [group["template"] for group in (cluster["headGroupSpec"], *cluster["workerGroupSpecs"])]


def pods(overlay: str) -> Iterator[Manifest]:
    """Every template of a pod."""
    for cluster in clusters(overlay).values():
        yield from ray_pods(cluster)
    yield manifest(overlay, "RayJob")["spec"]["submitterPodTemplate"]
    yield manifest(overlay, "RayCronJob")["spec"]["jobTemplate"]["submitterPodTemplate"]


def settings(overlay: str, folder: Path) -> Path:
    """The settings of an overlay, where its pods find them, as a folder for --config-dir."""
    (folder / "experiment").mkdir(parents=True)
    for name, text in manifest(overlay, "ConfigMap")["data"].items():
        (folder / "experiment" / name).write_text(text, encoding="utf-8")
    return folder


def on_a_day(text: str) -> list[str]:
    """The words of a command, with a day in the place of what a scheduler or a shell would put there."""
    for placeholder in ("$(date -u +%F)", "{{ ds }}", "$run_date"):
        text = text.replace(placeholder, "2026-11-30")
    return shlex.split(text.replace("$runs", "s3://your-bucket/answers"))
