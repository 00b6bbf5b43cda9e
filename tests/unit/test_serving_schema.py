"""Whatever the served OpenAPI description allows, and some that it does not, no request makes the server fail."""

from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis.errors import Unsatisfiable

from pipelines.serving.batch_routes import add_batch_routes
from pipelines.serving.batches import Batches
from pipelines.serving.files import Files
from pipelines.storage import Folder
from tests.unit.serving import KEY, Endpoint

schemathesis = pytest.importorskip("schemathesis")


def test_no_request_makes_the_server_fail(tmp_path: Path) -> None:
    endpoint, folder = Endpoint(), Folder(str(tmp_path))
    files = Files(folder, 10_000)

    async def run_job(*_: Any) -> int:
        return 0

    add_batch_routes(endpoint.app, endpoint.gate, files, Batches(endpoint.config, folder, files, run_job))
    described = schemathesis.openapi.from_asgi("/openapi.json", endpoint.app)
    operations = [one.ok() for one in described.get_all_operations()]
    assert len(operations) == 17
    for operation in operations:
        for mode in (schemathesis.GenerationMode.POSITIVE, schemathesis.GenerationMode.NEGATIVE):

            @given(operation.as_strategy(generation_mode=mode))
            @settings(max_examples=4, deadline=None, suppress_health_check=list(HealthCheck))
            def is_answered_or_refused(case: Any) -> None:
                response = case.call(headers={"Authorization": f"Bearer {KEY}"})
                assert response.status_code < 500, response.text
                if response.status_code >= 400:
                    assert set(response.json()["error"]) == {"message", "type", "param", "code"}

            with suppress(Unsatisfiable):  # an operation that takes nothing can be given nothing wrong
                is_answered_or_refused()
