"""How a job gets onto a Ray cluster."""

import re
from typing import Annotated

from pydantic import Field, NonNegativeFloat, PositiveInt, model_validator

from pipelines.config.strict import Strict, Text

_VARIABLE = re.compile(r"[A-Z_][A-Z0-9_]*", re.ASCII | re.IGNORECASE)
STOP_WAIT_VARIABLE = "RAY_JOB_STOP_WAIT_TIME_S"
"""What Ray reads to know how long a job that is told to stop may take."""


class SubmitConfig(Strict):
    """Everything that `fournee submit` can be told about the cluster, as opposed to the job."""

    address: Text | None
    """The job server's URL; null takes RAY_API_SERVER_ADDRESS, RAY_ADDRESS or http://127.0.0.1:8265."""
    working_dir: Text
    """The folder that is uploaded, and in which the job runs."""
    excludes: tuple[Text, ...]
    """What of it is not uploaded, in the syntax of .gitignore; .gitignore and .rayignore files in it count besides."""
    env_vars: dict[Text, str]
    """Environment variables of the job and its workers. Not for secrets."""
    pass_env: tuple[Text, ...]
    """Names of environment variables whose values here the job gets."""
    pip: tuple[Text, ...]
    """Packages that Ray installs for the job."""
    stop_wait_s: PositiveInt
    """How long a job that is told to stop may take before Ray kills it."""
    driver_cpus: NonNegativeFloat
    """CPUs to set aside for the job's driver; 0 runs it on the head node, more wherever they are free."""
    poll_s: Annotated[float, Field(ge=5)]  # Ray itself looks for new lines every two seconds
    """How long the log may be silent before the job's status is looked at, over a new connection."""
    patience_s: NonNegativeFloat
    """How long the job server may be out of reach before following a job is given up."""

    @model_validator(mode="after")
    def _check(self) -> "SubmitConfig":
        if self.address is not None and not self.address.startswith(("http://", "https://")):
            raise ValueError(f"address={self.address} must be the job server's URL, such as http://{self.address}")
        if wrong := [name for name in (*self.env_vars, *self.pass_env) if not _VARIABLE.fullmatch(name)]:
            raise ValueError(f"{', '.join(wrong)} in env_vars or pass_env is not the name of an environment variable")
        if STOP_WAIT_VARIABLE in self.env_vars:
            raise ValueError(f"env_vars.{STOP_WAIT_VARIABLE} is what stop_wait_s sets; set that instead")
        if twice := sorted(self.env_vars.keys() & set(self.pass_env)):
            raise ValueError(f"{', '.join(twice)} stands in env_vars and in pass_env; drop one of them")
        return self
