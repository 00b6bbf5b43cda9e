"""An engine that has room and gets nothing is noticed, with what it waits for, and said once."""

import logging

import pytest

from pipelines.metrics import Load
from pipelines.starvation import Cause, Starvation

NEVER_S = 3600.0


class Engine:
    """An engine under observation, and what it waits for."""

    def __init__(self, *, running: int, waiting: int, cause: Cause | None):
        self.running = running
        self.waiting = waiting
        self.cause: Cause | None = cause
        self.starvation = Starvation(lambda: Load(self.running, self.waiting, 100, 1), lambda: self.cause, NEVER_S)

    def look(self, *times: float) -> None:
        for now in times:
            self.starvation.look(now, 1.0)


@pytest.mark.parametrize(
    ("running", "waiting", "cause", "starved_s"),
    [
        (10, 0, "rendering", {"rendering": 40.0}),
        (10, 0, None, {}),  # the end of the job
        (10, 5, "rendering", {}),  # there are requests, and the engine does not take them: its memory is full
        (50, 0, "input", {}),
    ],
)
def test_only_an_engine_that_has_room_and_gets_nothing_starves(
    running: int, waiting: int, cause: Cause | None, starved_s: dict[str, float], caplog: pytest.LogCaptureFixture
) -> None:
    engine = Engine(running=running, waiting=waiting, cause=cause)
    with caplog.at_level(logging.WARNING):
        engine.look(*range(40))
    assert engine.starvation.seconds() == starved_s
    assert len(caplog.records) == len(starved_s)


def test_each_cause_is_said_once_with_its_remedy_and_only_after_a_while(caplog: pytest.LogCaptureFixture) -> None:
    engine = Engine(running=10, waiting=0, cause="long answers")
    engine.look(*range(29))
    engine.cause = None
    engine.look(29)
    assert not caplog.records  # a short pause is none
    engine.cause = "long answers"
    engine.look(*range(30, 200))
    assert [record.message for record in caplog.records] == [
        "the engine runs 10 requests and has room for 100: batches wait for their longest answers: lower engine.rows_per_batch"
    ]
    engine.cause = "input"
    engine.look(*range(200, 300))
    assert "nearer" in caplog.records[-1].message
    assert engine.starvation.seconds() == {"long answers": 199.0, "input": 100.0}
