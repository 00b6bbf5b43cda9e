"""The prefix plan (`input.order=by_prefix`): rows whose prompts begin alike are answered one after the other.

Every row is rendered and tokenised once, as the engine will do it. Where enough of the prompts' tokens would come from the
prefix cache that do not in the order of the input, the rows are copied in the order that gets them (`prefix_order`,
`ordered_copy`), and the plan's batches lie in the copy; else the plan stays as it is. Of many rows, the texts are looked at
first, which takes a twentieth of the time: where these share nothing to speak of, neither do the tokens.
"""

import json
import logging
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from time import perf_counter

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from pipelines.config import BatchConfig
from pipelines.errors import RowError
from pipelines.ordered_copy import copy_rows, kinds_of, lay_out
from pipelines.plan import Plan
from pipelines.prefix_order import Ints, PathRecorder, PrefixHits, PrefixTree, num_hit_tokens
from pipelines.prompt_tokens import PromptTokens, tokens_for
from pipelines.readers import read_batches
from pipelines.requests import RequestBuilder
from pipelines.rows import BATCH_FIELDS, Batch, Request
from pipelines.schema import PLAN
from pipelines.sizing import batch_size
from pipelines.sources import read_each
from pipelines.storage import Folder

_BYTES_PER_TOKEN = 4  # of English prose, roughly
LEAST_GAIN = 0.01  # of all prompt tokens: what is not worth a copy
MANY_ROWS = 20_000  # of fewer, the tokens are told within half a minute

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Look:
    """What the prompts of all rows show; rows are numbered as in the whole input."""

    tree: PrefixTree
    num_tokens: npt.NDArray[np.int64]
    batches: list[Batch]
    """Those that can be read."""
    damaged: list[Batch]


def order_by_prefix(config: BatchConfig, plan: Plan, folder: Folder, block_size: int) -> Plan:
    """The plan of the rows in the order of their prompts' prefixes, or the same plan where little is shared.

    What cannot be read, though the settings allow it, stays where it is, to fail there. `block_size` is that of the engine's
    prefix cache.
    """
    started = perf_counter()
    columns = _columns(config, plan)
    if plan.num_rows >= MANY_ROWS and not _texts_share(config, plan, columns, block_size):
        took_s = perf_counter() - started
        logger.info("input.order=by_prefix: the prompts' texts hardly begin alike; the order is kept (%.0f s)", took_s)
        return plan
    look = _look(config, plan, columns, tokens_for(config), block_size)
    kinds, kind_of_batch = kinds_of(config.input, look.batches, columns)
    kind_of_row = np.full(plan.num_rows, -1, np.int64)
    for batch, kind in zip(look.batches, kind_of_batch, strict=True):
        kind_of_row[batch.rows_before : batch.rows_before + batch.num_rows] = kind
    order = look.tree.order()
    order = order[np.argsort(kind_of_row[order], kind="stable")]
    as_is = np.flatnonzero(kind_of_row >= 0)
    order = order[len(order) - len(as_is) :]
    hits = _hits(look, as_is, order, block_size)
    logger.info("input.order=by_prefix: %s (%.0f s)", hits.describe(), perf_counter() - started)
    if not hits.is_ordered:
        return replace(plan, prefix_hits=hits)
    size = batch_size(
        config.engine.rows_per_batch,
        num_rows=len(order),
        num_bytes=_BYTES_PER_TOKEN * hits.num_prompt_tokens,
        num_workers=config.cluster.max_workers or config.cluster.workers,
    )
    layout = lay_out(order, kind_of_row, kinds, look.num_tokens, size)
    lines = copy_rows(config.input, look.batches, columns, layout, folder)
    lines += [{name: getattr(batch, name) for name in BATCH_FIELDS} for batch in look.damaged]
    numbered = [{**line, "batch_id": number} for number, line in enumerate(lines)]
    batches = pa.Table.from_pylist(numbered, schema=PLAN)
    return replace(plan, batches=batches, batch_size=f"{size}; as many more or fewer as make equal tokens", prefix_hits=hits)


def _columns(config: BatchConfig, plan: Plan) -> list[str]:
    """What the workers will read."""
    own = [config.input.id_column] if config.input.id_column else []
    return list(dict.fromkeys([*RequestBuilder(config).columns, *own, *plan.carried.names]))


class Texts:
    """Tells the bytes of prompts, in the place of their tokens: what begins alike in tokens does so in text."""

    special_tokens: Sequence[str] = ()
    max_model_len = None

    def of(self, request: Request) -> Sequence[int]:
        """The text, or all of the conversation, with what a chat template writes before it."""
        return memoryview(json.dumps([request.tools, request.prompt], ensure_ascii=False).encode("utf-8", "surrogatepass"))

    def of_each(self, requests: Sequence[Request]) -> list[Sequence[int] | RowError]:
        """The same, for many."""
        return [self.of(request) for request in requests]


def _texts_share(config: BatchConfig, plan: Plan, columns: list[str], block_size: int) -> bool:
    """Whether another order could win anything, judged by bytes; blocks are taken for half as long as they are in English."""
    num_bytes = _BYTES_PER_TOKEN // 2 * block_size
    look = _look(config, plan, columns, Texts(), num_bytes)
    return _hits(look, np.arange(plan.num_rows), look.tree.order(), num_bytes).is_ordered


def _hits(look: _Look, as_is: Ints, by_prefix: Ints, block_size: int) -> PrefixHits:
    return PrefixHits(
        block_size=block_size,
        num_prompt_tokens=int(look.num_tokens.sum()),
        as_is=num_hit_tokens(look.tree, as_is, look.num_tokens, block_size),
        by_prefix=num_hit_tokens(look.tree, by_prefix, look.num_tokens, block_size),
        least_gain=LEAST_GAIN,
    )


def _look(config: BatchConfig, plan: Plan, columns: list[str], tokens: PromptTokens, block_size: int) -> _Look:
    """Render and tokenise every row."""
    requests = RequestBuilder(config, tokens.special_tokens)
    num_tokens = np.zeros(plan.num_rows, np.int64)
    batches: list[Batch] = []
    damaged: list[Batch] = []
    with tempfile.TemporaryFile() as spill:
        recorder = PathRecorder(plan.num_rows, block_size, spill)
        read = partial(read_batches, config.input, columns=columns, carried=plan.carried)
        for batch, block in read_each(_batches(plan), config.input, read):
            (batches if block is not None else damaged).append(batch)
            prompts: list[npt.ArrayLike] = [()] * batch.num_rows
            places, built = [], []
            for place, row in enumerate([] if block is None else block.rows):
                try:
                    if isinstance(row, dict):
                        built.append(requests.build(row, key="", row_number=batch.rows_before + place, attempt=1))
                        places.append(place)
                except RowError:
                    continue  # it will fail, and never see the cache
            for place, request, found in zip(places, built, tokens.of_each(built), strict=True):
                # Who asks for the log probabilities of a prompt gets all of it computed (`skip_reading_prefix_cache`).
                if not isinstance(found, RowError) and request.sampling.prompt_logprobs is None:
                    prompts[place] = np.asarray(found, np.int64)
                    num_tokens[batch.rows_before + place] = len(found)
            recorder.add(prompts)
        return _Look(recorder.tree(), num_tokens, batches, damaged)


def _batches(plan: Plan) -> Iterator[Batch]:
    for some in plan.batches.select(BATCH_FIELDS).to_batches(max_chunksize=1024):
        for line in some.to_pylist():
            yield Batch(**line)
