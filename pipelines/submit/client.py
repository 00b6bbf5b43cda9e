"""The connection to Ray's job server: its address, its token, a time limit, and kinds of errors."""

import logging
import os
from http import HTTPStatus
from typing import Any

import requests
from ray._private.authentication.authentication_token_setup import maybe_enable_token_auth_if_token_available
from ray.exceptions import AuthenticationError
from ray.job_submission import JobSubmissionClient

from pipelines.config import SubmitConfig
from pipelines.errors import ConfigError, RunFailed

# Each step of an upload, what Ray leaves out of it, each end of a connection, and that there is a token.
_CHATTY = (
    "dashboard.modules.dashboard_sdk", "_private.runtime_env.working_dir", "dashboard.modules.job.sdk",
    "_private.authentication",
)  # fmt: skip
_DEFAULT_ADDRESS = "http://127.0.0.1:8265"
_TIMEOUT_S = (10.0, 120.0)  # to connect, and to answer: a large upload takes the server a while to store


class UnknownSubmission(ConfigError):
    """The job server knows no such submission."""


class OutOfReach(RuntimeError):
    """The job server did not answer, or not with an answer."""


class JobClient(JobSubmissionClient):  # type: ignore[misc]
    """Ray's client with a time limit and with kinds of errors, through the two methods that all its requests share."""

    def _do_request(self, method: str, endpoint: str, **kwargs: Any) -> requests.Response:
        try:
            response: requests.Response = super()._do_request(method, endpoint, timeout=_TIMEOUT_S, **kwargs)
        except requests.RequestException as error:
            raise OutOfReach(str(_first_cause(error))) from None
        return response

    def _raise_error(self, r: requests.Response) -> None:
        if r.status_code == HTTPStatus.NOT_FOUND:
            raise UnknownSubmission(r.text)
        if r.status_code < HTTPStatus.INTERNAL_SERVER_ERROR:
            raise RunFailed(f"the job server refuses: {r.text.strip()}")
        raise OutOfReach(f"it answered with status {r.status_code}: {r.text.strip()}")


def connect(config: SubmitConfig) -> JobClient:
    """Find the job server and show it the token.

    Raises RunFailed where none answers, which a head that is slow to return does later, and ConfigError where the address is
    none or the token is refused.
    """
    for name in _CHATTY:
        logging.getLogger(f"ray.{name}").setLevel(logging.ERROR)
    # The client sends a token only in this mode, and nothing sets it outside of a cluster.
    maybe_enable_token_auth_if_token_available(warn_if_disabled=False)
    if config.address is not None:
        os.environ["RAY_API_SERVER_ADDRESS"] = config.address  # which the client puts above the address it is given
    try:
        return JobClient(config.address or _DEFAULT_ADDRESS)
    except AuthenticationError as error:
        raise ConfigError(how_to_authenticate(error)) from None
    except (OSError, RuntimeError, ValueError, KeyError) as error:
        kind = RunFailed if isinstance(error, OSError | RuntimeError) else ConfigError
        raise kind(
            f"no Ray job server answers at {_address_in_words(config)}: {error}; set address=http://<head node>:8265"
        ) from None


def _address_in_words(config: SubmitConfig) -> str:
    if config.address is not None:
        return f"address={config.address}"
    named = [f"{name}={os.environ[name]}" for name in ("RAY_API_SERVER_ADDRESS", "RAY_ADDRESS") if os.environ.get(name)]
    return named[0] if named else _DEFAULT_ADDRESS


def how_to_authenticate(error: AuthenticationError) -> str:
    """Say what the server said of the token, and where the right one goes."""
    said = str(error).partition("\n")[0]
    if os.environ.get("RAY_AUTH_MODE", "token").lower() != "token":
        return f"{said}; RAY_AUTH_MODE={os.environ['RAY_AUTH_MODE']} keeps the token back: unset it"
    return (
        f"{said}; `ray get-auth-token` on the head node shows the cluster's token: put it into ~/.ray/auth_token here, "
        "or into the variable RAY_AUTH_TOKEN, or name its file in RAY_AUTH_TOKEN_PATH"
    )


def _first_cause(error: BaseException) -> BaseException:
    return error if error.__context__ is None else _first_cause(error.__context__)
