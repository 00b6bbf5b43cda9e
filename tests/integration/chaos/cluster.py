"""A Ray cluster of several nodes on this machine, any of which can be killed, drained, frozen and replaced."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import psutil

NUM_NODES = 3
_ENVIRONMENT = {"RAY_AUTH_MODE": "disabled", "RAY_USAGE_STATS_ENABLED": "0"}


class RayCluster:
    """A head without CPUs and nodes of one CPU each; drivers join it with `environment`."""

    def __init__(self) -> None:
        self.nodes: dict[str, int] = {}
        """Each living node and the process of its raylet, whose children are all others of the node."""
        self._start()

    @property
    def environment(self) -> dict[str, str]:
        """The environment of a driver on this cluster."""
        return {**os.environ, **_ENVIRONMENT, "RAY_ADDRESS": self._address}

    def add_node(self) -> None:
        """Start one more node."""
        answer = self._ask("add")
        self.nodes[answer["node"]] = answer["raylet"]

    def kill_node(self, node: str) -> None:
        """End all processes of a node at once."""
        del self.nodes[node]
        self._ask(f"kill {node}")

    def drain_node(self, node: str, deadline_s: float) -> None:
        """Give notice that a node will be gone soon; killing it is up to the caller."""
        assert self._ask(f"drain {node} {deadline_s}")["accepted"], f"Ray did not accept the notice for {node}"

    def processes(self, node: str) -> list[psutil.Process]:
        """The raylet of a node, and all that it has started."""
        raylet = psutil.Process(self.nodes[node])
        return [raylet, *raylet.children(recursive=True)]

    def node_of(self, worker: psutil.Process) -> str | None:
        """The living node that a worker process belongs to."""
        try:
            ancestors = {parent.pid for parent in worker.parents()}
        except psutil.NoSuchProcess:
            return None
        return next((node for node, raylet in self.nodes.items() if raylet in ancestors), None)

    def replace(self) -> None:
        """Kill all of it at once, and start another one."""
        self.kill()
        self._start()

    def kill(self) -> None:
        """Kill all of it at once, the head included, unless it is gone already."""
        if self._host.poll() is not None:
            return
        processes = psutil.Process(self._host.pid).children(recursive=True)
        self._host.kill()
        for process in processes:
            with suppress(psutil.NoSuchProcess):
                process.kill()
        self._host.wait()

    def _start(self) -> None:
        self._host = subprocess.Popen(
            [sys.executable, "-m", "tests.integration.chaos.cluster_host", str(NUM_NODES)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, **_ENVIRONMENT},
        )
        answer = self._answer()
        self._address, self.nodes = answer["address"], answer["nodes"]

    def _ask(self, command: str) -> dict[str, Any]:
        assert self._host.stdin is not None
        self._host.stdin.write(f"{command}\n")
        self._host.stdin.flush()
        return self._answer()

    def _answer(self) -> dict[str, Any]:
        assert self._host.stdout is not None
        line = self._host.stdout.readline()
        assert line, "the Ray cluster is gone"
        answer: dict[str, Any] = json.loads(line)
        return answer


@contextmanager
def ray_cluster() -> Iterator[RayCluster]:
    """A cluster for the block."""
    cluster = RayCluster()
    try:
        yield cluster
    finally:
        cluster.kill()
