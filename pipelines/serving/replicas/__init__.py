"""The endpoint on Ray Serve, whose only importer this package is: one ingress, and replicas that have an engine each.

The replicas are Ray's own `LLMServer`. They are asked with plain JSON texts, so that neither the driver nor the ingress
imports vLLM, which takes 18 s of a core in each process.
"""

import asyncio
import json
import logging
import os
import time
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import aclosing
from typing import Any

from fastapi import FastAPI
from ray import cluster_resources, get_runtime_context, serve
from ray.exceptions import RayError
from ray.serve import Application
from ray.serve.exceptions import BackPressureError, RayServeException
from ray.serve.handle import DeploymentHandle

from pipelines.config import EchoEngineConfig, ServeConfig
from pipelines.engines.served import KEY_VARIABLE
from pipelines.placement import Placement, place
from pipelines.serving.app import Gate, build_app
from pipelines.serving.asking import Ask
from pipelines.serving.batch_routes import add_batch_routes
from pipelines.serving.batches import Batches
from pipelines.serving.echo import EchoServer
from pipelines.serving.endpoint import Endpoint
from pipelines.serving.faults import Full, Unavailable
from pipelines.serving.files import Files
from pipelines.serving.job_process import run_in_process
from pipelines.serving.replicas.metrics import ServeMetrics
from pipelines.serving.usage import Usage

logger = logging.getLogger(__name__)

APP = "fournee"
_MODEL, _INGRESS = "model", "ingress"
_HEALTH_PERIOD_S = 2.0
_HEALTH_TIMEOUT_S = 30.0  # a replica on a CPU renders and tokenises in the thread that answers, too
_LOOK_S = 1.0  # between two looks at the replicas
_SHUTDOWN_LOOP_S = 0.5
_ANY_NUMBER = 1_000_000  # the ingress itself refuses nothing: that is its gate's work


class Replica:
    """One engine, with the server that speaks OpenAI's API for it."""

    async def __init__(self, endpoint: Endpoint, placement: Placement):  # type: ignore[misc]  # Serve awaits it
        self._server: Any
        if isinstance(endpoint.config.engine, EchoEngineConfig):
            self._server = EchoServer(endpoint.config)
            return
        from pipelines.serving.replicas.llm import VllmServer  # imports vLLM

        self._server = await VllmServer.started(endpoint.config, endpoint.revision, placement.device)

    async def answer(self, ask: Ask, request_id: str) -> AsyncGenerator[Sequence[str], None]:
        """Answer one request; being cancelled, it cancels the generation."""
        async with aclosing(self._server.answer(ask, request_id=request_id, key="")) as said:
            async for texts in said:
                yield texts

    async def check_health(self) -> None:
        """Called by Serve, which replaces the replica where this raises again and again."""
        if hasattr(self._server, "check_health"):
            await self._server.check_health()


class Replicas:
    """The replicas as the ingress sees them."""

    def __init__(self, handle: DeploymentHandle):
        self._handle = handle.options(stream=True)
        self._num_ready = 0

    async def answer(self, ask: Ask, *, request_id: str, key: str) -> AsyncGenerator[Sequence[str], None]:
        """Ask one of them; raises Full or Unavailable."""
        if not await self.num_ready():
            raise Unavailable("no replica is ready yet; come again later")
        said = self._handle.answer.remote(ask, request_id)
        try:
            async for texts in said:
                yield texts
        except BackPressureError:
            raise Full from None
        except (RayError, RayServeException) as error:
            raise Unavailable(f"the replica that answered is gone ({type(error).__name__}); come again later") from None
        except (GeneratorExit, asyncio.CancelledError):  # the client has left
            said.cancel()
            raise

    async def num_ready(self) -> int:
        """How many of them run, as Serve's controller said last."""
        return self._num_ready

    async def look_for_ever(self) -> None:
        """Ask the controller again and again, beside the requests: it takes 50 ms to answer, and sometimes far longer."""
        while True:
            await self.look()
            await asyncio.sleep(_LOOK_S)

    async def look(self) -> None:
        """Ask it once."""
        try:
            self._num_ready = await asyncio.to_thread(_num_running)
        except (RayError, RayServeException):
            logger.warning("Serve's controller does not say how many replicas run", exc_info=True)


class Ingress:
    """The process that clients talk to."""

    def __init__(self, endpoint: Endpoint, handle: DeploymentHandle, num_accelerators: int):
        logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s", datefmt="%H:%M:%S")
        self._endpoint = endpoint
        self._backend = Replicas(handle)
        self._usage = Usage(endpoint, num_accelerators)

    async def __serve_build_asgi_app__(self) -> FastAPI:
        """Called by Serve once."""
        one = self._endpoint
        await self._backend.look()  # an ingress that takes another's place must not begin with refusals
        metrics = ServeMetrics(one.config)
        lasting = (self._backend.look_for_ever(), self._note(), metrics.show_for_ever())
        self._tasks = [asyncio.create_task(one) for one in lasting]
        observers = (metrics, self._usage)
        gate = Gate(one.config, self._backend, one.keys, observers, one.special_tokens)
        app = build_app(gate, one.page)
        files = Files(one.folder, one.config.serve.max_file_bytes)
        batches = Batches(one.config, one.folder, files, self._run_job)
        add_batch_routes(app, gate, files, batches)
        self._tasks.append(asyncio.create_task(batches.run_for_ever()))
        return app

    async def _run_job(self, settings: str, client: str, is_cancelled: Callable[[], bool]) -> int:
        """Run a batch as a job of this cluster that asks this endpoint."""
        environment = {
            "RAY_ADDRESS": get_runtime_context().gcs_address,
            "RAY_AUTH_MODE": os.environ.get("RAY_AUTH_MODE", "token"),
            KEY_VARIABLE: self._endpoint.keys.batch_key_for(client),
        }
        return await run_in_process(settings, is_cancelled, environment)

    async def _note(self) -> None:
        """Write the usage down now and then; a storage that is away for a while keeps nothing from being answered."""
        while True:
            await asyncio.sleep(self._endpoint.config.serve.usage_interval_s)
            try:
                await asyncio.to_thread(self._usage.write, await self._backend.num_ready())
            except OSError:
                logger.warning("usage could not be written", exc_info=True)

    async def __del__(self) -> None:
        """Called by Serve when requests have come to their end."""
        await asyncio.to_thread(self._usage.write, await self._backend.num_ready())


def application(endpoint: Endpoint, placement: Placement | None = None) -> Application:
    """The endpoint as Serve takes it; its replicas are placed by what this cluster has, unless that was looked at already."""
    placement = placement or place(endpoint.config, cluster_resources())
    model = serve.deployment(Replica, name=_MODEL, **_model_options(endpoint.config, placement)).bind(endpoint, placement)
    return serve.deployment(
        serve.ingress()(Ingress),
        name=_INGRESS,
        max_ongoing_requests=_ANY_NUMBER,
        ray_actor_options={"num_cpus": 0},
        graceful_shutdown_timeout_s=endpoint.config.cluster.drain_s,
        graceful_shutdown_wait_loop_s=_SHUTDOWN_LOOP_S,
    ).bind(endpoint, model, placement.num_accelerators)


def deploy(endpoint: Endpoint, placement: Placement) -> None:
    """Start the endpoint, or bring a running one up to date replica by replica; returns when it answers."""
    settings = endpoint.config.serve
    quiet = {"enable_access_log": False, "log_level": "INFO" if endpoint.config.verbose else "WARNING"}
    serve.start(http_options={"host": settings.host, "port": settings.port}, logging_config=quiet)
    serve.run(application(endpoint, placement), name=APP, route_prefix="/", logging_config=quiet)
    time.sleep(2 * _LOOK_S)  # until the ingress has seen its replicas


def take_down() -> None:
    """Let requests that run come to their end, for at most `cluster.drain_s`, and take no others."""
    serve.delete(APP)
    serve.shutdown()


def _model_options(config: ServeConfig, placement: Placement) -> dict[str, Any]:
    settings, cluster = config.serve, config.cluster
    options: dict[str, Any] = {
        "max_ongoing_requests": settings.max_running,
        "max_queued_requests": settings.max_queued,
        "health_check_period_s": _HEALTH_PERIOD_S,
        "health_check_timeout_s": _HEALTH_TIMEOUT_S,
        "graceful_shutdown_timeout_s": cluster.drain_s,
        "graceful_shutdown_wait_loop_s": _SHUTDOWN_LOOP_S,
        "ray_actor_options": {
            "num_cpus": cluster.cpus_per_worker,
            "runtime_env": {"env_vars": _environment(placement.environment)},
        },
        "placement_group_bundles": _bundles(config, placement),
    }
    if cluster.max_workers is None:
        return {**options, "num_replicas": cluster.workers}
    scaling = {
        "min_replicas": cluster.workers,
        "initial_replicas": cluster.workers,
        "max_replicas": cluster.max_workers,
        "target_ongoing_requests": settings.target_running,
    }
    return {**options, "autoscaling_config": scaling}


def _bundles(config: ServeConfig, placement: Placement) -> list[dict[str, float]]:
    """What one replica takes: the process itself lives beside its first GPU."""
    own: dict[str, float] = {"CPU": config.cluster.cpus_per_worker}
    if placement.device == "cpu":
        return [own]
    kind = config.cluster.accelerator_type
    each: dict[str, float] = {"GPU": 1.0, **({f"accelerator_type:{kind}": 0.001} if kind is not None else {})}
    return [{**own, **each}, *([each] * (placement.num_accelerators - 1))]


def _environment(of_a_worker: Mapping[str, str]) -> dict[str, str]:
    """A worker's, but for what puts its engine into its own process, which vLLM's servers cannot do."""
    return {name: value for name, value in of_a_worker.items() if name != "VLLM_ENABLE_V1_MULTIPROCESSING"}


def _num_running() -> int:
    application = serve.status().applications.get(APP)
    model = application.deployments.get(_MODEL) if application is not None else None
    return 0 if model is None else model.replica_states.get("RUNNING", 0)


def as_error(message: str, status: int) -> str:
    """An error as an engine's server says it."""
    return json.dumps({"error": {"message": message, "code": status}})
