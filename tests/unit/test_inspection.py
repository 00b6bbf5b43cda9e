"""Looking into a run's folder: what is counted, found, drawn and compared, and how it is shown."""

import json
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import datetime
from itertools import groupby, product
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from jobs import cli
from jobs.terminal import inline_diff, one_line
from pipelines.config import BatchConfig, PricingConfig
from pipelines.errors import ConfigError, ErrorKind, ExitCode, RunFailed
from pipelines.inspection import WrittenRun, read_run
from pipelines.inspection.comparison import compare
from pipelines.inspection.rows import count, failed_rows, rows_with_ids, sample
from pipelines.parts import commit
from pipelines.plan import BadFile, Plan
from pipelines.rows import BATCH_FIELDS, Batch
from pipelines.schema import PLAN, RESULT
from pipelines.statistics import Origin, Timing, statistics_of
from pipelines.storage import Folder
from tests.unit.story import answer, echo

PRICING = PricingConfig(price_per_accelerator_hour=1, currency="USD", cpus_per_accelerator=1, source="test", as_of="2026-01-01")
ORIGIN = Origin("f" * 64, "w", "n", "CPU", 1, 1, PRICING)

Row = dict[str, Any]
