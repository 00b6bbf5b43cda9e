"""The command `fournee batch` as it is, but that it notes down when it was where: `python -m ... <file> [overrides]`."""

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

_STARTED_S = time.time()


def noting(name: str, function: Callable[..., Any], moments: dict[str, float]) -> Callable[..., Any]:
    """The same function; when it has returned for the first time is noted down."""

    def call(*arguments: Any, **named: Any) -> Any:
        result = function(*arguments, **named)
        moments.setdefault(name, time.time())
        return result

    return call


def main(place: Path, overrides: list[str]) -> int:
    import ray  # here, because how long the imports take is to be known, too

    import pipelines.batch as story
    from jobs.batch import main as job

    moments = {"started": _STARTED_S, "imported": time.time()}
    ray.init = noting("ray_up", ray.init, moments)
    story.find_todo = noting("todo_found", story.find_todo, moments)
    story.make_shards = noting("shards_cut", story.make_shards, moments)
    story.answer_pending = noting("answered", story.answer_pending, moments)
    code = job(overrides)
    moments["ended"] = time.time()
    place.write_text(json.dumps(moments))
    return code


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), sys.argv[2:]))
