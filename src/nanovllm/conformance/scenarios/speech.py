"""Public cases about pieces of text, with the very pieces of the reports.

No engine can be told what to say, but its checkpoint can: a tokenizer is written in which the
tokens that the model generates anyway mean these pieces.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from nanovllm.conformance.protocol import (
    EngineDoor,
    EngineFault,
    EngineResult,
    Refused,
    Unsupported,
)
from nanovllm.conformance.scenarios.engine_driver import MODEL, EngineBench, request
from nanovllm.conformance.scenarios.scenario import scenario, scenarios_of
from nanovllm.conformance.scenarios.track import span
from nanovllm.conformance.verdicts import Evaluations

engine = partial(scenario, door="engine")
PROMPTS = tuple(span(i, i + 3) for i in range(300, 1300, 100))
CHARACTERS = "a\u00e9\u6f22\U0001f642b"
"""One to four bytes each, and no byte twice."""


class Speaker:
    """An engine whose model says `pieces`, and then whatever it likes."""

    def __init__(self, door: EngineDoor, bench: EngineBench, prompt: list[int]) -> None:
        self.door = door
        self.bench = bench
        self.prompt = prompt

    def say(self, num_tokens: int, **params: Any) -> EngineResult:
        return self.bench.ask_one(self.prompt, max_tokens=num_tokens, **params)

    def stream(self, num_tokens: int, **params: Any) -> list[str]:
        wanted = {"temperature": 0.0, "max_tokens": num_tokens, "ignore_eos": True, **params}
        return self.door.stream(request(self.prompt, wanted))

    def expect_text(self, spec_id: str, text: str, num_tokens: int, **params: Any) -> EngineResult:
        found = self.say(num_tokens, **params)
        said = f"{params}: the text is {found.text!r}, expected {text!r}"
        self.bench.expect(found.text == text, spec_id, said)
        return found


@contextmanager
def speaking(
    door: EngineDoor, seen: Evaluations, pieces: Sequence[bytes]
) -> Iterator[Speaker | None]:
    """None if the model says nothing, in so many tokens, without saying a token twice."""
    bench = EngineBench(door, seen)
    outputs = bench.ask(PROMPTS, max_tokens=len(pieces))
    for prompt, output in zip(PROMPTS, outputs, strict=True):
        if len(set(output.token_ids)) == len(pieces):
            with TemporaryDirectory() as name:
                directory = Path(name) / "model"
                shutil.copytree(MODEL, directory)
                _teach(directory / "tokenizer.json", output.token_ids, pieces)
                yield Speaker(door, EngineBench(door, seen, directory), prompt)
                door.close()
            return
    yield None


def _teach(path: Path, token_ids: Sequence[int], pieces: Sequence[bytes]) -> None:
    """Let the tokens mean the pieces; what they meant gets ids beyond the model's."""
    tokenizer = json.loads(path.read_text())
    vocabulary = tokenizer["model"]["vocab"]
    strings = {token: string for string, token in vocabulary.items()}
    meanings = {_string(piece): token for piece, token in zip(pieces, token_ids, strict=True)}
    displaced = {strings[token] for token in token_ids}.union(meanings.keys() & vocabulary.keys())
    beyond = len(vocabulary)
    for i, string in enumerate(sorted(displaced)):
        vocabulary[string] = beyond + i
    vocabulary.update(meanings)
    path.write_text(json.dumps(tokenizer))


def _string(piece: bytes) -> str:
    """As byte-level tokenizers write it: bytes that do not print are characters from 256 on."""
    prints = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in prints]
    written = {byte: chr(byte) for byte in prints}
    written.update((byte, chr(256 + i)) for i, byte in enumerate(others))
    return "".join(written[byte] for byte in piece)


@engine("STP-3b", "STP-3a", "SCH-12d", needs=("greedy", "stop"))
def engine_b73_stop_string_inside_or_across_tokens(door: EngineDoor, seen: Evaluations) -> None:
    """Pieces A, DEF, GH; stop DE leaves A, FG leaves ADE, ADEFGH nothing, the earliest wins."""
    with speaking(door, seen, (b"A", b"DEF", b"GH")) as speaker:
        if speaker is None:
            return
        for stop, text in (
            (("DE",), "A"),
            (("FG",), "ADE"),
            (("ADEFGH",), ""),
            (("EF", "DE"), "A"),
            (("DE", "EF"), "A"),
            (("GH", "never"), "ADEF"),
        ):
            spec_id = "STP-3a" if len(stop) > 1 else "STP-3b"
            found = speaker.expect_text(spec_id, text, 3, stop=stop)
            reason = found.finish_reason
            speaker.bench.expect(reason == "stop", "SCH-12d", f"stop {stop}: ended by {reason}")
        with suppress(Refused, Unsupported, EngineFault):
            kept = speaker.say(3, stop=("DE",), include_stop=True).text
            speaker.bench.expect(kept == "ADE", "STP-3b", f"include_stop: {kept!r}, expected 'ADE'")


@engine("STP-3c", needs=("greedy", "stop", "stream"))
def engine_b74_stream_leaks_no_start_of_a_stop(door: EngineDoor, seen: Evaluations) -> None:
    """Pieces ABC, DEF, G, HI, J; stop DEFGHIJ: ABC is delivered, and nothing else at any time."""
    with speaking(door, seen, (b"ABC", b"DEF", b"G", b"HI", b"J")) as speaker:
        if speaker:
            pieces = speaker.stream(5, stop=("DEFGHIJ",))
            said = f"{pieces} delivered, expected 'ABC' alone"
            speaker.bench.expect("".join(pieces) == "ABC", "STP-3c", said)


@engine("STP-4", needs=("greedy", "stop", "stream"))
def text_held_back_for_a_stop_is_released(door: EngineDoor, seen: Evaluations) -> None:
    """The same pieces, but the generation ends by its length before the stop string does."""
    with speaking(door, seen, (b"ABC", b"DEF", b"G", b"HI", b"J")) as speaker:
        if speaker:
            text = "ABCDEFGHI"
            speaker.expect_text("STP-4", text, 4, stop=("DEFGHIJ",))
            pieces = speaker.stream(4, stop=("DEFGHIJ",))
            said = f"{pieces} delivered, expected {text!r} in all"
            speaker.bench.expect("".join(pieces) == text, "STP-4", said)


@engine("STP-4", needs=("greedy", "stream"))
def engine_b76_characters_come_whole(door: EngineDoor, seen: Evaluations) -> None:
    """A text of characters of one to four bytes, a byte a token: never a half of one."""
    pieces = [bytes([byte]) for byte in CHARACTERS.encode()]
    with speaking(door, seen, pieces) as speaker:
        if speaker:
            speaker.expect_text("STP-4", CHARACTERS, len(pieces))
            delivered = speaker.stream(len(pieces))
            said = f"{delivered} delivered, expected {CHARACTERS!r}"
            speaker.bench.expect("".join(delivered) == CHARACTERS, "STP-4", said)


SCENARIOS = scenarios_of(globals())
