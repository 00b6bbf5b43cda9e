"""What each client may still ask for: requests and tokens of the last minute, and requests at once."""

import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http import HTTPStatus

from pipelines.serving.faults import ApiError
from pipelines.serving.keys import Client

_WINDOW_S = 60.0


@dataclass(slots=True)
class _Window:
    """What was spent in the last minute, the oldest first."""

    spent: deque[tuple[float, int]] = field(default_factory=deque)
    total: int = 0

    def add(self, now: float, amount: int) -> None:
        self.spent.append((now, amount))
        self.total += amount

    def forget(self, now: float) -> None:
        while self.spent and self.spent[0][0] <= now - _WINDOW_S:
            self.total -= self.spent.popleft()[1]

    def free_in_s(self, now: float, limit: int) -> float:
        """How long until the total is below a limit."""
        left = self.total
        for moment, amount in self.spent:
            left -= amount
            if left < limit:
                return moment + _WINDOW_S - now
        return _WINDOW_S


@dataclass(slots=True)
class _Spending:
    requests: _Window = field(default_factory=_Window)
    tokens: _Window = field(default_factory=_Window)
    at_once: int = 0


class Quotas:
    """The spending of all clients of one endpoint, in its memory: a restart forgives the last minute.

    A batch's rows neither count nor are refused: they take the room that live requests leave, and no limit of their owner's.
    """

    def __init__(self, retry_after_s: float, clock: Callable[[], float] = time.monotonic):
        self._retry_after_s = retry_after_s
        self._clock = clock
        self._spending: defaultdict[str, _Spending] = defaultdict(_Spending)

    @contextmanager
    def admitted(self, client: Client) -> Iterator[None]:
        """A request runs for the block; raises ApiError (429) where its client has asked for too much.

        Tokens are known when they are spent: a client that goes past its tokens pays for it with its next requests.
        """
        if client.is_background:
            yield
            return
        spending, quota, now = self._spending[client.name], client.quota, self._clock()
        for window, limit, what in (
            (spending.requests, quota.requests_per_minute, "requests"),
            (spending.tokens, quota.tokens_per_minute, "tokens"),
        ):
            window.forget(now)
            if limit is not None and window.total >= limit:
                raise _refusal(f"{client.name} may use {limit} {what} a minute", window.free_in_s(now, limit))
        if quota.requests_at_once is not None and spending.at_once >= quota.requests_at_once:
            raise _refusal(f"{client.name} may have {quota.requests_at_once} request(s) at once", self._retry_after_s)
        spending.requests.add(now, 1)
        spending.at_once += 1
        try:
            yield
        finally:
            spending.at_once -= 1

    def spent(self, client: Client, num_tokens: int) -> None:
        """A request has taken so many tokens."""
        if num_tokens and not client.is_background:
            self._spending[client.name].tokens.add(self._clock(), num_tokens)


def _refusal(message: str, retry_after_s: float) -> ApiError:
    return ApiError(HTTPStatus.TOO_MANY_REQUESTS, f"{message}; come again later", code="rate_limit_exceeded",
                    retry_after_s=retry_after_s)  # fmt: skip
