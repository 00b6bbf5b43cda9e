"""OpenAI's `/v1/files` and `/v1/batches`."""

import asyncio
from collections.abc import Mapping
from http import HTTPStatus
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import StreamingResponse
from starlette.datastructures import UploadFile

from pipelines.serving.app import Gate
from pipelines.serving.batches import Batches
from pipelines.serving.faults import ApiError
from pipelines.serving.files import Files, shown
from pipelines.serving.marks import body_of
from pipelines.serving.schemas import BATCH_BODY, UPLOAD_BODY

_FORM_BYTES = 2**16  # of a form, besides the file in it


def add_batch_routes(app: FastAPI, gate: Gate, files: Files, batches: Batches) -> None:
    """Serve files and batches; each client sees its own only."""
    _add_files(app, gate, files)

    @app.post("/v1/batches", openapi_extra=BATCH_BODY)
    async def create_batch(request: Request) -> dict[str, Any]:
        client = gate.client(request)
        body = await body_of(request, gate.config.serve.max_body_bytes)
        return shown(await asyncio.to_thread(batches.add, body, client.name))

    @app.get("/v1/batches")
    async def list_batches(request: Request) -> dict[str, Any]:
        client = gate.client(request)
        return _page(await asyncio.to_thread(batches.records.all), client.name, request.query_params)

    @app.get("/v1/batches/{batch_id}")
    async def one_batch(request: Request, batch_id: str) -> dict[str, Any]:
        return shown(await asyncio.to_thread(batches.records.get, batch_id, gate.client(request).name))

    @app.post("/v1/batches/{batch_id}/cancel")
    async def cancel_batch(request: Request, batch_id: str) -> dict[str, Any]:
        return shown(await asyncio.to_thread(batches.cancel, batch_id, gate.client(request).name))


def _add_files(app: FastAPI, gate: Gate, files: Files) -> None:
    @app.post("/v1/files", openapi_extra=UPLOAD_BODY)
    async def upload(request: Request) -> dict[str, Any]:
        client = gate.client(request)
        _check_length(request, gate.config.serve.max_file_bytes)
        async with request.form(max_files=1, max_fields=16) as form:
            file, purpose = form.get("file"), form.get("purpose")
            if not isinstance(file, UploadFile):
                raise ApiError(HTTPStatus.BAD_REQUEST, "the form has no file", param="file")
            if purpose != "batch":
                raise ApiError(HTTPStatus.BAD_REQUEST, 'purpose must be "batch"', param="purpose")
            name = (file.filename or "batch.jsonl")[:255]
            record = await asyncio.to_thread(lambda: files.add(file.file, name=name, purpose="batch", client=client.name))
        return shown(record)

    @app.get("/v1/files")
    async def list_files(request: Request) -> dict[str, Any]:
        client = gate.client(request)
        return _page(await asyncio.to_thread(files.records.all), client.name, request.query_params)

    @app.get("/v1/files/{file_id}")
    async def one_file(request: Request, file_id: str) -> dict[str, Any]:
        return shown(await asyncio.to_thread(files.records.get, file_id, gate.client(request).name))

    @app.get("/v1/files/{file_id}/content")
    async def content(request: Request, file_id: str) -> StreamingResponse:
        record = await asyncio.to_thread(files.records.get, file_id, gate.client(request).name)
        return StreamingResponse(files.read(record), media_type="application/octet-stream")

    @app.delete("/v1/files/{file_id}")
    async def delete(request: Request, file_id: str) -> dict[str, Any]:
        record = await asyncio.to_thread(files.records.get, file_id, gate.client(request).name)
        await asyncio.to_thread(files.delete, record)
        return {"id": file_id, "object": "file", "deleted": True}


def _check_length(request: Request, most_bytes: int) -> None:
    """Refuse an upload before it is read: a form without its length could be of any size."""
    length = request.headers.get("content-length", "")
    if not length.isdecimal():
        raise ApiError(HTTPStatus.LENGTH_REQUIRED, "an upload needs a Content-Length")
    if int(length) > most_bytes + _FORM_BYTES:
        raise ApiError(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, f"the file is larger than {most_bytes} bytes")


def _page(records: list[dict[str, Any]], client: str, query: Mapping[str, str]) -> dict[str, Any]:
    """Some of a client's records, from the one behind `after` on, as OpenAI's API lists them; raises ApiError."""
    own, limit, after = [shown(one) for one in records if one["client"] == client], query.get("limit", "20"), query.get("after")
    if not (limit.isdecimal() and limit.isascii() and 1 <= int(limit) <= 10_000):
        raise ApiError(HTTPStatus.BAD_REQUEST, "limit must be a whole number from 1 to 10000", param="limit")
    ids = [record["id"] for record in own]
    start = ids.index(after) + 1 if after in ids else 0
    some = own[start : start + int(limit)]
    first, last = (some[0]["id"], some[-1]["id"]) if some else (None, None)
    return {"object": "list", "data": some, "first_id": first, "last_id": last, "has_more": start + len(some) < len(own)}
