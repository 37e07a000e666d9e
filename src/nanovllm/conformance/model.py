"""The model that the suite plays: the next token is a function of all that was read."""

from __future__ import annotations

from collections.abc import Sequence

from nanovllm.conformance.book import Book
from nanovllm.conformance.entries import Entry, Flight
from nanovllm.conformance.protocol import RequestId
from nanovllm.conformance.shadow import Reading, next_token


class Model:
    """Draws from a small alphabet, so that requests often continue alike; an eos is rare."""

    def __init__(self, book: Book) -> None:
        self.book = book
        self._alphabet = (1, 2, 1, 2, 1, 2, *book.world.eos_token_ids)

    def draw(self, flight: Flight, readings: Sequence[Reading]) -> dict[RequestId, int]:
        tokens: dict[RequestId, int] = {}
        for seating, reading in zip(flight.seatings, readings, strict=True):
            entry = seating.entry
            if seating.row.end == entry.num_known:
                k = entry.num_known - len(entry.prompt) + 1
                tokens[entry.id] = self._token(entry, reading.digest, k)
        return tokens

    def _token(self, entry: Entry, digest: int, k: int) -> int:
        """Output number `k`; what would end the request too early is masked (STP-2)."""
        masked = self.book.end_tokens(entry) if k <= entry.options.min_tokens else ()
        forced = entry.forced.get(k)
        if forced is not None and forced not in masked:
            return forced
        # One token more than can be masked, so that some are always left.
        allowed = [token for token in (*self._alphabet, 3) if token not in masked]
        return next_token(digest, entry.seed, entry.id.sample, allowed)

    def alone(self, entry: Entry) -> tuple[list[int], str]:
        """Completion and reason of the request computed alone, without a cache."""
        node = entry.path[len(entry.prompt) - 1]
        completion: list[int] = []
        while True:
            completion.append(self._token(entry, node.digest, len(completion) + 1))
            node = node.then(completion[-1])
            if reason := self.book.ending(entry, completion):
                return completion, reason
