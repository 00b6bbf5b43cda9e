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

    # Reading and decoding.
    UNREADABLE_FILE = "unreadable_file"
    MALFORMED_ROW = "malformed_row"
    INVALID_TEXT = "invalid_text"
    # Rendering and tokenising.
    MISSING_VALUE = "missing_value"
    INVALID_MESSAGES = "invalid_messages"
    INVALID_REQUEST = "invalid_request"
    TEMPLATE_ERROR = "template_error"
    EMPTY_PROMPT = "empty_prompt"
    SPECIAL_TOKENS = "special_tokens"
    PROMPT_TOO_LONG = "prompt_too_long"
    # Parameters and schemas.
    INVALID_PARAMETER = "invalid_parameter"
    INVALID_SCHEMA = "invalid_schema"
    # Generating.
    ENGINE_REFUSED = "engine_refused"
    ENGINE_ERROR = "engine_error"
    ENGINE_KILLED = "engine_killed"
    # Post-processing: the row keeps its answer.
    TRUNCATED = "truncated"
    INVALID_JSON = "invalid_json"
    INVALID_OUTPUT = "invalid_output"
    POSTPROCESS_ERROR = "postprocess_error"


class Flag(StrEnum):
    """What is worth knowing about a row that did not fail for it: the closed list behind the column `flags`."""

    SPECIAL_TOKENS = "special_tokens"
    PROMPT_TRUNCATED = "prompt_truncated"
    FILTERED = "filtered"


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


class TooManyFailures(RuntimeError):
    """So many rows have failed that the job cannot end well any more. Exit code 3."""


class Stopped(BaseException):
    """Ctrl-C or SIGTERM: what is committed stays. Like KeyboardInterrupt, no `except Exception` may swallow it. Exit code 4."""
