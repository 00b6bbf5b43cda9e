"""A Ray cluster of several nodes on this machine, in a process of its own; `cluster.py` talks to it over its pipes.

Whatever way this process ends, the kernel ends the cluster's processes with it. Each line read is a command, each line
written its answer; the end of the input ends all.
"""

import json
import logging
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any, TypeVar

import psutil
import ray
from ray._common.utils import reset_ray_address
from ray._private.node import Node
from ray.cluster_utils import Cluster
from ray.core.generated import autoscaler_pb2

T = TypeVar("T")

logger = logging.getLogger(__name__)

_TRIES = 3
_NODE = {"include_dashboard": False, "object_store_memory": 80 * 2**20}
# A frozen node is dead after five seconds; at Ray's defaults it takes half a minute.
_HEALTH_CHECK = {
    "health_check_initial_delay_ms": 1000,
    "health_check_period_ms": 1000,
    "health_check_timeout_ms": 1000,
    "health_check_failure_threshold": 5,
}


def main(num_nodes: int) -> None:
    """Start a head without CPUs and so many nodes of one CPU, and obey until the input ends."""
    head = {**_NODE, "num_cpus": 0, "_system_config": _HEALTH_CHECK}
    cluster = _patiently(lambda: Cluster(initialize_head=True, head_node_args=head))
    # One after the other, six seconds each: the kernel ends a node with the thread that started it.
    nodes = {node.node_id: node for node in (_add(cluster) for _ in range(num_nodes))}
    _say({"address": cluster.address, "nodes": {name: _raylet(node) for name, node in nodes.items()}})
    for line in sys.stdin:
        command, *arguments = line.split()
        match command:
            case "add":
                node = _add(cluster)
                nodes[node.node_id] = node
                _say({"node": node.node_id, "raylet": _raylet(node)})
            case "kill":
                _kill(cluster, nodes.pop(arguments[0]))
                _say({})
            case "drain":
                _say({"accepted": _drain(cluster, arguments[0], float(arguments[1]))})
    for node in reversed(cluster.list_all_nodes()):
        _kill(cluster, node)
    reset_ray_address()


def _add(cluster: Cluster) -> Node:
    return _patiently(lambda: cluster.add_node(**_NODE, num_cpus=1))


def _patiently(start: Callable[[], T]) -> T:
    """Try again where the machine is so busy that a node takes longer to start than the 30 seconds that Ray allows."""
    for _ in range(_TRIES - 1):
        try:
            return start()
        except Exception:
            logger.exception("a node did not start; trying again")  # Ray raises nothing narrower here
    return start()


def _kill(cluster: Cluster, node: Node) -> None:
    """End all processes of a node at once, as when its machine loses power."""
    processes = psutil.Process(_raylet(node)).children(recursive=True)
    cluster.remove_node(node, allow_graceful=False)
    for process in processes:
        with suppress(psutil.NoSuchProcess):
            process.kill()


def _drain(cluster: Cluster, node: str, deadline_s: float) -> bool:
    accepted, _ = ray._raylet.GcsClient(address=cluster.address).drain_node(
        node,
        autoscaler_pb2.DrainNodeReason.Value("DRAIN_NODE_REASON_PREEMPTION"),
        "a spot notice",
        int((time.time() + deadline_s) * 1000),
    )
    return bool(accepted)


def _raylet(node: Node) -> int:
    return int(node.all_processes["raylet"][0].process.pid)


def _say(answer: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps(answer) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main(int(sys.argv[1]))
