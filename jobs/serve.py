"""Serve the model of a batch job behind OpenAI's API: `fournee serve [group=choice] [key=value ...]`, as for a batch."""

import argparse
import logging
import sys
from collections.abc import Sequence

from rich.console import Console
from rich.markup import escape

from jobs.help import settings_help
from pipelines.batch import stop_on_signal
from pipelines.compose import compose_settings
from pipelines.config import ServeConfig
from pipelines.errors import ConfigError, ExitCode, Stopped
from pipelines.parse import parse_serve
from pipelines.serving.keys import new_key

_EXAMPLES = """examples:
  fournee serve                                        the embedded model at http://127.0.0.1:8000, for this machine only
  fournee serve experiment=nightly run_date=2026-11-30 the model, prompt and sampling of that job
  fournee serve --new-key alice                        print a key, and its line for serve.keys_file
  fournee serve serve.host=0.0.0.0 serve.keys_file=keys.txt model=qwen3_8b

exit codes: 0 stopped by Ctrl-C or SIGTERM, 1 it cannot go on, 2 bad configuration"""

_console = Console(stderr=True, highlight=False, emoji=False)


def main(arguments: Sequence[str] | None = None) -> int:
    """Serve until told to stop; returns the exit code (`pipelines.errors.ExitCode`)."""
    options, more = _parser().parse_known_args(arguments)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s", datefmt="%H:%M:%S")
    try:
        if options.new_key is not None:
            key, line = new_key(options.new_key)
            print(f"key, shown this once: {key}\nline for serve.keys_file: {line}")
            return ExitCode.OK
        with stop_on_signal():
            config = parse_serve(compose_settings("serve", [*options.overrides, *more], options.config_dir))
            from pipelines.serve import run_server  # imports Ray, which takes seconds

            run_server(config, lambda url: _show(url, config))
    except ConfigError as error:
        return _end(ExitCode.BAD_CONFIG, str(error))
    except Stopped:
        return ExitCode.OK
    except Exception as error:  # noqa: BLE001 - the last resort: storage, hub and cluster clients raise kinds of their own
        return _end(ExitCode.FAILED, f"the server failed: {type(error).__name__}: {error}")
    return ExitCode.OK


def _show(url: str, config: ServeConfig) -> None:
    _console.print(f"{escape(config.model.name)} answers at {url}; a page to try it is there, OpenAI's API below {url}/v1")
    if config.engine.kind == "echo":
        _console.print("[bold red]ECHO ENGINE: no model, answers repeat their prompts[/]")


def _end(code: ExitCode, message: str) -> ExitCode:
    _console.print(f"[bold red]fournee:[/] {escape(message)}", soft_wrap=True)
    return code


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="fournee serve",
        description=__doc__,
        epilog=f"{settings_help('serve')}\n\n{_EXAMPLES}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("overrides", nargs="*", metavar="override", help="group=choice or key=value, in Hydra's grammar")
    parser.add_argument("--config-dir", help="a folder of your own YAML, laid out like the shipped one")
    parser.add_argument("--new-key", metavar="NAME", help="make an API key, print it and its line for the keys file, and stop")
    return parser


if __name__ == "__main__":
    sys.exit(main())
