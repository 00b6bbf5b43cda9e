"""The same model, live: the settings of the batch job, behind OpenAI's API on Ray Serve. This page is the whole story."""

import os
import time
from collections.abc import Callable

from pipelines.batch import check_settings
from pipelines.cluster import connect
from pipelines.config import ServeConfig
from pipelines.serving.endpoint import endpoint_of
from pipelines.serving.replicas import deploy, take_down

_LOOK_S = 0.5


def run_server(config: ServeConfig, started: Callable[[str], None]) -> None:
    """Serve until Stopped is raised by Ctrl-C or SIGTERM; then let running requests come to their end.

    `started` is told the URL. Raises ConfigError before Ray or a model starts.
    """
    check_settings(config)
    endpoint = endpoint_of(config, os.environ)
    with connect(config) as placement:
        try:
            deploy(endpoint, placement)
            started(config.serve.url)
            while True:
                time.sleep(_LOOK_S)
        finally:
            take_down()
