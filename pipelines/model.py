"""Where the model's files are, and which ones exactly: converts a packaged GGUF file once, digests a folder."""

import hashlib
import json
import logging
import os
import shutil
import time
import uuid
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from pipelines.config import BatchConfig, ModelConfig
from pipelines.errors import ConfigError
from pipelines.file_systems import PACKAGE_SCHEME, package_file

_WHOLE_BYTES = 64 * 2**20  # files up to this size are digested whole, larger ones by samples
_NUM_SAMPLES = 64
_SAMPLE_BYTES = 2**20
_TEMPLATE_FILES = ("chat_template.jinja", "chat_template.json", "tekken.json")  # or in tokenizer_config.json
_ABANDONED_S = 3600.0  # a conversion takes seconds; one that is older was killed

logger = logging.getLogger(__name__)


def cache_folder() -> Path:
    """Where converted models are kept: $FOURNEE_CACHE, else the user's cache folder."""
    if "FOURNEE_CACHE" in os.environ:
        return Path(os.environ["FOURNEE_CACHE"])
    return Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "fournee"


def model_folder(config: ModelConfig) -> str:
    """Return what vLLM is given: a folder on this machine, or the hub id as it is.

    A `package://` model is converted into the cache folder first (about 15 s, once per machine).
    """
    if not config.path.startswith(PACKAGE_SCHEME):
        return str(Path(config.path).expanduser()) if _is_folder(config.path) else config.path
    source = Path(package_file(config.path))
    target = cache_folder() / f"{config.name}-{_digest_file(source).hexdigest()[:16]}"
    if not target.is_dir():
        _convert(source, target)
    return str(target)


def model_digest(config: ModelConfig) -> str:
    """Return what tells this model's weights from any other's: a digest of its files, or the hub's commit.

    Raises ConfigError where the model cannot be found.
    """
    if config.path.startswith(PACKAGE_SCHEME):
        return f"sha256:{_digest_file(Path(package_file(config.path))).hexdigest()}"
    if _is_folder(config.path):
        return f"sha256:{_digest_folder(Path(config.path).expanduser())}"
    return f"commit:{_hub_commit(config)}"


def load_tokenizer(config: BatchConfig) -> tuple[Any, int | None]:
    """Return the model's tokenizer (of transformers), and the most tokens of prompt and answer together, where they are known.

    Raises ConfigError where there is none.
    """
    if find_spec("transformers") is None:
        raise ConfigError("reading a model's tokenizer needs the package transformers: pip install transformers")
    from transformers import AutoConfig, AutoTokenizer

    model = config.model
    folder, options = model_folder(model), {"trust_remote_code": model.trust_remote_code, "revision": model.revision}
    named = config.engine_kwargs.get("tokenizer")
    try:
        tokenizer = AutoTokenizer.from_pretrained(named or folder, **options)
        own = getattr(AutoConfig.from_pretrained(folder, **options).get_text_config(), "max_position_embeddings", None)
    except (OSError, ValueError) as error:
        raise ConfigError(f"the tokenizer of model.path={model.path} cannot be read: {error}") from None
    return tokenizer, own if model.max_model_len is None else model.max_model_len


def check_chat_template(config: BatchConfig) -> None:
    """Raises ConfigError where conversations are asked for and a model folder has no chat template, as base models have none.

    Nothing is loaded for it; a model on the hub is looked at when a worker has it.
    """
    if config.prompt.kind != "chat" or config.prompt.chat_template is not None:
        return
    if config.model.path.startswith(PACKAGE_SCHEME) or not _is_folder(config.model.path):
        return
    folder = Path(config.model.path).expanduser()
    settings = folder / "tokenizer_config.json"
    is_there = any((folder / name).is_file() for name in _TEMPLATE_FILES)
    if not is_there and settings.is_file() and not json.loads(settings.read_text(encoding="utf-8")).get("chat_template"):
        raise ConfigError(
            f"model.path={folder} has no chat template, as base models have none; "
            "set prompt=raw to hand it the text as it is, or name a prompt.chat_template_file"
        )


def pinned_revision(digest: str) -> str | None:
    """The hub commit that a digest names: what every worker loads, even if the hub moves on meanwhile."""
    return digest.removeprefix("commit:") if digest.startswith("commit:") else None


def is_on_this_machine(config: ModelConfig) -> bool:
    """Whether the model needs no hub."""
    return config.path.startswith(PACKAGE_SCHEME) or _is_folder(config.path)


def _is_folder(path: str) -> bool:
    folder = Path(path).expanduser()
    if folder.is_dir():
        return True
    if path.startswith(("/", "./", "../", "~")):
        raise ConfigError(f"model.path={path} is not a folder on this machine")
    return False


def _digest_folder(folder: Path) -> str:
    digest = hashlib.sha256()
    files = sorted(path for path in folder.rglob("*") if path.is_file() and not path.name.startswith("."))
    if not any(path.name == "config.json" for path in files):
        raise ConfigError(f"model.path={folder} has no config.json; it is not a model folder")
    for path in files:
        digest.update(f"{path.relative_to(folder)}\0{_digest_file(path).hexdigest()}\n".encode())
    return digest.hexdigest()


def _digest_file(path: Path) -> "hashlib._Hash":
    """Digest a small file whole, a large one by its size and 64 MiB spread over it: weights are hundreds of GB."""
    size = path.stat().st_size
    digest = hashlib.sha256(str(size).encode())
    with path.open("rb") as file:
        if size <= _WHOLE_BYTES:
            digest.update(file.read())
        else:
            for sample in range(_NUM_SAMPLES):
                file.seek((size - _SAMPLE_BYTES) * sample // (_NUM_SAMPLES - 1))
                digest.update(file.read(_SAMPLE_BYTES))
    return digest


def _hub_commit(config: ModelConfig) -> str:
    if find_spec("huggingface_hub") is None:
        raise ConfigError(f"model.path={config.path} is no folder; a hub id needs huggingface_hub: pip install 'fournee[gpu]'")
    from huggingface_hub import HfApi, try_to_load_from_cache
    from huggingface_hub.constants import HF_HUB_OFFLINE

    if HF_HUB_OFFLINE:
        cached = try_to_load_from_cache(config.path, "config.json", revision=config.revision)
        if not isinstance(cached, str):
            raise ConfigError(f"model.path={config.path} is not in the hub cache and HF_HUB_OFFLINE is set; download it first")
        return Path(cached).parent.name
    try:
        return str(HfApi().model_info(config.path, revision=config.revision).sha)
    except Exception as error:  # noqa: BLE001 - the hub client lets through whatever its network stack raises
        raise ConfigError(
            f"model.path={config.path} (revision {config.revision}) cannot be found on the hub: {error}; "
            "check the spelling, set HF_TOKEN for gated models, or use a local folder"
        ) from None


def _convert(source: Path, target: Path) -> None:
    """Turn a GGUF file into a model folder that appears whole or not at all."""
    missing = [name for name in ("gguf", "accelerate", "transformers") if find_spec(name) is None]
    if missing:
        raise ConfigError(f"converting {source.name} needs the packages {', '.join(missing)}: pip install {' '.join(missing)}")
    logger.warning("converting %s into a model folder, once: about 15 s", source.name)
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    target.parent.mkdir(parents=True, exist_ok=True)
    for leftover in target.parent.glob(f".{target.name}.*"):
        if time.time() - leftover.stat().st_mtime > _ABANDONED_S:
            shutil.rmtree(leftover, ignore_errors=True)
    temporary = target.with_name(f".{target.name}.{uuid.uuid4().hex}")
    try:
        AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name).save_pretrained(temporary)
        AutoModelForCausalLM.from_pretrained(
            source.parent, gguf_file=source.name, dtype="bfloat16", quantization_config=GgufConfig(dequantize=True)
        ).save_pretrained(temporary)
        (temporary / "source.json").write_text(json.dumps({"file": source.name, "sha256": _digest_file(source).hexdigest()}))
        if not target.is_dir():
            temporary.rename(target)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
