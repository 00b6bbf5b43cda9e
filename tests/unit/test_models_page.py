"""docs/models.md: a row for each model file, and every number recomputed."""

import re
import shlex
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import yaml

from pipelines import placement
from pipelines.compose import compose_settings, conf_folder
from pipelines.config import BatchConfig
from pipelines.parse import parse_config, parse_estimate
from pipelines.placement import place

PAGE = (Path(__file__).parents[2] / "docs/models.md").read_text(encoding="utf-8")
MODELS = {
    path.stem: yaml.safe_load(path.read_text(encoding="utf-8")) for path in sorted((conf_folder() / "model").glob("*.yaml"))
}
SHARE, NEEDED_GB = 0.92, 3  # vLLM's own gpu_memory_utilization, and the page's allowance for each GPU

Row = dict[str, str]


def table(column: str) -> list[Row]:
    """The page's table that has such a column."""
    for block in re.findall(r"(?:^\|.*\n)+", PAGE, re.MULTILINE):
        head, _, *lines = ([cell.strip() for cell in line.strip("|\n").split("|")] for line in block.splitlines())
        if column in head:
            return [dict(zip(head, cells, strict=True)) for cells in lines]
    raise KeyError(column)


def name_of(row: Row) -> str:
    return row["`model=`"].strip("`")


def number(cell: str) -> float:
    return float(cell.replace(",", ""))


WEIGHTS = {name_of(row): number(row["weights, GB"]) for row in table("weights, GB")}
TOKEN_BYTES = {name_of(row): number(row["bytes of a token"]) for row in table("bytes of a token")}


def test_every_model_file_has_its_row_and_no_other() -> None:
    assert {name_of(row) for row in table("licence")} == set(WEIGHTS) == set(MODELS)
    assert set(MODELS) - set(TOKEN_BYTES) == {name for name, model in MODELS.items() if "runner" in model["engine_kwargs"]}


@pytest.mark.parametrize("row", table("licence"), ids=name_of)
def test_a_file_says_its_licence_size_and_a_length_that_its_model_can_have(row: Row) -> None:
    model, weights = MODELS[name_of(row)], WEIGHTS[name_of(row)]
    first = (conf_folder() / "model" / f"{name_of(row)}.yaml").read_text(encoding="utf-8").splitlines()[0]
    assert row["licence"].split(",")[0] in first and f"{weights} GB" in first
    assert model["name"] == name_of(row)
    assert model["max_model_len"] < number(row["longest context"])


@pytest.mark.parametrize("row", table("licence"), ids=name_of)
def test_a_worker_has_the_gpus_that_the_page_says(
    batch_config: Callable[..., BatchConfig], monkeypatch: pytest.MonkeyPatch, row: Row
) -> None:
    monkeypatch.setattr(placement, "installed_versions", lambda names: {})  # as on a machine with the GPU build of vLLM
    gpus = re.match(r"\d+(?= × )", row["one worker"])
    found = place(batch_config(f"model={name_of(row)}"), {})
    assert found.num_accelerators == (1 if gpus is None else int(gpus[0]))


def test_vllm_has_every_architecture() -> None:
    spec = find_spec("vllm")
    if spec is None or spec.submodule_search_locations is None:
        pytest.skip("vLLM is not installed")
    registry = Path(spec.submodule_search_locations[0]) / "model_executor/models/registry.py"
    known = set(re.findall(r'^    "(\w+)": \(', registry.read_text(encoding="utf-8"), re.MULTILINE))
    assert {row["architecture in vLLM"] for row in table("licence")} <= known


@pytest.mark.parametrize("row", table("weights, GB"), ids=name_of)
def test_weights_are_parameters_times_bytes(row: Row) -> None:
    every, quantized = number(row["all parameters"]), number(row["in the format"])
    assert number(row["weights, GB"]) == pytest.approx(
        quantized * number(row["bytes each"]) + (every - quantized) * 2, abs=0.06
    )


@pytest.mark.parametrize("row", table("bytes of a token"), ids=name_of)
def test_a_token_in_the_cache_is_keys_and_values_of_every_layer(row: Row) -> None:
    layers, heads, size, each = (int(row[name]) for name in ("layers", "KV heads", "head size", "bytes"))
    assert 2 * layers * heads * size * each == TOKEN_BYTES[name_of(row)]
    has_fp8 = MODELS[name_of(row)]["engine_kwargs"].get("kv_cache_dtype") == "fp8"
    assert (each == 1) == has_fp8


@pytest.mark.parametrize("row", table("requests of 1,000"), ids=lambda row: f"{name_of(row)}, {row['GPUs']}")
def test_the_cache_is_what_the_weights_leave(row: Row) -> None:
    model = MODELS[name_of(row)]
    gpus, memory_gb = map(int, re.findall(r"\d+", row["GPUs"]))
    share = model["engine_kwargs"].get("gpu_memory_utilization", SHARE)
    cache_gb = gpus * (memory_gb * share - NEEDED_GB) - WEIGHTS[name_of(row)]
    tokens = cache_gb * 1e9 / TOKEN_BYTES[name_of(row)]
    assert number(row["cache, GB"]) == pytest.approx(cache_gb, abs=0.06)
    assert number(row["tokens"]) == pytest.approx(tokens, abs=600)
    assert number(row["requests of 1,000"]) == int(tokens / 1000)
    assert tokens >= model["max_model_len"], "vLLM refuses to start where the cache does not hold one longest request"


def test_the_calculations_by_hand_come_to_what_they_say() -> None:
    form = r"- `(\w+)` on one .*?: (\d+) × 0\.92 − 3 − ([\d.]+) = ([\d.]+) GB; / ([\d,]+) = ([\d,]+) tokens; (\d+) requests"
    found = re.findall(form, " ".join(PAGE.split()))
    assert len(found) == 2
    for name, *cells in found:
        memory_gb, weights_gb, cache_gb, token_bytes, tokens, requests = map(number, cells)
        assert (weights_gb, token_bytes) == (WEIGHTS[name], TOKEN_BYTES[name])
        assert cache_gb == pytest.approx(memory_gb * SHARE - NEEDED_GB - weights_gb, abs=0.06)
        assert tokens == pytest.approx(cache_gb * 1e9 / token_bytes, abs=600)
        assert requests == int(tokens / 1000)


def test_more_workers_of_fewer_bits_hold_as_much_as_fewer_workers_of_more_gpus() -> None:
    """The paragraph on qwen3_32b on four GPUs of 80 GB."""
    text, token_bytes = " ".join(PAGE.split()), TOKEN_BYTES["qwen3_32b"]

    def requests(gpus: int, weights_gb: float) -> int:
        return int((gpus * (80 * SHARE - NEEDED_GB) - weights_gb) * 1e6 / token_bytes)

    alone, pair, fp8 = requests(1, WEIGHTS["qwen3_32b"]), requests(2, WEIGHTS["qwen3_32b"]), requests(1, 31.2 + 2 * 1.56)
    assert f"four workers with {alone} requests each, {4 * alone} together" in text
    assert f"two of two GPUs with {pair} each, {2 * pair} together" in text
    assert f"{fp8} requests each, {4 * fp8} together" in text


def test_so_many_requests_fill_a_gpu() -> None:
    said = re.search(r"in bfloat16: (\d+) on an H100, (\d+) on an H200, (\d+) on an L40S", PAGE)
    assert said is not None
    for name, requests in zip(("h100", "h200", "l40s"), said.groups(), strict=True):
        pricing = yaml.safe_load((conf_folder() / "pricing" / f"{name}.yaml").read_text(encoding="utf-8"))
        peak = pricing["peak_tflops"] * 1e12 * 2 / (2 * pricing["peak_memory_gb_per_s"] * 1e9)
        assert int(requests) == round(peak)


def test_hours_and_cost_by_hand() -> None:
    price = yaml.safe_load((conf_folder() / "pricing/l40s.yaml").read_text(encoding="utf-8"))["price_per_accelerator_hour"]
    hours = 1_000_000 * 300 / 2_000 / 3600
    for said in (f"= {hours:.1f} worker hours", f"{price} USD", f"= {hours * price:.2f} USD", f"= {hours / 8:.1f} hours"):
        assert said in PAGE
    assert f"{hours * price / 300:.2f} USD per million output tokens" in PAGE


@pytest.mark.parametrize("line", [line for line in PAGE.splitlines() if line.startswith(("fournee batch", "fournee estimate"))])
def test_every_command_composes(line: str) -> None:
    parsers: dict[str, Any] = {"batch": parse_config, "estimate": parse_estimate}
    _, job, *overrides = shlex.split(line)
    parsers[job](compose_settings(job, overrides))
