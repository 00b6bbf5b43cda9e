"""Tell storage that refuses for a while from storage that refuses for good, and go on asking the former."""

import errno
import logging
import ssl
import time
from collections.abc import Callable, Mapping
from typing import TypeVar

from tenacity import RetryCallState, RetryError, Retrying, retry_if_exception, stop_before_delay, wait_random_exponential

logger = logging.getLogger(__name__)

T = TypeVar("T")

_FIRST_PAUSE_S = 0.5  # at most; each next one may be twice as long
_LONGEST_PAUSE_S = 10.0

_LASTING = (FileNotFoundError, FileExistsError, NotADirectoryError, IsADirectoryError, PermissionError)
# Not ENOSPC or EDQUOT: no disk empties itself while GPUs wait. Not EROFS: what a fault made read-only stays so.
_PASSING_ERRNOS = {
    errno.EAGAIN,
    errno.EBUSY,  # also s3fs' word for SlowDown
    errno.EIO,  # what a network mount says while its server is away
    getattr(errno, "EREMOTEIO", errno.EIO),  # s3fs' word for a server's own fault; Linux only
    errno.ESTALE,  # a network mount whose server came back, or a temporary file that another driver swept away
    errno.ENOTCONN,
    errno.ENETDOWN,
    errno.ENETUNREACH,
    errno.ENETRESET,
    errno.EHOSTDOWN,
    errno.EHOSTUNREACH,
}
_PASSING_STATUS = {408, 409, 425, 429}  # a request too slow, in another's way, or one too many
_LASTING_SERVER_STATUS = {501, 505, 507}  # what the server does not know how to do, and its full disk
# What the clients raise where no answer came, or half of one. By name: none of them need be installed. Not botocore's
# SSLError: a wrong certificate stays wrong.
_PASSING_KINDS = {
    "aiohttp.client_exceptions.ClientConnectionError",
    "aiohttp.client_exceptions.ClientPayloadError",
    "azure.core.exceptions.ServiceRequestError",
    "azure.core.exceptions.ServiceResponseError",
    "botocore.exceptions.ConnectTimeoutError",
    "botocore.exceptions.EndpointConnectionError",
    "botocore.exceptions.HTTPClientError",
    "botocore.exceptions.IncompleteReadError",
    "botocore.exceptions.ProxyConnectionError",
    "botocore.parsers.ResponseParserError",
    "gcsfs.retry.ChecksumError",
    "google.auth.exceptions.TransportError",
    "http.client.HTTPException",
    "requests.exceptions.ChunkedEncodingError",
    "requests.exceptions.ConnectionError",
    "requests.exceptions.Timeout",
    "urllib3.exceptions.HTTPError",
}


def is_passing(error: BaseException) -> bool:
    """Whether a failure of storage may be gone when it is asked again: no answer, too many requests, a server's own fault."""
    if isinstance(error, (*_LASTING, ssl.SSLCertVerificationError)):
        return False
    if isinstance(error, ConnectionError | TimeoutError):
        return True
    status = _http_status(error)
    if status is not None:
        return status in _PASSING_STATUS or (status >= 500 and status not in _LASTING_SERVER_STATUS)
    if any(f"{kind.__module__}.{kind.__qualname__}" in _PASSING_KINDS for kind in type(error).__mro__):
        return True
    if error.__cause__ is not None:  # s3fs and adlfs wrap what a client raised; s3fs says EIO for codes it does not know
        return is_passing(error.__cause__)
    return isinstance(error, OSError) and error.errno in _PASSING_ERRNOS


def patiently(action: Callable[[], T], what: str, patience_s: float) -> T:
    """Do something that may be done twice, again and again for so long while the storage refuses for a while.

    Raises TimeoutError where the patience ends, and what `action` raises where waiting would not help.
    """

    def warn(state: RetryCallState) -> None:
        if state.attempt_number == 1 and state.outcome is not None:
            reason = _said(state.outcome.exception())
            logger.warning("%s: %s; trying again for up to %g s (output.patience_s)", what, reason, patience_s)

    retrying = Retrying(
        retry=retry_if_exception(is_passing),
        stop=stop_before_delay(patience_s),
        wait=wait_random_exponential(multiplier=_FIRST_PAUSE_S, max=_LONGEST_PAUSE_S),
        before_sleep=warn,
    )
    started = time.perf_counter()
    try:
        result = retrying(action)
    except RetryError as end:
        error = end.last_attempt.exception()
        raise TimeoutError(f"{what}: {_said(error)}; given up after {patience_s:g} s (output.patience_s)") from error
    if retrying.statistics["attempt_number"] > 1:
        logger.warning("%s: the storage answers again, after %.0f s", what, time.perf_counter() - started)
    return result


def _said(error: BaseException | None) -> str:
    return f"{type(error).__name__}: {error}"


def _http_status(error: BaseException) -> int | None:
    """The HTTP status that a client's error carries, wherever it keeps it."""
    response = getattr(error, "response", None)
    if isinstance(response, Mapping):  # botocore
        found = response.get("ResponseMetadata", {}).get("HTTPStatusCode")
        return found if isinstance(found, int) else None
    numbers = (getattr(error, name, None) for name in ("status_code", "status", "code"))  # azure, aiohttp, gcsfs
    return next((number for number in numbers if isinstance(number, int)), None)
