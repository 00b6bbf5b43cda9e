"""The console command: `fournee <job> ...` runs the script of that job in `jobs/`."""

import sys
from collections.abc import Sequence
from importlib import import_module

from pipelines.errors import ExitCode
from pipelines.machine import installed_versions

JOBS = {
    "batch": "answer every row of a data set once, resumably",
    "doctor": "say what this machine can run, and what is missing",
    "estimate": "say what a job will cost before it runs",
    "history": "many runs, night by night; check whether the newest is worse than those before it",
    "inspect": "look into a run: counts, failed rows, a sample, what differs from another run",
    "report": "what runs came to: their totals here, their charts in report.html, several side by side",
    "serve": "the model of a batch job, live behind OpenAI's API",
    "submit": "run one of these on a Ray cluster; follow it, look at it, stop it",
}
# `python jobs/batch.py` looks for modules in jobs/ first: a jobs/inspect.py would take the place of Python's own there.
_SCRIPTS = {"inspect": "inspection"}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one job; returns its exit code."""
    given = sys.argv[1:] if arguments is None else arguments
    job, *rest = given or ["--help"]
    if job in ("-h", "--help"):
        print(_usage())
        return 0
    if job == "--version":
        print(installed_versions(("fournee",)).get("fournee", "not installed: run from its folder"))
        return 0
    if job not in JOBS:
        print(f"fournee: {job!r} is not a job\n\n{_usage()}", file=sys.stderr)
        return 2
    try:
        script = import_module(f"jobs.{_SCRIPTS.get(job, job)}")
    except KeyboardInterrupt:  # Ctrl-C while modules load, which takes seconds: nothing has begun
        return ExitCode.STOPPED
    code: int = script.main(rest)
    return code


def _usage() -> str:
    jobs = "\n".join(f"  {name:8} {purpose}" for name, purpose in JOBS.items())
    return f"usage: fournee <job> [--help] [group=choice] [key=value ...]\n\njobs:\n{jobs}"


if __name__ == "__main__":
    sys.exit(main())
