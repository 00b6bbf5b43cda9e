"""What is in infra/ besides the manifests: image, launcher, scripts and alerts are well formed, and their commands compose."""

import ast
import json
import re
import runpy
import shlex
import shutil
import subprocess
import sys
import tomllib
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

import jsonschema
import pytest
import yaml
from docker.utils.build import PatternMatcher

from pipelines.compose import compose_settings, conf_folder
from pipelines.metrics import OF_RUN, OF_WORKER
from pipelines.parse import parse_config, parse_history, parse_submit
from tests.unit.manifests import INFRA, OVERLAYS, ROOT, on_a_day, rendered, tool

SCRIPTS = (INFRA / "slurm/fournee.sbatch", INFRA / "cron/nightly.sh")
LAUNCHERS = sorted((INFRA / "launcher").glob("*.yaml"))
DOCKERFILE = (INFRA / "Dockerfile").read_text(encoding="utf-8")
ALERTS = INFRA / "k8s/base/alerts.yaml"
PAGE = (ROOT / "docs/kubernetes.md").read_text(encoding="utf-8")
# What the alerts take from others: the operator's, as its reference names them, each with the labels that we use.
OPERATOR = {"kuberay_job_deployment_status", "kuberay_service_condition_ready"}


def run(*command: str | Path, cwd: Path = ROOT) -> str:
    done = subprocess.run(command, cwd=cwd, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


# Every file.


def test_every_yaml_is_checked_by_a_test() -> None:
    """In conf/ by test_conf.py, in infra/k8s by test_kubernetes.py, the rest here and in test_metrics.py."""
    tops = [ROOT / name for name in ("conf", "infra", "docs", "tests", "jobs", "pipelines")]
    found = {path for top in tops for pattern in ("*.yaml", "*.yml") for path in top.rglob(pattern)}
    found |= {*ROOT.glob("*.y*ml"), *ROOT.glob(".*.y*ml")}
    known = {*conf_folder().rglob("*.yaml"), *(INFRA / "k8s").rglob("*.yaml"), *LAUNCHERS}
    known |= {INFRA / "prometheus/prometheus.yml", INFRA / "prometheus/alerts_test.yml"}
    assert not found - known, "checked by no test"


def test_every_file_begins_with_what_it_is_and_how_it_is_applied() -> None:
    made = {"Dockerfile", "crontab", "sbatch", "sh", "yaml", "yml", "py"}
    for path in (path for path in INFRA.rglob("*") if path.is_file() and path.name.rpartition(".")[2] in made):
        lines = path.read_text(encoding="utf-8").splitlines()
        first = next(line for line in lines if not line.startswith(("#!", "# @package", "# fournee ")))
        assert first.startswith(("# ", '"""')) and len(first) > 60, path
        assert max(map(len, lines)) <= 128, path


# The image.


def test_hadolint_finds_nothing_in_the_dockerfile() -> None:
    assert run(tool("hadolint"), INFRA / "Dockerfile") == ""


def stages() -> dict[str, list[str]]:
    """The instructions of each stage of the Dockerfile, joined over lines."""
    text = re.sub(r"^\s*#.*\n", "", DOCKERFILE, flags=re.MULTILINE).replace("\\\n", " ")
    blocks = re.split(r"^FROM ", text, flags=re.MULTILINE)[1:]
    return {block.splitlines()[0].rpartition(" AS ")[2]: block.splitlines() for block in blocks}


@pytest.mark.parametrize("target", ["cpu", "gpu"])
def test_an_image_runs_as_nobody_in_particular_and_keeps_the_project_above_the_packages(target: str) -> None:
    base, *steps = [line for line in stages()[target] if line]
    assert base.startswith("base AS")
    assert [step for step in steps if step.startswith("USER")] == ["USER 1000:1000"]
    order = [next(n for n, step in enumerate(steps) if word in step) for word in (f"packages-{target}", "from=wheel")]
    assert order == sorted(order), "a change of the project must not rebuild the packages"
    assert "COPY . " not in "\n".join(stages()[f"packages-{target}"])


def test_what_the_image_is_made_of_is_pinned_as_in_the_makefile() -> None:
    assert re.search(r"^FROM python:3\.11\.\d+-slim-\w+ AS base$", DOCKERFILE, re.MULTILINE)
    (uv,) = set(re.findall(r"uv==(\S+)", DOCKERFILE))
    assert f"uv=={uv}\n" in (ROOT / "Makefile").read_text(encoding="utf-8")
    (hatchling,) = re.findall(r"hatchling==(\S+)", DOCKERFILE)
    assert f"hatchling=={hatchling} " in (INFRA / "requirements-cpu.lock").read_text(encoding="utf-8")


def test_the_audit_reads_the_locks_of_both_images_and_fails_where_a_package_is_unknown() -> None:
    said = run("make", "audit", "--dry-run")
    assert "infra/image-cpu.lock infra/image-gpu.lock" in said and "--require-hashes --disable-pip --strict" in said


def pins(lock: str) -> dict[str, str]:
    text = (INFRA / lock).read_text(encoding="utf-8")
    blocks = re.split(r"^(?=[a-z0-9])", text, flags=re.MULTILINE)[1:]
    assert all("--hash=sha256:" in block for block in blocks)
    return dict(re.match(r"([\w.-]+)==([^ +]+)", block).groups() for block in blocks)  # type: ignore[union-attr]


def test_the_images_get_what_the_project_asks_for() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    gpu, cpu, tests = pins("image-gpu.lock"), pins("image-cpu.lock"), pins("requirements-cpu.lock")
    exact = [one for extra in ("gpu", "cpu", "smollm2") for one in project["optional-dependencies"][extra]]
    for name, pinned in (re.match(r"([\w-]+)[^=]*==(\S+)", one).groups() for one in exact if "==" in one):  # type: ignore[union-attr]
        assert {lock[name] for lock in (gpu, tests) if name in lock} == {pinned}, name
    asked = {re.split(r"[\[<>=]", one)[0] for one in project["dependencies"]}
    assert asked <= set(gpu) and asked <= set(cpu)
    assert not [name for name in cpu if name in tests and cpu[name] != tests[name]], "the image is what the tests test"
    assert not {"pytest", "mypy", "ruff"} & (set(gpu) | set(cpu)), "tools of the tests"


# What lies about in a folder that somebody builds an image in.
PRIVATE = (
    ".env", ".git/config", ".aws/credentials", ".ssh/id_ed25519", ".ray/auth_token", ".netrc", "keys.txt", "nohup.out",
    "my_conf/experiment/nightly.yaml", "runs/demo/results/part-00000000.parquet", "infra/.env", "infra/k8s/secret.yaml",
    "conf/.env", "conf/keys.txt", "conf/model/token", "jobs/service-account.json", "jobs/.env", "pipelines/.env",
    "pipelines/.aws/credentials", "pipelines/serving/keys.txt", "pipelines/serving/server.pem", "pipelines/id_rsa",
)  # fmt: skip


def test_the_build_gets_the_package_and_the_locks_and_nothing_that_lies_about(tmp_path: Path) -> None:
    for name in ("conf", "pipelines", "jobs"):
        shutil.copytree(ROOT / name, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__"))
    wanted = {str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*") if path.is_file()}
    wanted |= {"pyproject.toml", "README.md", "LICENSE", *(f"infra/{path.name}" for path in INFRA.glob("*.lock"))}
    for name in (*wanted, *PRIVATE, "Makefile", "infra/Dockerfile", "pipelines/__pycache__/plan.cpython-311.pyc", "tests/x.py"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    patterns = [line for line in (ROOT / ".dockerignore").read_text().splitlines() if line and line[0] != "#"]
    sent = {path for path in PatternMatcher(patterns).walk(str(tmp_path)) if (tmp_path / path).is_file()}
    assert sent == wanted, "a new folder, or kind of file, needs its line in .dockerignore"


def test_nothing_but_that_gets_into_a_layer_and_no_secret_is_asked_for() -> None:
    steps = [step for stage in stages().values() for step in stage[1:] if step]
    assert {step.split()[0] for step in steps} == {"ENV", "RUN", "COPY", "WORKDIR", "USER", "CMD"}, "no ADD, no ARG"
    copies = [step.split()[1:-1] for step in steps if step.startswith("COPY")]
    sources = {word for words in copies if not words[0].startswith("--from=") for word in words}
    assert {source for source in sources if source != "."} == {
        f"infra/{lock}" for lock in ("image-gpu.lock", "image-cpu.lock", "torch-cpu.lock")
    }
    shipped = [step for target in ("cpu", "gpu") for step in stages()[target] if step.startswith("COPY")]
    assert shipped and all(step.startswith("COPY --from=packages-") for step in shipped)
    assert not re.search(r"TOKEN|SECRET|PASSWORD|CREDENTIAL|_KEY|type=secret", "\n".join(steps))
    for lock in INFRA.glob("*.lock"):
        assert "://" not in lock.read_text(encoding="utf-8"), "the address of an index may hold a password"


# Launcher, Slurm, cron, Airflow.


@pytest.mark.parametrize("path", LAUNCHERS, ids=lambda path: path.stem)
def test_rays_launcher_takes_its_file(path: Path) -> None:
    spec = find_spec("ray")
    assert spec is not None and spec.submodule_search_locations is not None
    schema = Path(spec.submodule_search_locations[0]) / "autoscaler/ray-schema.json"
    config = yaml.safe_load(path.read_text(encoding="utf-8"))
    jsonschema.validate(config, json.loads(schema.read_text(encoding="utf-8")))
    kinds = config["available_node_types"]
    assert config["head_node_type"] in kinds and "GPU" not in kinds[config["head_node_type"]]["resources"]
    assert {name for name, kind in kinds.items() if "SPOT" in json.dumps(kind).upper()} == {"spot"}
    assert all(kind.get("min_workers", 0) == 0 for kind in kinds.values()), "an idle cluster costs its head alone"
    for name in ("head", "worker"):
        _, start = config[f"{name}_start_ray_commands"]
        assert "RAY_AUTH_MODE=token" in start
    assert "infra/image-gpu.lock" in json.dumps(config["setup_commands"])


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.name)
def test_shellcheck_finds_nothing(path: Path) -> None:
    assert run(tool("shellcheck"), path) == ""


def test_cron_calls_a_script_that_exists_with_a_day() -> None:
    lines = (INFRA / "cron/fournee.crontab").read_text(encoding="utf-8").splitlines()
    (entry,) = (line for line in lines if re.match(r"[\d*]", line))
    *when, command = entry.split(maxsplit=5)
    assert when == ["0", "1", "*", "*", "*"]
    assert r'"$(date -u +\%F)"' in command and "%F" not in command.replace(r"\%F", ""), "a bare % is a new line to cron"
    (script,) = re.findall(r"infra/\S+", command)
    assert (ROOT / script).stat().st_mode & 0o111
    assert "flock -n" in command


def a_night(folder: Path, *answers: str) -> tuple[int, list[str]]:
    """The exit code of cron's script, and what it called, where `fournee` answers so, one after the other: "<code> <words>"."""
    for name in ("fournee", "sleep"):
        script = f'#!/bin/bash\necho "{name} $*" >> {folder}/called\n'
        if name == "fournee":
            script += (
                f'read -r code words < {folder}/answers; sed -i 1d {folder}/answers; echo "fournee: $words" >&2; exit $code\n'
            )
        (folder / name).write_text(script, encoding="utf-8")
        (folder / name).chmod(0o755)
    (folder / "answers").write_text("".join(f"{answer}\n" for answer in answers), encoding="utf-8")
    (folder / "called").unlink(missing_ok=True)
    done = subprocess.run(
        [INFRA / "cron/nightly.sh", "2026-11-30"],
        env={"PATH": f"{folder}:/usr/bin:/bin"}, capture_output=True, text=True, timeout=30, check=False,
    )  # fmt: skip
    called = (folder / "called").read_text(encoding="utf-8").splitlines()
    return done.returncode, [" ".join(line.split()[:5]) for line in called]


SUBMIT = "fournee submit address=http://head:8265 -- batch"
FOLLOW = "fournee submit address=http://head:8265 logs fournee-night-1a2b3c4d-1"
CHECK = "fournee history check s3://your-bucket/answers"
ALIVE = "1 this run is alive as fournee-night-1a2b3c4d-1; follow or stop that one, or wait until it has ended"


@pytest.mark.parametrize(("answers", "code", "called"), [
    (["0", "3"], 3, ["sleep 0", SUBMIT, CHECK]),
    (["2"], 2, ["sleep 0", SUBMIT]),
    (["1", "4", "0", "0"], 0, ["sleep 0", SUBMIT, "sleep 300", SUBMIT, "sleep 600", SUBMIT, CHECK]),
    (["1", "1", "4"], 4, ["sleep 0", SUBMIT, "sleep 300", SUBMIT, "sleep 600", SUBMIT]),
    (["1", ALIVE, "0", "0"], 0, ["sleep 0", SUBMIT, "sleep 300", SUBMIT, FOLLOW, CHECK]),
    ([ALIVE, "4", "3"], 3, ["sleep 0", SUBMIT, FOLLOW, "sleep 300", SUBMIT]),
])  # fmt: skip
def test_crons_script_tries_three_times_and_follows_a_run_that_is_alive(
    answers: list[str], code: int, called: list[str], tmp_path: Path
) -> None:
    assert a_night(tmp_path, *answers) == (code, called)


class Operator:
    """Stands for Airflow's: it notes what it was given."""

    known: dict[str, dict[str, Any]]

    def __init__(self, **given: Any) -> None:
        self.known[given["task_id"]] = given
        self.name = given["task_id"]

    def __rshift__(self, other: "Operator") -> None:
        self.known[other.name]["after"] = self.name


class Dag:
    """Stands for Airflow's."""

    given: dict[str, Any]

    def __init__(self, **given: Any) -> None:
        Dag.given = given

    def __enter__(self) -> "Dag":
        return self

    def __exit__(self, *_: object) -> None:
        pass


def airflow_commands(patch: pytest.MonkeyPatch) -> list[str]:
    Operator.known = {}
    for name, content in (
        ("airflow", {}), ("airflow.sdk", {"DAG": Dag}), ("airflow.providers", {}), ("airflow.providers.standard", {}),
        ("airflow.providers.standard.operators", {}), ("airflow.providers.standard.operators.bash", {"BashOperator": Operator}),
    ):  # fmt: skip
        module = ModuleType(name)
        vars(module).update(content)
        patch.setitem(sys.modules, name, module)
    runpy.run_path(str(INFRA / "airflow/fournee_nightly.py"))
    return [str(given["bash_command"]) for given in Operator.known.values()]


def test_airflow_runs_one_night_at_a_time_and_looks_at_it_after() -> None:
    with pytest.MonkeyPatch.context() as patch:
        called = airflow_commands(patch)
    assert [command.split()[0] for command in called] == [".venv/bin/fournee"] * 2, "as cron and Slurm do, in the same folder"
    assert Dag.given["max_active_runs"] == 1
    assert Operator.known["check"]["after"] == "batch"
    tree = ast.parse((INFRA / "airflow/fournee_nightly.py").read_text(encoding="utf-8"))
    logic = (ast.FunctionDef, ast.ClassDef, ast.If, ast.For, ast.While, ast.Try, ast.Lambda)
    assert not [node for node in ast.walk(tree) if isinstance(node, logic)], "a declaration, no logic"


# Commands.


def page_lines() -> list[str]:
    blocks = re.findall(r"^```bash\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
    return [line for block in blocks for line in block.splitlines()]


def commands() -> list[str]:
    """All that call `fournee`, wherever they stand; those of the manifests are in test_kubernetes.py."""
    lines = [line for path in SCRIPTS for line in path.read_text(encoding="utf-8").replace("\\\n", " ").splitlines()]
    with pytest.MonkeyPatch.context() as patch:
        lines += [command.removeprefix(".venv/bin/") for command in airflow_commands(patch)]
    found = [line.strip().removesuffix("&") for line in (*lines, *page_lines()) if line.strip().startswith("fournee ")]
    return [re.sub(r"\s+", " ", line) for line in found]


@pytest.mark.parametrize("command", commands())
def test_every_command_composes(command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "my_conf/experiment").mkdir(parents=True)
    shutil.copy(conf_folder() / "experiment/nightly.yaml", tmp_path / "my_conf/experiment")
    monkeypatch.chdir(tmp_path)
    _, job, *words = on_a_day(command)
    if job == "submit" and "--" not in words:
        assert words[1:] == ["logs", "$alive"] and parse_submit(compose_settings("submit", words[:1]))
        return
    if job == "submit":
        parse_submit(compose_settings("submit", words[: words.index("--")]))
        job, *words = words[words.index("--") + 1 :]
        words = ["cluster=job", *words]  # as `fournee submit` does
    if job == "history":
        assert words[0] == "check" and parse_history(compose_settings("history", words[2:]))
        return
    assert (job, words.index("--config-dir")) in (("batch", 0), ("batch", 1))
    folder = words.pop(words.index("--config-dir") + 1)
    words.remove("--config-dir")
    config = parse_config(compose_settings("batch", words, folder))
    assert config.cluster.address == "auto" and config.experiment == "nightly"
    assert config.output.path is not None and config.output.path.endswith("2026-11-30")


def test_what_is_stopped_on_slurm_has_the_time_to_drain() -> None:
    script = (INFRA / "slurm/fournee.sbatch").read_text(encoding="utf-8")
    (warned_s,), (drain_s,) = re.findall(r"--signal=B:TERM@(\d+)", script), re.findall(r"cluster\.drain_s=(\d+)", script)
    assert int(drain_s) < int(warned_s)
    nodes, gpus, workers = (
        int(re.findall(pattern, script)[0])
        for pattern in (r"#SBATCH --nodes=(\d+)", r"\ngpus=(\d+)", r"cluster\.workers=(\d+)")
    )
    assert nodes * gpus == workers and f"--gpus-per-node={gpus}" in script


def test_the_page_names_what_there_is() -> None:
    known = ("docker ", "helm ", "kubectl ", "export ", "fournee ", "ray ", "sbatch ", "crontab ")
    assert not [line for line in page_lines() if not line.startswith(known)]
    for line in page_lines():
        words = shlex.split(re.sub(r'"\$\(.*?\)"', "x", line))
        assert all((ROOT / word).exists() for word in words if word.startswith("infra/")), line
        if words[0] == "docker" and "--target" in words:
            assert words[words.index("--target") + 1] in stages()
    names = {(one["kind"].lower(), one["metadata"]["name"]) for overlay in OVERLAYS for one in rendered(overlay)}
    patched = [words[words.index("patch") + 1 :][:2] for words in map(shlex.split, page_lines()) if "patch" in words]
    assert patched and all(tuple(one) in names for one in patched)
    for kind, secret in re.findall(r"create (secret) generic (\S+)", PAGE):
        assert kind and secret in str(rendered("prod")), secret


def test_nothing_on_the_page_asks_for_the_namespace_before_it_is_there() -> None:
    lines = page_lines()
    applied = lines.index("kubectl apply -k infra/k8s/overlays/prod")
    assert not [line for line in lines[:applied] if line.startswith(("kubectl diff", "kubectl -n fournee"))]
    assert "kubectl diff -k infra/k8s/overlays/prod" in lines[applied:]


# Alerts.


@pytest.fixture
def rules(tmp_path: Path) -> Path:
    """The rules as a file of Prometheus' own, cut out as the manifest says."""
    text = run("sed", "1,/^spec:/d", ALERTS)
    (tmp_path / "alerts.yml").write_text(text, encoding="utf-8")
    return tmp_path / "alerts.yml"


def alerts() -> list[dict[str, Any]]:
    loaded = yaml.safe_load(ALERTS.read_text(encoding="utf-8"))
    assert (loaded["apiVersion"], loaded["kind"]) == ("monitoring.coreos.com/v1", "PrometheusRule")
    return [rule for group in loaded["spec"]["groups"] for rule in group["rules"]]


def test_prometheus_takes_the_rules(rules: Path) -> None:
    assert f"{len(alerts())} rules found" in run(tool("promtool"), "check", "rules", rules)


def test_each_alert_fires_when_it_should_and_is_silent_when_not(rules: Path) -> None:
    played = shutil.copy(INFRA / "prometheus/alerts_test.yml", rules.parent)
    run(tool("promtool"), "test", "rules", Path(played))
    cases = yaml.safe_load(Path(played).read_text(encoding="utf-8"))["tests"]
    expected = [(one["alertname"], bool(one["exp_alerts"])) for case in cases for one in case["alert_rule_test"]]
    assert set(expected) == {(rule["alert"], fires) for rule in alerts() for fires in (True, False)}


def test_alerts_ask_for_metrics_and_labels_that_exist() -> None:
    ours = {name: metric for metric in (*OF_WORKER, *OF_RUN.values()) for name in metric.exported}
    for rule in alerts():
        names = set(re.findall(r"\b(?:ray|kuberay|kube)_\w+", rule["expr"]))
        assert names and names <= {*ours, *OPERATOR}, rule["alert"]
        tags = {"run", "model", "experiment", *(tag for name in names & set(ours) for tag in ours[name].tags)}
        allowed = tags if names & set(ours) else {"namespace", "name", "deployment_status", "condition"}
        by = {label.strip() for group in re.findall(r"\b(?:by|on) \(([^)]*)\)", rule["expr"]) for label in group.split(",")}
        chosen = set(re.findall(r"(\w+)\s*=~?\s*\"", rule["expr"]))
        assert by | chosen <= allowed, rule["alert"]
        assert rule["labels"]["severity"] in ("warning", "critical") and {"summary", "remedy"} == set(rule["annotations"])
