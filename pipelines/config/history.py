"""When a night is worse than those before it."""

from typing import Annotated

from pydantic import Field, NonNegativeFloat, PositiveInt

from pipelines.config.strict import Strict

Share = Annotated[float, Field(ge=0, le=1)]


class Tolerances(Strict):
    """How much worse than the median each measure may be; each is named as its column. null: not judged."""

    cost_per_million_output_tokens: NonNegativeFloat | None
    """The largest increase, as a share of the median."""
    cost_per_million_total_tokens: NonNegativeFloat | None
    """The same."""
    output_tokens_per_s: Share | None
    """The largest decrease, as a share of the median."""
    failed_share: Share | None
    """The largest increase of the share of failed rows, in itself: 0.01 allows 3 % where 2 % is usual."""
    accuracy: Share | None
    """The largest decrease of the share of correct answers, in itself."""
    ttft_s_p95: NonNegativeFloat | None
    """The largest increase of the time to first token that 95 % of the rows stay below, as a share of the median."""
    num_rows: NonNegativeFloat | None
    """The largest change of the input's rows, up or down, as a share of the median."""


class HistoryConfig(Strict):
    """Everything that `fournee history check` can be told."""

    last_n: PositiveInt
    """How many comparable runs to take the median of: the newest before the one that is judged."""
    min_runs: PositiveInt
    """A measure with fewer values than that is not judged."""
    tolerances: Tolerances
