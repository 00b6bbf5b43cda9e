"""API keys: who may ask, and how much. Only hashes are kept; a key itself is shown once, when it is made.

A keys file has a line for each key: the SHA-256 of the key, its name, and where they differ from `serve.quota`, limits:
`9f86d0... alice requests_per_minute=60 tokens_per_minute=null`. Keys are 256 random bits, so a plain hash is as good as a
slow one. The environment variable FOURNEE_API_KEYS holds keys themselves, `alice:sk-..., bob:sk-...`, for where secrets
arrive that way.
"""

import hashlib
import hmac
import re
import secrets
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from pydantic import ValidationError

from pipelines.config import QuotaConfig, ServeSettings
from pipelines.errors import ConfigError
from pipelines.suggest import did_you_mean

VARIABLE = "FOURNEE_API_KEYS"
NOBODY = "anonymous"
"""The name of whoever asks where no keys are set."""
_BATCH = "batch:"
_NO_LIMITS = QuotaConfig(requests_per_minute=None, tokens_per_minute=None, requests_at_once=None)
_LEAST_LENGTH = 20  # characters of a key that somebody made up
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}", re.ASCII)
_HASH = re.compile(r"[0-9a-f]{64}", re.ASCII)


@dataclass(frozen=True, slots=True)
class Client:
    """Whoever asks."""

    name: str
    quota: QuotaConfig
    is_background: bool = False
    """Whether it is a batch that runs on the server itself."""


class Keys:
    """The keys of one endpoint. Raises ConfigError where they cannot be read, or where there are none and must be some."""

    def __init__(self, settings: ServeSettings, environment: Mapping[str, str]):
        self._clients: dict[str, Client] = {}
        if settings.keys_file is not None:
            self._read(settings.keys_file, _lines_of(settings.keys_file), settings.quota)
            if not self._clients:
                raise ConfigError(
                    f"serve.keys_file={settings.keys_file} holds no key, and nobody could ask; add a line with "
                    "`fournee serve --new-key NAME`, or set it to null to answer without keys"
                )
        elif given := environment.get(VARIABLE, "").strip():
            self._take(given, settings.quota)
        self._nobody = Client(NOBODY, settings.quota)
        self._batch_secret = secrets.token_bytes(32)  # another one at each start, and in nobody else's hands
        if settings.is_public and not self._clients:
            raise ConfigError(
                f"serve.host={settings.host} can be reached from other machines, and there are no API keys; make one with "
                f"`fournee serve --new-key NAME` and name its file in serve.keys_file, set {VARIABLE}, or "
                "listen at serve.host=127.0.0.1"
            )

    @property
    def are_needed(self) -> bool:
        """Whether a request needs a key."""
        return bool(self._clients)

    def client(self, authorization: str | None) -> Client | None:
        """Whose key an Authorization header bears; None where it is nobody's."""
        scheme, _, key = (authorization or "").partition(" ")
        key = key.strip() if scheme.lower() == "bearer" else ""
        if key.startswith(_BATCH):
            return self._behind(key)
        return self._clients.get(hash_of(key)) if self._clients else self._nobody

    def batch_key_for(self, name: str) -> str:
        """What a batch on this server asks with, on behalf of whoever made it."""
        signature = hmac.new(self._batch_secret, name.encode(), "sha256").hexdigest()
        return f"{_BATCH}{name}:{signature}"

    def _behind(self, batch_key: str) -> Client | None:
        name = batch_key.removeprefix(_BATCH).partition(":")[0]
        is_ours = hmac.compare_digest(batch_key.encode("utf-8", "surrogateescape"), self.batch_key_for(name).encode())
        return Client(name, _NO_LIMITS, is_background=True) if is_ours else None

    def _read(self, file: str, lines: Iterable[str], quota: QuotaConfig) -> None:
        for number, line in enumerate(lines, 1):
            digest, name, *limits = [*line.split("#")[0].split(), "", ""] if line.split("#")[0].strip() else ["", ""]
            if not digest:
                continue
            place = f"serve.keys_file={file}, line {number}"
            if not _HASH.fullmatch(digest):  # which may be the key itself, so it is not shown
                raise ConfigError(f"{place} does not begin with a SHA-256 in hexadecimal; `fournee serve --new-key` prints one")
            self._add(place, name, digest, _limited(quota, [limit for limit in limits if limit], place))

    def _take(self, given: str, quota: QuotaConfig) -> None:
        for place, one in enumerate(given.split(","), 1):
            name, _, key = one.strip().partition(":")
            if len(key) < _LEAST_LENGTH:
                raise ConfigError(
                    f"{VARIABLE}: entry {place} must be name:key, with a key of {_LEAST_LENGTH} characters or more"
                )
            self._add(f"{VARIABLE}, entry {place}", name, hash_of(key), quota)

    def _add(self, place: str, name: str, digest: str, quota: QuotaConfig) -> None:
        if not _NAME.fullmatch(name) or name == NOBODY:
            raise ConfigError(f"{place}: a name has letters, digits and _.- only, up to 64, and is not {NOBODY}")
        if digest in self._clients:
            raise ConfigError(f"{place}: {name} has the same key as {self._clients[digest].name}")
        self._clients[digest] = Client(name, quota)


def new_key(name: str) -> tuple[str, str]:
    """Make a key; returns it, and its line for the keys file. Raises ConfigError where the name is none."""
    if not _NAME.fullmatch(name) or name == NOBODY:
        raise ConfigError(f"--new-key={name}: a name has letters, digits and _.- only, up to 64, and is not {NOBODY}")
    key = f"sk-{secrets.token_urlsafe(32)}"
    return key, f"{hash_of(key)} {name}"


def hash_of(key: str) -> str:
    """What is kept of a key."""
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).hexdigest()


def _lines_of(file: str) -> list[str]:
    try:
        return Path(file).expanduser().read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise ConfigError(f"serve.keys_file={file} cannot be read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise ConfigError(f"serve.keys_file={file} is not UTF-8 text") from None


def _limited(quota: QuotaConfig, limits: Iterable[str], place: str) -> QuotaConfig:
    values = dict(quota)
    for limit in limits:
        name, _, value = limit.partition("=")
        if name not in values:
            raise ConfigError(f"{place}: {name} is no limit{did_you_mean(name, values)}")
        if value != "null" and not value.isdecimal():
            raise ConfigError(f"{place}: {limit} must be a whole number above 0, or null")
        values[name] = None if value == "null" else int(value)
    try:
        return QuotaConfig.model_validate(values)
    except ValidationError:
        raise ConfigError(f"{place}: limits must be above 0, or null") from None
