"""Which engine options there are, without importing vLLM (which takes tens of seconds)."""

import ast
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from pipelines.errors import ConfigError
from pipelines.suggest import did_you_mean

_OURS = {
    "model": "model.path",
    "revision": "model.revision",
    "dtype": "model.dtype",
    "max_model_len": "model.max_model_len",
    "trust_remote_code": "model.trust_remote_code",
    "reasoning_parser": "model.reasoning_parser",
    "hf_token": "the environment variable HF_TOKEN",
    "disable_log_stats": "nothing: statistics are always on",
}


def check_options(kwargs: dict[str, Any]) -> None:
    """Refuse options that vLLM does not have, without importing it (which takes tens of seconds).

    Raises ConfigError that names the option. Values are checked by vLLM itself, when the worker builds its engine.
    """
    for name in kwargs:
        if name in _OURS:
            raise ConfigError(f"engine.kwargs.{name} is set by {_OURS[name]}")
    known = engine_options()
    for name in kwargs:
        if known and name not in known:
            raise ConfigError(f"engine.kwargs.{name} is not an option of vLLM's EngineArgs{did_you_mean(name, known)}")


def engine_options() -> set[str]:
    """The fields of vLLM's `EngineArgs`, read from its source; empty where vLLM is not installed, as on a CPU head node."""
    spec = find_spec("vllm")
    if spec is None or spec.origin is None:
        return set()
    tree = ast.parse((Path(spec.origin).parent / "engine" / "arg_utils.py").read_text(encoding="utf-8"))
    body = next(node.body for node in tree.body if isinstance(node, ast.ClassDef) and node.name == "EngineArgs")
    return {node.target.id for node in body if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)}
