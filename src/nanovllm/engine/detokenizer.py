"""Text of one request, token by token (STP-3, STP-4).

tokens ──decode a window──> settled text ──hold back what may begin a stop──> delivered text
              │                                          │
   a trailing half character waits            released when it cannot match
"""

from collections.abc import Collection
from typing import Protocol

from nanovllm.sampling_params import SamplingParams

_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
_MAX_UNSETTLED = 3
"""A UTF-8 character has four bytes at most, so three replacement characters may still change."""
_MAX_WINDOW = 32
_MIN_WINDOW = 12
"""Tokens that surely hold more than the bytes behind the unsettled characters, three each."""


class Tokenizer(Protocol):
    """The one method that is needed of a tokenizer."""

    def decode(self, token_ids: list[int], *, skip_special_tokens: bool) -> str:
        """The text of the tokens together, bytes that are no UTF-8 as U+FFFD."""


class _TokenWindow:
    """Incremental decoding at a cost per token that does not grow with the text.

    Decoders treat the first token in a special way (SentencePiece drops its space), and one token
    may hold part of a character. So the window starts with tokens whose text was taken before, and
    new text is what follows theirs:

        window = [ tokens of the last settled text | tokens since then ]
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._tokens: list[int] = []
        self._num_settled = 0  # leading tokens of the window: those before the bar
        self._text = ""
        self._returned = ""  # its beginning

    def push(self, token_id: int) -> str:
        """Text settled by this token: all but a trailing incomplete character."""
        text = self._decode([*self._tokens, token_id])
        if text == self._text and self._tokens and not self._decode([token_id]):
            return ""  # a special token: keeping it would fill the window with nothing
        self._tokens.append(token_id)
        self._text = text
        return self._take(len(text) - self._num_unsettled())

    def flush(self) -> str:
        """The rest, incomplete character and all."""
        return self._take(len(self._text))

    def _num_unsettled(self) -> int:
        """Trailing replacement characters that may still become something else.

        Byte-fallback decoders show a whole run of bytes as replacement characters while its last
        character is incomplete; that is seen by a change of what was returned.
        """
        trailing = len(self._text) - len(self._text.rstrip(_REPLACEMENT))
        intact = self._text.startswith(self._returned)
        return min(trailing, _MAX_UNSETTLED) if intact or self._is_full() else trailing

    def _is_full(self) -> bool:
        return len(self._tokens) > _MAX_WINDOW

    def _take(self, end: int) -> str:
        settled = self._text[len(self._returned) : end]
        if settled:
            self._returned = self._text[:end]
        if settled and end == len(self._text):
            self._slide()
        elif self._is_full():
            self._cut()
        return settled

    def _slide(self) -> None:
        """Drop the tokens before the last settled text, unless what stays would show no text."""
        last = self._tokens[self._num_settled :]
        if text := self._decode(last):
            self._tokens, self._text, self._returned = last, text, text
            self._num_settled = len(last)

    def _cut(self) -> None:
        """Bound a window that never settles: endless bytes that are no UTF-8.

        A cut inside a character only changes the text at the front, which was returned.
        """
        num_waiting = len(self._text) - len(self._returned)
        self._tokens = self._tokens[-_MIN_WINDOW:]
        self._num_settled = 0
        self._text = self._decode(self._tokens)
        self._returned = self._text[: max(0, len(self._text) - num_waiting)]

    def _decode(self, token_ids: list[int]) -> str:
        return self._tokenizer.decode(token_ids, skip_special_tokens=True)


class Detokenizer:
    """Turns the output tokens of one request into text, and finds its stop strings.

    Every `push` and `finish` returns the next piece of text; the pieces make up `text`. Of several
    stop strings the one that is complete first wins, of those the longest: what is delivered does
    not depend on where token borders lie.

    Args:
        tokenizer: anything with `decode`.
        params: gives stop, include_stop and min_tokens.
        end_token_ids: ids that end the request (`SamplingParams.end_token_ids`); they count as
            tokens and are no text.
    """

    def __init__(
        self, tokenizer: Tokenizer, params: SamplingParams, end_token_ids: Collection[int] = ()
    ) -> None:
        self._window = _TokenWindow(tokenizer)
        self._stops = params.stop
        self._include_stop = params.include_stop
        self._min_tokens = params.min_tokens
        self._end_token_ids = frozenset(end_token_ids)
        self._num_tokens = 0
        self._text = ""
        self._held = ""  # settled text that may be the beginning of a stop string
        self.stopped = False

    @property
    def text(self) -> str:
        """All text delivered so far."""
        return self._text

    def push(self, token_id: int) -> str:
        """The text that became safe to deliver with this token; sets `stopped` at a stop string."""
        assert not self.stopped, "token after a stop string"
        self._num_tokens += 1
        if token_id in self._end_token_ids:
            return ""
        text = self._held + self._window.push(token_id)
        # A match begins within `text`: nothing delivered before could be the beginning of one.
        match = self._first_match(text) if self._num_tokens >= self._min_tokens else None
        if match is None:
            end = len(text) - self._num_held(text)
        else:
            self.stopped = True
            end = match.stop if self._include_stop else match.start
        self._held = "" if self.stopped else text[end:]
        return self._deliver(text[:end])

    def finish(self) -> str:
        """What was held back, when generation ends for any other reason than a stop string."""
        if self.stopped:
            return ""
        rest, self._held = self._held + self._window.flush(), ""
        return self._deliver(rest)

    def _first_match(self, text: str) -> range | None:
        found = (
            range(start, start + len(stop))
            for stop in self._stops
            if (start := text.find(stop)) >= 0
        )
        return min(found, key=lambda match: (match.stop, match.start), default=None)

    def _num_held(self, text: str) -> int:
        """Length of the longest end of `text` that is a proper beginning of a stop string."""
        return max((_overlap(text, stop) for stop in self._stops), default=0)

    def _deliver(self, text: str) -> str:
        self._text += text
        return text


def _overlap(text: str, stop: str) -> int:
    longest = min(len(text), len(stop) - 1)
    return next((n for n in range(longest, 0, -1) if text.endswith(stop[:n])), 0)
