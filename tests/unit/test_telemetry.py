"""Nothing of what this project stands on reports its usage, wherever it is started."""

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from importlib.util import find_spec, module_from_spec, spec_from_file_location
from pathlib import Path

import pytest
import yaml
from ray._common.usage import usage_lib

from pipelines.config import BatchConfig
from pipelines.placement import place
from pipelines.telemetry import TELEMETRY_OFF, switch_off
from tests.unit.manifests import INFRA, OVERLAYS, ROOT, clusters, ray_pods

WRITTEN = {f"{name}={value}" for name, value in TELEMETRY_OFF.items()}
SHOW = """
import json, os
import pipelines
from huggingface_hub import constants
print(json.dumps([constants.HF_HUB_DISABLE_TELEMETRY, dict(os.environ)]))
"""


def a_new_process(**environment: str) -> tuple[bool, dict[str, str]]:
    """What the hub's client has found, and the environment, after the package has been imported."""
    inherited = {name: value for name, value in os.environ.items() if name not in TELEMETRY_OFF}
    done = subprocess.run(
        [sys.executable, "-c", SHOW], cwd=ROOT, env={**inherited, **environment}, capture_output=True, text=True, check=True
    )
    is_off, found = json.loads(done.stdout)
    return is_off, found


def test_every_process_of_ours_is_silent() -> None:
    is_off, found = a_new_process()
    assert is_off
    assert TELEMETRY_OFF.items() <= found.items()


def test_who_wants_it_can_turn_it_on() -> None:
    on = {"RAY_USAGE_STATS_ENABLED": "1", "VLLM_NO_USAGE_STATS": "0", "HF_HUB_DISABLE_TELEMETRY": "0"}
    is_off, found = a_new_process(**on)
    assert not is_off
    assert on.items() <= found.items()


def test_ray_and_vllm_read_what_is_set(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (*TELEMETRY_OFF, "DO_NOT_TRACK", "VLLM_DO_NOT_TRACK"):
        monkeypatch.delenv(name, raising=False)
    assert usage_lib.usage_stats_enabled(), "this is what has to be switched off"
    switch_off()
    assert not usage_lib.usage_stats_enabled()
    assert vllm_reads("VLLM_NO_USAGE_STATS") is True


def vllm_reads(name: str) -> object:
    """What a setting of vLLM's environment comes to; from that file alone, because `import vllm` takes tens of seconds."""
    package = find_spec("vllm")
    assert package is not None and package.origin is not None
    spec = spec_from_file_location("vllm_envs", Path(package.origin).parent / "envs.py")
    assert spec is not None and spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.environment_variables[name]()


def test_a_worker_on_another_node_hears_what_the_driver_was_told(
    batch_config: Callable[..., BatchConfig], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert TELEMETRY_OFF.items() <= place(batch_config(), {"CPU": 2.0}).environment.items()
    monkeypatch.setenv("VLLM_NO_USAGE_STATS", "0")
    assert place(batch_config(), {"CPU": 2.0}).environment["VLLM_NO_USAGE_STATS"] == "0"


def test_the_image_is_silent() -> None:
    (base,) = re.findall(r"^FROM \S+ AS base\n(.*?)^FROM ", (INFRA / "Dockerfile").read_text(), re.MULTILINE | re.DOTALL)
    assert {word for line in base.splitlines() for word in line.removeprefix("ENV").split()} >= WRITTEN


@pytest.mark.parametrize("path", sorted((INFRA / "launcher").glob("*.yaml")), ids=lambda path: path.stem)
def test_every_machine_of_the_launcher_is_silent(path: Path) -> None:
    config = yaml.safe_load(path.read_text(encoding="utf-8"))
    for name in ("head", "worker"):
        (start,) = (one for one in config[f"{name}_start_ray_commands"] if "ray start" in one)
        assert set(start.partition(" ray start ")[0].split()) >= WRITTEN


def test_every_node_of_slurm_is_silent() -> None:
    before = (INFRA / "slurm/fournee.sbatch").read_text(encoding="utf-8").partition(" ray start ")[0]
    assert {word for line in before.splitlines() if line.startswith("export ") for word in line.split()} >= WRITTEN


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_every_pod_of_ray_is_silent(overlay: str) -> None:
    """The head, which reports for its cluster, and the workers; whatever resource brings the cluster."""
    for cluster in clusters(overlay).values():
        for template in ray_pods(cluster):
            values = {one["name"]: one.get("value") for one in template["spec"]["containers"][0]["env"]}
            assert TELEMETRY_OFF.items() <= values.items()
