"""Run a batch that came over the endpoint, as `fournee batch` does: its settings come as JSON on the standard input."""

import logging
import sys

from pipelines.batch import run_batch, stop_on_signal
from pipelines.config import BatchConfig
from pipelines.errors import ConfigError, ExitCode, Stopped, TooManyFailures
from pipelines.serving.served_job import note_refusal

logger = logging.getLogger(__name__)


def main() -> int:
    """Run it to its end; returns the exit code (`pipelines.errors.ExitCode`)."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s batch %(levelname)s %(message)s", datefmt="%H:%M:%S")
    config = BatchConfig.model_validate_json(sys.stdin.read())
    try:
        with stop_on_signal():
            _, summary = run_batch(config, lambda run: None)
            return summary.exit_code
    except ConfigError as error:
        logger.exception("refused")
        note_refusal(config, str(error))
        return ExitCode.BAD_CONFIG
    except TooManyFailures:
        return ExitCode.ROWS_FAILED
    except Stopped:
        return ExitCode.STOPPED
    except Exception:
        logger.exception("failed")
        return ExitCode.FAILED


if __name__ == "__main__":
    sys.exit(main())
