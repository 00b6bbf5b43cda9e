"""The three kinds of failure and the exit codes that tell them apart (docs/architecture.md, "Errors")."""

from enum import IntEnum, StrEnum


class ExitCode(IntEnum):
    """What a job's process returns; that of a finished run stands in `stats/summary.json`."""

    OK = 0
    FAILED = 1
    BAD_CONFIG = 2
    ROWS_FAILED = 3
    STOPPED = 4


class ErrorKind(StrEnum):
    """Why a row failed: the closed list behind the column `error_kind`."""

    MALFORMED_ROW = "malformed_row"
    INVALID_TEXT = "invalid_text"
    MISSING_VALUE = "missing_value"
    INVALID_MESSAGES = "invalid_messages"
    TEMPLATE_ERROR = "template_error"
    EMPTY_PROMPT = "empty_prompt"
    PROMPT_TOO_LONG = "prompt_too_long"
    INVALID_PARAMETER = "invalid_parameter"
    ENGINE_REFUSED = "engine_refused"
    ENGINE_ERROR = "engine_error"


class ConfigError(ValueError):
    """The user's mistake: names the key, the value and the way out. Exit code 2."""


class RowError(Exception):
    """A bad row: written to the results as failed, its neighbours never notice."""

    def __init__(self, kind: ErrorKind, message: str):
        super().__init__(kind, message)
        self.kind = kind
        self.message = message


class EngineDead(RuntimeError):
    """The engine can answer nothing any more; every request that it held is unanswered."""


class RunFailed(RuntimeError):
    """The job cannot go on, or its results do not add up. Exit code 1."""


class Stopped(BaseException):
    """Ctrl-C or SIGTERM: what is committed stays. Like KeyboardInterrupt, no `except Exception` may swallow it. Exit code 4."""
