"""Quantiles over the rows of many parts: as numpy's over all of them together, to half a percent."""

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as st_numpy

from pipelines.latencies import latencies
from pipelines.parts import part_name
from pipelines.storage import Folder


def write(run: Folder, parts: list[np.ndarray]) -> None:
    for number, times in enumerate(parts):
        table = pa.table({"queue_s": times, "ttft_s": times, "generation_s": times, "num_output_tokens": [3] * len(times)})
        with run.create(part_name(number)) as file:
            pq.write_table(table, file)


@given(times=st.lists(st_numpy.arrays(np.float64, st.integers(1, 30), elements=st.floats(1e-5, 1e5)), min_size=1, max_size=4))
def test_quantiles_are_those_of_all_rows_together(tmp_path_factory: pytest.TempPathFactory, times: list[np.ndarray]) -> None:
    run = Folder(str(tmp_path_factory.mktemp("run")))
    write(run, times)
    found = latencies(run, range(len(times)))
    everything = np.concatenate(times)
    for label, share in {"p50": 0.5, "p95": 0.95, "p99": 0.99}.items():
        exact = np.quantile(everything, share, method="inverted_cdf")
        assert getattr(found["ttft_s"], label) == pytest.approx(exact, rel=0.006)
        assert getattr(found["latency_s"], label) == pytest.approx(2 * exact, rel=0.006)
        assert getattr(found["time_per_output_token_s"], label) == pytest.approx(exact / 2, rel=0.006)


def test_no_time_at_all_is_zero_and_no_rows_are_null(tmp_path_factory: pytest.TempPathFactory) -> None:
    run = Folder(str(tmp_path_factory.mktemp("run")))
    assert latencies(run, [])["ttft_s"].p99 is None
    write(run, [np.zeros(5)])
    assert latencies(run, [0])["ttft_s"].p99 == 0.0
