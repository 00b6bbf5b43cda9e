"""The same model, live: the settings of the batch job, behind OpenAI's API on Ray Serve. This page is the whole story."""

import os
import time
from collections.abc import Callable
from typing import Any

from pipelines.batch import check_settings
from pipelines.cluster import connect
from pipelines.compose import compose_settings
from pipelines.config import ServeConfig
from pipelines.parse import parse_serve
from pipelines.serving.endpoint import endpoint_of
from pipelines.serving.replicas import application, deploy, take_down

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


def app(args: dict[str, Any]) -> Any:
    """The same for a cluster that starts it by a Serve config file, such as KubeRay's RayService (`import_path`).

    `args` are `overrides` and `config_dir`, as of the command. The file says where Serve listens, where others reach it:
    without API keys this raises ConfigError.
    """
    overrides = ["serve.host=0.0.0.0", *args.get("overrides", ())]
    config = parse_serve(compose_settings("serve", overrides, args.get("config_dir")))
    check_settings(config)
    return application(endpoint_of(config, os.environ))
