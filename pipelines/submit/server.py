"""What to ask of a job server: submit a job, follow it, stop it, and go on where the connection drops."""

import asyncio
import getpass
import logging
import time
from collections.abc import Callable, Sequence
from typing import TypeVar

import aiohttp
from ray.exceptions import AuthenticationError
from ray.job_submission import JobDetails, JobStatus
from tenacity import Retrying, retry_if_exception_type, stop_after_delay, wait_exponential_jitter

from pipelines.config import SubmitConfig
from pipelines.config.submit import STOP_WAIT_VARIABLE
from pipelines.errors import ConfigError, ExitCode, RunFailed
from pipelines.machine import installed_versions
from pipelines.submit import JobRequest, runtime_env
from pipelines.submit.client import JobClient, OutOfReach, UnknownSubmission, connect, how_to_authenticate

logger = logging.getLogger(__name__)

_PAUSE_S = 1.0  # between two looks at the job, and at least between two connections
_MAX_RETRY_S = 30.0
_FIRST_LINES_S = 30.0  # to find the node that has the log, and to send what is in it so far
_STOP_MARGIN_S = 60.0  # beyond what the job itself may take to stop
_RAY_STOP_WAIT_S = 3  # Ray's own default

_Answer = TypeVar("_Answer")


class JobServer:
    """The job server of one cluster."""

    def __init__(self, config: SubmitConfig):
        """Connect; raises like `connect`."""
        self._config = config
        self._client = connect(config)
        self.address: str = self._client.get_address()

    def submit(self, request: JobRequest) -> str:
        """Upload the folder and start the job; returns its submission id.

        Raises RunFailed where the same run is alive already, and where the server cannot take the job.
        """
        earlier = self._submissions_of(request.run)
        if alive := [one.submission_id for one in earlier if not one.status.is_terminal()]:
            raise RunFailed(f"this run is alive as {alive[0]}; follow or stop that one, or wait until it has ended")
        attempt = 1 + max((int((one.metadata or {})["fournee_attempt"]) for one in earlier), default=0)
        submission = f"fournee-{request.run}-{attempt}"
        try:
            self._client.submit_job(
                entrypoint=request.entrypoint,
                submission_id=submission,
                runtime_env=runtime_env(self._config, request),
                metadata=_metadata(request, attempt),
                entrypoint_num_cpus=self._config.driver_cpus or None,
            )
        except (OutOfReach, RunFailed) as error:
            if "already exists" in str(error):  # the server's own guard, in a stack trace
                raise RunFailed(f"this run was submitted as {submission} at the same moment; follow that one") from None
            raise RunFailed(f"{self.address} did not take the job, or could not say so: {error}") from None
        return submission

    def details(self, submission: str) -> JobDetails:
        """What the server knows of a submission; raises UnknownSubmission where that is nothing."""
        return self._patiently(lambda: self._client.get_job_info(submission))

    def follow(self, submission: str, show: Callable[[str], None]) -> JobDetails:
        """Show a job's log from its beginning to its end, each character once, and return how it ended.

        Raises RunFailed where the server stays out of reach, or comes back without its jobs.
        """
        details = self.details(submission)
        log = _Log(self._client, submission, show)
        said = None
        while True:
            asyncio.run(log.tail(silence_s=self._config.poll_s))
            try:
                details = self.details(submission)
            except UnknownSubmission:
                raise RunFailed(f"{self.address} has lost {submission}: its cluster was started anew; submit again") from None
            if details.status.is_terminal():
                log.finish()
                return details
            if details.status == JobStatus.PENDING and details.message != said:
                said = details.message
                logger.info("%s is pending: %s", submission, said)
            time.sleep(_PAUSE_S)

    def stop(self, submission: str) -> JobDetails:
        """Stop a job and wait until it has ended; raises RunFailed where it does not."""
        details = self.details(submission)
        if details.status.is_terminal():
            return details
        self._patiently(lambda: self._client.stop_job(submission))
        environment = (details.runtime_env or {}).get("env_vars") or {}
        limit_s = float(environment.get(STOP_WAIT_VARIABLE, _RAY_STOP_WAIT_S)) + _STOP_MARGIN_S
        deadline = time.monotonic() + limit_s
        while not (details := self.details(submission)).status.is_terminal():
            if time.monotonic() > deadline:
                raise RunFailed(f"{submission} was told to stop and is {details.status} after {limit_s:.0f} s; stop it again")
            time.sleep(_PAUSE_S)
        return details

    def _submissions_of(self, run: str) -> Sequence[JobDetails]:
        jobs: list[JobDetails] = self._patiently(self._client.list_jobs)
        return [job for job in jobs if (job.metadata or {}).get("fournee_run") == run]

    def _patiently(self, ask: Callable[[], _Answer]) -> _Answer:
        """Ask until the server answers, or until patience ends; only for what may be asked twice."""
        retrying = Retrying(
            retry=retry_if_exception_type(OutOfReach),
            wait=wait_exponential_jitter(initial=_PAUSE_S, max=_MAX_RETRY_S),
            stop=stop_after_delay(self._config.patience_s),
            before_sleep=lambda state: logger.info("%s is out of reach; trying again", self.address),
            reraise=True,
        )
        try:
            return retrying(ask)
        except OutOfReach as error:
            raise RunFailed(
                f"{self.address} is out of reach for patience_s={self._config.patience_s:g}, while the job may go on: {error}"
            ) from None
        except AuthenticationError as error:
            raise ConfigError(how_to_authenticate(error)) from None


class _Log:
    """A job's log, of which the server can only tell from the beginning, and what of it has been shown."""

    def __init__(self, client: JobClient, submission: str, show: Callable[[str], None]):
        self._client = client
        self._submission = submission
        self._show = show
        self._num_shown = 0  # characters

    async def tail(self, silence_s: float) -> None:
        """Show what comes until the connection ends, or is silent: a dead one may be silent for ever."""
        try:
            async with asyncio.timeout(_FIRST_LINES_S + silence_s) as limit:
                position = 0
                async for text in self._client.tail_job_logs(self._submission):
                    self._show_from(position, text)
                    position += len(text)
                    limit.reschedule(asyncio.get_running_loop().time() + silence_s)
        except (aiohttp.ClientError, OSError, RuntimeError) as error:  # TimeoutError is an OSError
            logger.debug("the log's connection ended: %r", error)

    def finish(self) -> None:
        """Show what is left of the log of a job that has ended."""
        try:
            self._show_from(0, self._client.get_job_logs(self._submission))
        except (OutOfReach, UnknownSubmission) as error:
            logger.warning("the end of the log may be missing: %s", error)

    def _show_from(self, position: int, text: str) -> None:
        if fresh := text[max(0, self._num_shown - position) :]:
            self._show(fresh)
            self._num_shown = position + len(text)


def exit_code(details: JobDetails) -> ExitCode:
    """Our own exit code of a job that has ended: its driver's, where that is one of ours."""
    match details.status:
        case JobStatus.SUCCEEDED:
            return ExitCode.OK
        case JobStatus.STOPPED:
            return ExitCode.STOPPED
        case _:
            ours = set(ExitCode) - {ExitCode.OK}
            return ExitCode(details.driver_exit_code) if details.driver_exit_code in ours else ExitCode.FAILED


def _metadata(request: JobRequest, attempt: int) -> dict[str, str]:
    try:
        user = getpass.getuser()
    except (KeyError, OSError):
        user = "unknown"  # in a container, the user may have a number only
    return {
        "fournee_run": request.run,
        "fournee_attempt": str(attempt),
        "fournee_job": request.job,
        "fournee_version": installed_versions(("fournee",)).get("fournee", "not installed"),
        "user": user,
    }
