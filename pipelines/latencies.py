"""How long rows took, over a whole run: quantiles from histograms, in flat memory however many rows there are."""

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pyarrow.parquet as pq
from pydantic import BaseModel, ConfigDict

from pipelines.parts import part_name
from pipelines.schema import LATENCIES
from pipelines.statistics import latencies_of
from pipelines.storage import Folder

_QUANTILES = {"p50": 0.5, "p95": 0.95, "p99": 0.99}
_READ_THREADS = 16
_PARTS_AT_ONCE = 256
_BIN_WIDTH = 1.01  # each bin ends 1 % above the one before: a quantile is off by half a percent at most
_BIN_ENDS_S = 1e-6 * _BIN_WIDTH ** np.arange(2800)  # from a microsecond to two weeks


class Quantiles(BaseModel):
    """Seconds below which half, 95 % and 99 % of the rows lie; null where there are none."""

    model_config = ConfigDict(frozen=True)
    p50: float | None
    p95: float | None
    p99: float | None


def latencies(run: Folder, batch_ids: Sequence[int]) -> dict[str, Quantiles]:
    """Quantiles over all rows, from histograms: flat memory, where one data set over all parts takes 0.15 MiB for each."""
    histograms = {name: np.zeros(len(_BIN_ENDS_S) + 1, np.int64) for name in LATENCIES}

    def read(batch_id: int) -> dict[str, np.ndarray]:
        columns = ["queue_s", "ttft_s", "generation_s", "num_output_tokens"]
        name = part_name(batch_id)
        table = run.patiently(lambda: pq.read_table(run.path(name), columns=columns, filesystem=run.arrow), name)
        return latencies_of(table)

    with ThreadPoolExecutor(_READ_THREADS) as pool:
        for ids in _in_groups(batch_ids):
            for series in pool.map(read, ids):
                for name, values in series.items():
                    places = np.searchsorted(_BIN_ENDS_S, values)
                    histograms[name] += np.bincount(places, minlength=len(_BIN_ENDS_S) + 1)
    return {
        name: Quantiles(**{q: _quantile(counts, share) for q, share in _QUANTILES.items()})
        for name, counts in histograms.items()
    }


def _quantile(counts: np.ndarray, share: float) -> float | None:
    """The middle of the bin that holds the quantile."""
    if not counts.sum():
        return None
    place = int(np.searchsorted(np.cumsum(counts), share * counts.sum()))
    if place == 0:
        return 0.0
    return float(_BIN_ENDS_S[min(place, len(_BIN_ENDS_S) - 1)] / _BIN_WIDTH**0.5)


def _in_groups(ids: Sequence[int]) -> Iterator[Sequence[int]]:
    """A few parts at a time: a pool's `map` takes all that it is given at once."""
    for start in range(0, len(ids), _PARTS_AT_ONCE):
        yield ids[start : start + _PARTS_AT_ONCE]
