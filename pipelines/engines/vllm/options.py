"""Which engine options there are, without importing vLLM (which takes tens of seconds)."""

import ast
from importlib.util import find_spec
from pathlib import Path

from pipelines.config import BatchConfig
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


def check_options(config: BatchConfig) -> None:
    """Refuse options that vLLM does not have, without importing it (which takes tens of seconds).

    Raises ConfigError that names the option. Values are checked by vLLM itself, when the worker builds its engine.
    """
    names = {name: config.key_of(name) for name in config.engine_kwargs}
    for name, key in names.items():
        if name in _OURS:
            raise ConfigError(f"{key} is set by {_OURS[name]}")
    known = engine_options()
    for name, key in names.items():
        if known and name not in known:
            raise ConfigError(f"{key} is not an option of vLLM's EngineArgs{did_you_mean(name, known)}")


def engine_options() -> set[str]:
    """The fields of vLLM's `EngineArgs`, read from its source; empty where vLLM is not installed, as on a CPU head node."""
    spec = find_spec("vllm")
    if spec is None or spec.origin is None:
        return set()
    tree = ast.parse((Path(spec.origin).parent / "engine" / "arg_utils.py").read_text(encoding="utf-8"))
    body = next(node.body for node in tree.body if isinstance(node, ast.ClassDef) and node.name == "EngineArgs")
    return {node.target.id for node in body if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)}
