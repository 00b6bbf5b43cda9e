"""Which failures of storage pass, and how long one goes on asking."""

import errno
import logging
import ssl
from collections.abc import Callable, Iterator
from typing import Any

import pyarrow as pa
import pytest
from fsspec.implementations.memory import MemoryFileSystem

from pipelines.errors import Stopped
from pipelines.parts import Parts, commit
from pipelines.patience import is_passing, patiently
from pipelines.storage import Folder


def kind(name: str, *, base: type[Exception] = Exception, **attributes: Any) -> Exception:
    """An error of a package that need not be installed, made by its full name."""
    module, _, qualified = name.rpartition(".")
    error = type(qualified, (base,), {"__module__": module})("refused")
    for key, value in attributes.items():
        setattr(error, key, value)
    return error


def caused(error: Exception, cause: Exception) -> Exception:
    error.__cause__ = cause
    return error


def botocore(code: str, status: int) -> Exception:
    response = {"Error": {"Code": code}, "ResponseMetadata": {"HTTPStatusCode": status}}
    return kind("botocore.exceptions.ClientError", response=response)


PASSING = [
    ConnectionRefusedError(errno.ECONNREFUSED, "refused"),
    ConnectionResetError(),
    BrokenPipeError(),
    TimeoutError(),
    OSError(errno.EIO, "input/output error"),
    OSError(errno.ESTALE, "stale file handle"),
    OSError(errno.EHOSTUNREACH, "no route to host"),
    OSError(errno.ETIMEDOUT, "timed out"),
    OSError(errno.EAGAIN, "try again"),
    OSError(errno.EBUSY, "SlowDown"),
    # S3, as s3fs translates it, and as botocore raises it where no answer came
    caused(OSError(errno.EBUSY, "Please reduce your request rate."), botocore("SlowDown", 503)),
    caused(OSError(errno.EIO, "a code that s3fs does not know"), botocore("TooManyRequests", 429)),
    caused(OSError(errno.EIO, "a code that s3fs does not know"), botocore("502", 502)),
    caused(TimeoutError("Your socket connection was not read from"), botocore("RequestTimeout", 400)),
    kind("botocore.exceptions.EndpointConnectionError"),
    caused(kind("aiobotocore.Wrapped"), kind("botocore.exceptions.ConnectTimeoutError")),
    # Google
    kind("gcsfs.retry.HttpError", code=503),
    kind("gcsfs.retry.HttpError", code=429),
    kind("requests.exceptions.ConnectionError", base=OSError),
    kind("aiohttp.client_exceptions.ClientPayloadError"),
    # Azure
    kind("azure.core.exceptions.HttpResponseError", status_code=500),
    kind("azure.core.exceptions.ServiceRequestError"),
    caused(RuntimeError("Failed to upload block"), kind("azure.core.exceptions.HttpResponseError", status_code=503)),
]
LASTING = [
    FileNotFoundError(errno.ENOENT, "no such file"),
    PermissionError(errno.EACCES, "permission denied"),
    FileExistsError(),
    NotADirectoryError(),
    IsADirectoryError(),
    OSError(errno.ENOSPC, "no space left on device"),
    OSError(errno.EDQUOT, "disk quota exceeded"),
    OSError(errno.EROFS, "read-only file system"),
    OSError("Forbidden: b/a"),  # gcsfs' word for 403; Arrow's for damage
    ssl.SSLCertVerificationError(1, "self-signed certificate"),
    ValueError("bad request"),
    EOFError(),
    caused(FileNotFoundError("The specified bucket does not exist"), botocore("NoSuchBucket", 404)),
    caused(PermissionError("ExpiredToken"), botocore("ExpiredToken", 400)),
    caused(OSError(errno.EIO, "a code that s3fs does not know"), botocore("InvalidTokenId", 400)),
    caused(OSError(errno.EIO, "a code that s3fs does not know"), botocore("XMinioStorageFull", 507)),
    kind("botocore.exceptions.NoCredentialsError"),
    kind("botocore.exceptions.SSLError"),
    kind("gcsfs.retry.HttpError", code=401),
    kind("azure.core.exceptions.HttpResponseError", status_code=403),
    caused(ValueError("unable to connect to account"), kind("azure.core.exceptions.ClientAuthenticationError")),
]


@pytest.mark.parametrize("error", PASSING, ids=repr)
def test_no_answer_too_many_requests_and_a_servers_own_fault_pass(error: Exception) -> None:
    assert is_passing(error)


@pytest.mark.parametrize("error", LASTING, ids=repr)
def test_a_refusal_a_full_disk_and_what_is_not_there_do_not_pass(error: Exception) -> None:
    assert not is_passing(error)


@pytest.mark.parametrize(
    ("code", "status", "passes"), [("SlowDown", 503, True), ("InternalError", 500, True), ("404", 404, False)]
)
def test_what_s3fs_really_makes_of_an_answer_is_told_apart(code: str, status: int, passes: bool) -> None:
    exceptions, errors = pytest.importorskip("botocore.exceptions"), pytest.importorskip("s3fs.errors")
    response = {"Error": {"Code": code, "Message": "no"}, "ResponseMetadata": {"HTTPStatusCode": status}}
    assert is_passing(errors.translate_boto_error(exceptions.ClientError(response, "PutObject"))) == passes


@pytest.mark.parametrize(
    "name", ["ReadTimeoutError", "ConnectionClosedError", "EndpointConnectionError", "ConnectTimeoutError"]
)
def test_what_botocore_raises_where_no_answer_came_passes(name: str) -> None:
    exceptions = pytest.importorskip("botocore.exceptions")
    assert is_passing(getattr(exceptions, name)(endpoint_url="http://127.0.0.1", error="reset"))


def failing(*errors: BaseException) -> Callable[[], str]:
    """Raise these errors one after the other, and answer from then on."""
    coming: Iterator[BaseException] = iter(errors)

    def action() -> str:
        for error in coming:
            raise error
        return "answer"

    return action


def test_what_passes_is_tried_again_and_said_once_at_its_start_and_once_at_its_end(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        answer = patiently(failing(ConnectionResetError("reset"), TimeoutError("slow")), "s3://b/a", 60)
    assert answer == "answer"
    begin, end = caplog.messages
    assert begin == "s3://b/a: ConnectionResetError: reset; trying again for up to 60 s (output.patience_s)"
    assert end.startswith("s3://b/a: the storage answers again, after ")


def test_what_works_at_once_says_nothing(caplog: pytest.LogCaptureFixture) -> None:
    assert patiently(failing(), "a", 60) == "answer"
    assert caplog.messages == []


def test_what_does_not_pass_is_raised_at_once_as_it_is() -> None:
    full = OSError(errno.ENOSPC, "no space left on device")
    with pytest.raises(OSError, match="no space left") as raised:
        patiently(failing(full), "a", 60)
    assert raised.value is full


def test_what_stops_passing_is_raised_at_once() -> None:
    with pytest.raises(PermissionError):
        patiently(failing(TimeoutError(), PermissionError()), "a", 60)


def test_patience_ends_with_an_os_error_that_names_file_reason_and_setting() -> None:
    with pytest.raises(
        TimeoutError, match=r"s3://b/a: .*EndpointConnectionError: refused; given up after 0.3 s .*patience_s"
    ) as end:
        patiently(failing(*[kind("botocore.exceptions.EndpointConnectionError")] * 99), "s3://b/a", 0.3)
    assert isinstance(end.value, OSError)


def test_no_patience_means_one_try() -> None:
    with pytest.raises(TimeoutError):
        patiently(failing(ConnectionResetError()), "a", 0)


@pytest.mark.parametrize("stop", [KeyboardInterrupt(), Stopped("SIGTERM")])
def test_a_stop_is_not_waited_out(stop: BaseException) -> None:
    with pytest.raises(type(stop)):
        patiently(failing(TimeoutError(), stop), "a", 60)


@pytest.mark.parametrize(("patience_s", "comes"), [(30.0, True), (0.0, False)])
def test_a_part_that_storage_does_not_show_for_a_while_is_waited_for_and_never_called_damaged(
    monkeypatch: pytest.MonkeyPatch, patience_s: float, comes: bool
) -> None:
    run = Folder("memory://patient/run", patience_s)
    commit(run, pa.table({"text": ["a"]}), {"batch_id": 3}, "zstd")
    opened, refuse = MemoryFileSystem.open, failing(ConnectionResetError("reset"))
    monkeypatch.setattr(MemoryFileSystem, "open", lambda *given, **options: refuse() and opened(*given, **options))
    if comes:
        assert [some[0]["num_rows_written"] for some in Parts(run).statistics([3])] == [1]
    else:
        with pytest.raises(TimeoutError, match=r"part-00000003.parquet: ConnectionResetError: reset"):
            list(Parts(run).statistics([3]))
