"""Which requests ran in a step of vLLM, told from the counts that it gives for each step.

vLLM says when it scheduled a request only with the request's first token, too late to share the steps in between. But it
takes requests in their order (its scheduling policy `fcfs`), so how many run, and how many came to their first token, says
which. Where one overtakes another, its share is off by that step; the sum of all shares never is.
"""

from collections import OrderedDict
from collections.abc import Iterable, Sequence

from pipelines.engines.fair_clock import FairClock, Share


class Turns:
    """The sequences in an engine (a request of n answers is n of them), and the clock whose time they share."""

    def __init__(self) -> None:
        self.clock = FairClock()
        self._queued: OrderedDict[Share, None] = OrderedDict()
        self._prefilling: OrderedDict[Share, None] = OrderedDict()
        self._num_decoding = 0

    def add(self, shares: Iterable[Share]) -> None:
        """Sequences join the queue."""
        if not self._prefilling and not self._num_decoding:
            self.clock.advance()  # nothing ran until now
        self._queued.update(dict.fromkeys(shares))

    def stepped(self, *, num_running: int, num_first_tokens: int, finished: Sequence[Share]) -> None:
        """A step is over: so many sequences run on, so many came to their first token, and these are finished."""
        num_prefilling = max(num_first_tokens, num_running + len(finished) - self._num_decoding)
        for share in finished:
            if share in self._queued:
                self._enter(share)
        while self._queued and len(self._prefilling) < num_prefilling:
            self._enter(next(iter(self._queued)))
        self.clock.advance()
        for _ in range(min(num_first_tokens, len(self._prefilling))):
            share, _ = self._prefilling.popitem(last=False)
            self.clock.first_token(share)
            self._num_decoding += 1
        for share in finished:
            self._leave(share)

    def _enter(self, share: Share) -> None:
        del self._queued[share]
        self._prefilling[share] = None
        self.clock.enter(share)

    def _leave(self, share: Share) -> None:
        if share in self._prefilling:
            del self._prefilling[share]
        else:
            self._num_decoding -= 1
        self.clock.leave(share)
