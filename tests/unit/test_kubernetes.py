"""The manifests: valid to the letter for Kubernetes and KubeRay, safe, and consistent with the job that they run."""

import os
import re
from datetime import timedelta
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from pipelines.cluster import drain_limit_s
from pipelines.compose import compose_settings
from pipelines.config import BatchConfig, ParquetInput
from pipelines.parse import parse_config, parse_serve
from tests.unit.manifests import (
    INFRA,
    OVERLAYS,
    ROOT,
    Manifest,
    clusters,
    manifest,
    on_a_day,
    pods,
    ray_pods,
    rendered,
    settings,
)

KUBERNETES = "1.33"
# Prometheus' operator publishes no schemas in a package: promtool reads its rules (test_infra.py), and this is all we use else.
POD_MONITOR = {"selector": {"matchLabels"}, "podMetricsEndpoints": {"port", "interval"}, "podTargetLabels": None}


@cache
def definition(kind: str) -> jsonschema.Draft202012Validator:
    """KubeRay's schema of a kind, in which a field that it does not know is an error."""
    folder = Path(os.environ.get("FOURNEE_KUBERAY_CRDS", ROOT / "../shared/data/kuberay-crds"))
    path = folder / f"ray.io_{kind.lower()}s.yaml"
    if not path.is_file():
        pytest.skip(f"KubeRay's definitions are not in {folder}; FOURNEE_KUBERAY_CRDS names another folder")
    loaded = yaml.load(path.read_text(encoding="utf-8"), Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader))
    (found,) = (one["schema"]["openAPIV3Schema"] for one in loaded["spec"]["versions"] if one["name"] == "v1")
    return jsonschema.Draft202012Validator(strict(found))  # to check the schema itself takes seconds, and is KubeRay's to do


def strict(schema: Any) -> Any:
    if isinstance(schema, list):
        return [strict(one) for one in schema]
    if not isinstance(schema, dict):
        return schema
    inner = {key: strict(value) for key, value in schema.items()}
    is_closed = isinstance(schema.get("properties"), dict) and schema.get("type") == "object"
    if is_closed and not schema.get("x-kubernetes-preserve-unknown-fields"):
        inner["additionalProperties"] = False
    return inner


def check_core(one: Manifest) -> None:
    validator = pytest.importorskip("kubernetes_validate", reason="it is not installed: the dev extra has it")
    validator.validate(one, KUBERNETES, strict=True)


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_kubernetes_own_kinds_are_valid_to_the_letter(overlay: str) -> None:
    own = [one for one in rendered(overlay) if "ray.io" not in one["apiVersion"] and "coreos" not in one["apiVersion"]]
    assert {"NetworkPolicy", "PodDisruptionBudget", "PersistentVolumeClaim", "ConfigMap"} <= {one["kind"] for one in own}
    for one in own:
        check_core(one)
    for number, template in enumerate(pods(overlay)):
        check_core({"apiVersion": "v1", "kind": "Pod", "metadata": {"name": f"pod-{number}"}, "spec": template["spec"]})


@pytest.mark.parametrize("overlay", OVERLAYS)
@pytest.mark.parametrize("kind", ["RayCluster", "RayJob", "RayCronJob", "RayService"])
def test_kuberays_kinds_are_valid_to_the_letter(overlay: str, kind: str) -> None:
    assert manifest(overlay, kind)["apiVersion"] == "ray.io/v1"
    definition(kind).validate(manifest(overlay, kind))


def test_an_unknown_field_anywhere_is_noticed() -> None:
    job: Any = yaml.safe_load(yaml.safe_dump(manifest("prod", "RayJob")))
    job["spec"]["rayClusterSpec"]["headGroupSpec"]["template"]["spec"]["containers"][0]["resource"] = {}
    with pytest.raises(jsonschema.ValidationError, match="resource"):
        definition("RayJob").validate(job)


def test_the_pod_monitor_finds_the_port_and_the_labels_that_the_pods_have() -> None:
    spec = manifest("prod", "PodMonitor")["spec"]
    (endpoint,) = spec["podMetricsEndpoints"]
    assert set(spec) == set(POD_MONITOR) and set(endpoint) == POD_MONITOR["podMetricsEndpoints"]
    assert set(spec["selector"]) == POD_MONITOR["selector"]
    assert all(label.startswith("ray.io/") for label in spec["podTargetLabels"]), "KubeRay sets those"
    for cluster in clusters("prod").values():
        for group in (cluster["headGroupSpec"], *cluster["workerGroupSpecs"]):
            assert spec["selector"]["matchLabels"].items() <= group["template"]["metadata"]["labels"].items()
            ports = {port["name"]: port["containerPort"] for port in group["template"]["spec"]["containers"][0]["ports"]}
            assert str(ports[endpoint["port"]]) == group["rayStartParams"]["metrics-export-port"]


@pytest.mark.parametrize("kind", ["PodMonitor", "PrometheusRule"])
def test_prometheus_chart_takes_what_has_the_label_of_its_release(kind: str) -> None:
    assert manifest("prod", kind)["metadata"]["labels"] == {"release": "kube-prometheus-stack"}


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_no_pod_may_more_than_it_needs(overlay: str) -> None:
    for template in pods(overlay):
        spec = template["spec"]
        assert spec["securityContext"]["runAsNonRoot"] and spec["securityContext"]["runAsUser"] > 0
        assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        for container in spec["containers"]:
            assert container["securityContext"] == {
                "allowPrivilegeEscalation": False,
                "readOnlyRootFilesystem": True,
                "capabilities": {"drop": ["ALL"]},
            }
            assert {mount["mountPath"] for mount in container["volumeMounts"]} >= {"/tmp"}, "Ray writes there"
            requests, limits = container["resources"]["requests"], container["resources"]["limits"]
            assert {"cpu", "memory"} <= set(limits) and set(requests) == set(limits)


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_images_are_pinned_and_one_cluster_runs_one_image(overlay: str) -> None:
    images = {container["image"] for template in pods(overlay) for container in template["spec"]["containers"]}
    (image,) = images
    assert image.rpartition(":")[2] == f"{version('fournee')}-{'cpu' if overlay == 'dev' else 'gpu'}"
    for cluster in clusters(overlay).values():
        assert cluster["rayVersion"] == version("ray")


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_secrets_are_named_and_never_written(overlay: str) -> None:
    assert not [one for one in rendered(overlay) if one["kind"] == "Secret"]
    for cluster in clusters(overlay).values():
        assert cluster["authOptions"] == {"mode": "token", "secretName": "fournee-ray-token"}
    for template in pods(overlay):
        for container in template["spec"]["containers"]:
            for one in container.get("env", []):
                is_secret = re.search("TOKEN|KEY|SECRET|PASSWORD|WEBHOOK", one["name"])
                assert bool(is_secret) == ("secretKeyRef" in one.get("valueFrom", {})), one["name"]


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_api_keys_reach_every_pod_of_the_endpoint_and_no_other(overlay: str) -> None:
    keys = {"name": "FOURNEE_API_KEYS", "valueFrom": {"secretKeyRef": {"name": "fournee-api-keys", "key": "keys"}}}
    for kind, cluster in clusters(overlay).items():
        for template in ray_pods(cluster):
            (container,) = template["spec"]["containers"]
            assert container["env"].count(keys) == (kind == "RayService"), kind
            assert ("fournee-api-keys" in str(template)) == (kind == "RayService"), kind


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_nothing_but_the_night_starts_by_itself_and_all_bring_the_same_cluster(overlay: str) -> None:
    for kind in ("RayCluster", "RayJob", "RayService"):
        assert manifest(overlay, kind)["spec"]["suspend"] is True, kind
    base = {key: value for key, value in clusters(overlay)["RayCluster"].items() if key != "suspend"}
    assert clusters(overlay)["RayJob"] == clusters(overlay)["RayCronJob"] == base


def test_spot_machines_are_tried_first_and_only_their_group_asks_for_them() -> None:
    spot, on_demand = manifest("prod", "RayCluster")["spec"]["workerGroupSpecs"]
    assert spot["priority"] > on_demand.get("priority", 0)
    for group in (spot, on_demand):
        is_spot = group is spot
        assert ("spot" in str(group["template"]["spec"]["nodeSelector"])) == is_spot
        assert ("spot" in str(group["template"]["spec"]["tolerations"])) == is_spot
        assert group["template"]["spec"]["containers"][0]["resources"]["limits"]["nvidia.com/gpu"] == "1"


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_every_volume_and_claim_that_is_used_exists(overlay: str) -> None:
    names = {(one["kind"], one["metadata"]["name"]) for one in rendered(overlay)}
    for template in pods(overlay):
        volumes = {volume["name"]: volume for volume in template["spec"]["volumes"]}
        for container in template["spec"]["containers"]:
            assert {mount["name"] for mount in container["volumeMounts"]} <= set(volumes)
        for volume in volumes.values():
            if claim := volume.get("persistentVolumeClaim"):
                assert ("PersistentVolumeClaim", claim["claimName"]) in names
            if config := volume.get("configMap"):
                assert ("ConfigMap", config["name"]) in names
        if account := template["spec"].get("serviceAccountName"):
            assert ("ServiceAccount", account) in names


def job_of(overlay: str, kind: str) -> Manifest:
    spec: Manifest = manifest(overlay, kind)["spec"]
    inner: Manifest = spec.get("jobTemplate", spec)
    return inner


def config_of(overlay: str, kind: str, folder: Path) -> BatchConfig:
    """What a manifest's command comes to, with the settings that its pods find."""
    program, job, *rest = on_a_day(job_of(overlay, kind)["entrypoint"])
    assert (program, job, rest[:2]) == ("fournee", "batch", ["--config-dir", "/etc/fournee"])
    return parse_config(compose_settings("batch", rest[2:], str(settings(overlay, folder))))


@pytest.mark.parametrize("overlay", OVERLAYS)
@pytest.mark.parametrize("kind", ["RayJob", "RayCronJob"])
def test_the_command_of_a_job_resumes_the_run_of_its_day(overlay: str, kind: str, tmp_path: Path) -> None:
    config = config_of(overlay, kind, tmp_path / "etc")
    assert config.cluster.address == "auto", "cluster=job"
    assert config.experiment == "nightly", "the alert about a missing night asks for it"
    assert config.output.path is not None and "2026-11-30" in config.output.path
    assert config.output.on_existing == "resume"
    assert "://" in config.output.path or config.output.path.startswith("/models/"), "where all pods see it"
    groups = job_of(overlay, kind)["rayClusterSpec"]["workerGroupSpecs"]
    most = config.cluster.max_workers or config.cluster.workers
    assert most <= sum(group["maxReplicas"] for group in groups)


def test_production_reads_the_input_of_its_day(tmp_path: Path) -> None:
    given = config_of("prod", "RayCronJob", tmp_path / "etc").input
    assert isinstance(given, ParquetInput) and "dt=2026-11-30" in str(given.path)


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_a_job_that_is_told_to_stop_has_the_time_to_drain(overlay: str, tmp_path: Path) -> None:
    drain_s = config_of(overlay, "RayCronJob", tmp_path / "etc").cluster.drain_s
    for cluster in clusters(overlay).values():
        for template in ray_pods(cluster):
            values = {one["name"]: one.get("value") for one in template["spec"]["containers"][0]["env"]}
            stop_wait = values["RAY_JOB_STOP_WAIT_TIME_S"]
            assert drain_limit_s(drain_s, {"RAY_JOB_CONFIG_JSON_ENV_VAR": "", "RAY_JOB_STOP_WAIT_TIME_S": stop_wait}) == drain_s
            grace_s = template["spec"]["terminationGracePeriodSeconds"]
            assert grace_s > float(stop_wait)
            if hook := template["spec"]["containers"][0].get("lifecycle"):
                (command,) = hook["preStop"]["exec"]["command"][2:]
                (deadline_s,) = re.findall(r"--deadline-remaining-seconds (\d+) && sleep \1$", command)
                assert drain_s < int(deadline_s) < grace_s
    for template in (template for cluster in clusters(overlay).values() for template in ray_pods(cluster)[1:]):
        assert "lifecycle" in template["spec"]["containers"][0]


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_all_attempts_of_a_night_name_the_same_day(overlay: str) -> None:
    """The command takes the day from the clock: so the last retry must end before midnight of the zone that it is told in."""
    night = manifest(overlay, "RayCronJob")["spec"]
    minute, hour, *every_day = night["schedule"].split()
    assert every_day == ["*", "*", "*"] and night["timeZone"] == "Etc/UTC" and "date -u" in night["jobTemplate"]["entrypoint"]
    begins = timedelta(hours=int(hour), minutes=int(minute))
    assert begins + timedelta(seconds=night["jobTemplate"]["activeDeadlineSeconds"]) < timedelta(days=1)


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_a_clusters_cost_ends_with_its_job(overlay: str) -> None:
    for kind in ("RayJob", "RayCronJob"):
        job = job_of(overlay, kind)
        assert job["shutdownAfterJobFinishes"] and job["backoffLimit"] > 0
        assert job["submitterPodTemplate"] == job_of(overlay, "RayJob")["submitterPodTemplate"]
    for cluster in clusters(overlay).values():
        assert cluster["enableInTreeAutoscaling"] and cluster["autoscalerOptions"]["version"] == "v2"
        assert not [group for group in cluster["workerGroupSpecs"] if group["minReplicas"]]
        # Autoscaler v2 takes a pod that is restarted for the node that it has lost.
        assert {template["spec"]["restartPolicy"] for template in ray_pods(cluster)} == {"Never"}


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("overlay", OVERLAYS)
def test_the_endpoints_settings_compose(overlay: str, tmp_path: Path) -> None:
    from ray.serve.schema import ServeDeploySchema  # which warns of pydantic's future

    declared = yaml.safe_load(manifest(overlay, "RayService")["spec"]["serveConfigV2"])
    (application,) = ServeDeploySchema.model_validate(declared).applications
    arguments = application.args
    assert (application.name, application.import_path) == ("fournee", "pipelines.serve:app")
    assert arguments["config_dir"] == "/etc/fournee"
    config = parse_serve(compose_settings("serve", arguments["overrides"], str(settings(overlay, tmp_path / "etc"))))
    assert config.model == config_of(overlay, "RayCronJob", tmp_path / "nights").model, "the model of the nights"
    assert "://" in config.serve.folder or config.serve.folder.startswith("/models/"), "where all pods see it"


def test_the_alert_about_money_knows_the_budget_of_the_nights(tmp_path: Path) -> None:
    rules = manifest("prod", "PrometheusRule")["spec"]["groups"][0]["rules"]
    (expr,) = (rule["expr"] for rule in rules if rule["alert"] == "FourneeOverBudget")
    assert float(expr.rpartition(">")[2]) == config_of("prod", "RayCronJob", tmp_path / "etc").budget.max_cost


def test_the_trial_has_no_gpu_and_no_operator_but_kuberay() -> None:
    assert "nvidia.com" not in str(rendered("dev"))
    assert not [one for one in rendered("dev") if "coreos" in one["apiVersion"]]


def test_every_manifest_of_the_base_is_part_of_it() -> None:
    for folder in (path.parent for path in (INFRA / "k8s").rglob("kustomization.yaml")):
        made = yaml.safe_load((folder / "kustomization.yaml").read_text(encoding="utf-8"))
        used = {*made.get("resources", []), *(name for one in made.get("configMapGenerator", []) for name in one["files"])}
        assert {path.name for path in folder.glob("*.yaml")} - {"kustomization.yaml"} <= used, folder
