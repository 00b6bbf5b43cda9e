"""What a worker asks Ray for: the border that only a GPU cluster could cross for real."""

from collections.abc import Callable

import pytest

from pipelines import placement
from pipelines.config import BatchConfig
from pipelines.errors import ConfigError
from pipelines.placement import cache_block_size, check_room, place

Config = Callable[..., BatchConfig]
GPUS = {"CPU": 64.0, "GPU": 8.0}


@pytest.fixture
def gpu_build(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a machine where vLLM is not the CPU build that these tests run with."""
    monkeypatch.setattr(placement, "installed_versions", lambda names: {})


@pytest.mark.usefixtures("gpu_build")
@pytest.mark.parametrize(
    ("kwargs", "gpus"),
    [
        ([], 1),
        (["engine.kwargs.tensor_parallel_size=4"], 4),
        (["engine.kwargs.tensor_parallel_size=2", "engine.kwargs.pipeline_parallel_size=2"], 4),
    ],
)
def test_a_gpu_worker_asks_for_tensor_times_pipeline_parallel_gpus(batch_config: Config, kwargs: list[str], gpus: int) -> None:
    found = place(batch_config("cluster=job", *kwargs), GPUS)
    assert (found.device, found.num_accelerators) == ("gpu", gpus)
    assert "VLLM_ENABLE_V1_MULTIPROCESSING" not in found.environment
    assert "LD_PRELOAD" not in found.environment


@pytest.mark.usefixtures("gpu_build")
@pytest.mark.parametrize(("setting", "device"), [("auto", "gpu"), ("cpu", "cpu"), ("gpu", "gpu")])
@pytest.mark.parametrize("resources", [GPUS, {"CPU": 2.0}], ids=["gpus", "scaled to zero"])
def test_the_gpu_build_runs_on_gpus_also_where_the_cluster_has_yet_to_add_them(
    batch_config: Config, setting: str, device: str, resources: dict[str, float]
) -> None:
    assert place(batch_config(f"engine.device={setting}"), resources).device == device


def test_the_cpu_build_runs_on_cpus_even_beside_gpus(batch_config: Config) -> None:
    assert place(batch_config(), GPUS).device == "cpu"


def test_cpu_workers_share_the_cores_and_do_not_bind_to_the_same_ones(batch_config: Config) -> None:
    alone = place(batch_config(), {"CPU": 8.0}).environment
    assert alone["OMP_NUM_THREADS"] == "8"
    assert "VLLM_CPU_OMP_THREADS_BIND" not in alone
    four = place(batch_config("cluster.workers=4"), {"CPU": 8.0}).environment
    assert (four["OMP_NUM_THREADS"], four["VLLM_CPU_OMP_THREADS_BIND"]) == ("2", "nobind")
    assert place(batch_config("engine.cpu_threads=3"), {"CPU": 8.0}).environment["OMP_NUM_THREADS"] == "3"


def test_what_the_user_has_set_stays(batch_config: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "17")
    assert place(batch_config(), {"CPU": 2.0}).environment["VLLM_CPU_KVCACHE_SPACE"] == "17"


def test_only_models_on_this_machine_do_without_the_hub(batch_config: Config) -> None:
    assert place(batch_config(), {"CPU": 2.0}).environment["HF_HUB_OFFLINE"] == "1"
    assert "HF_HUB_OFFLINE" not in place(batch_config("model=qwen3_8b"), {"CPU": 2.0}).environment


EIGHT = [{"CPU": 64.0, "GPU": 8.0, "accelerator_type:H100": 1.0}]
SCATTERED = [{"CPU": 4.0}, {"CPU": 16.0, "GPU": 1.0}, {"CPU": 16.0, "GPU": 1.0}]


@pytest.mark.usefixtures("gpu_build")
@pytest.mark.parametrize(
    ("nodes", "overrides", "message"),
    [
        (
            EIGHT,
            ["cluster.workers=9"],
            "cluster.workers=9 need 1 CPU and 1 GPU each, on one node, and this cluster has room for 8: "
            r"1 x 64 CPUs and 8 GPUs \(H100\); lower cluster.workers",
        ),
        (EIGHT, ["cluster.workers=3", "engine.kwargs.tensor_parallel_size=4"], "room for 2: .* lower cluster.workers"),
        (EIGHT, ["cluster.workers=5", "cluster.cpus_per_worker=20"], "room for 3: .* or cluster.cpus_per_worker"),
        (EIGHT, ["engine=echo", "cluster.workers=65"], "need 1 CPU each, on one node, and this cluster has room for 64"),
        (EIGHT, ["cluster.cpus_per_worker=65"], "room for 0: .* lower cluster.cpus_per_worker$"),
        (
            SCATTERED,
            ["engine.kwargs.tensor_parallel_size=2"],
            "need 1 CPU and 2 GPUs each, on one node, and this cluster has room for 0: "
            "1 x 4 CPUs, 2 x 16 CPUs and 1 GPU; lower engine.kwargs.tensor_parallel_size",
        ),
        (SCATTERED[:1], [], "room for 0: 1 x 4 CPUs; add a node with GPUs, or install a CPU build of vLLM"),
        (
            EIGHT,
            ["cluster.accelerator_type=A100"],
            r"1 GPU \(A100\) each, .* 8 GPUs \(H100\); no node has cluster.accelerator_type=A100; null takes any",
        ),
    ],
)
def test_workers_that_never_fit_are_refused(
    batch_config: Config, nodes: list[dict[str, float]], overrides: list[str], message: str
) -> None:
    config = batch_config(*overrides)
    with pytest.raises(ConfigError, match=message):
        check_room(config, place(config, GPUS), nodes, can_grow=False)


@pytest.mark.usefixtures("gpu_build")
@pytest.mark.parametrize(
    ("nodes", "overrides"),
    [
        (EIGHT, ["cluster.workers=8"]),
        (EIGHT, ["cluster.workers=2", "engine.kwargs.tensor_parallel_size=4", "cluster.accelerator_type=H100"]),
        (SCATTERED, ["cluster.workers=2"]),
        (SCATTERED, ["cluster.workers=2", "cluster.max_workers=50"]),
        ([{"CPU": 0.3}], ["engine=echo", "cluster.workers=3", "cluster.cpus_per_worker=0.1"]),
    ],
)
def test_workers_that_fit_have_nothing_to_wait_for(
    batch_config: Config, nodes: list[dict[str, float]], overrides: list[str]
) -> None:
    config = batch_config(*overrides)
    assert check_room(config, place(config, GPUS), nodes, can_grow=False) is None


@pytest.mark.usefixtures("gpu_build")
def test_a_cluster_that_can_grow_is_waited_for_and_the_wait_is_named(batch_config: Config) -> None:
    config = batch_config("cluster=job", "cluster.workers=4", "cluster.start_timeout_s=600")
    placement = place(config, {"CPU": 4.0})
    assert check_room(config, placement, [{"CPU": 4.0}], can_grow=True) == (
        "cluster.workers=4 need 2 CPUs and 1 GPU each, on one node; this cluster has room for 0: 1 x 4 CPUs; "
        "waiting for the first, for at most cluster.start_timeout_s=600"
    )
    waiting = check_room(config, placement, SCATTERED, can_grow=True)
    assert waiting is not None
    assert waiting.endswith("this cluster has room for 2: 1 x 4 CPUs, 2 x 16 CPUs and 1 GPU; the job starts with these")


@pytest.mark.parametrize(
    ("settings", "tokens"),
    [(["engine.device=gpu"], 16), (["engine.device=cpu"], 128), (["engine.kwargs.block_size=64"], 64), (["engine=echo"], 16)],
)
def test_the_blocks_of_a_prefix_cache_are_as_large_as_the_engine_makes_them(
    batch_config: Config, settings: list[str], tokens: int
) -> None:
    assert cache_block_size(batch_config(*settings)) == tokens
