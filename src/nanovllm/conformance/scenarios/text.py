"""Stop strings, streams and ends of text at the engine door.

No engine is told what to say: what the model says by itself decides where it is to stop. Stop
strings are cut from its text, and end-of-sequence ids are tokens of its output, which a copy of the
checkpoint's generation_config.json declares.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from nanovllm.conformance.protocol import EngineDoor, EngineResult
from nanovllm.conformance.scenarios.engine_driver import MODEL, TEXTS, EngineBench, request
from nanovllm.conformance.scenarios.scenario import scenario, scenarios_of
from nanovllm.conformance.verdicts import Evaluations

engine = partial(scenario, door="engine")
STOP = ("greedy", "stop")
STREAM = ("greedy", "stream")
MAX_TOKENS = 16
GREEDY: dict[str, Any] = {"temperature": 0.0, "max_tokens": MAX_TOKENS, "ignore_eos": True}
MISSING = object()


def _substrings(text: str) -> list[str]:
    """Stop strings of one character, of a few, of more than a token, and from the beginning."""
    return [text[i : i + n] for i, n in ((4, 1), (7, 3), (11, 7), (0, 5))]


class Spoken:
    """What the model says after a text: the tokens, and the text of the first k of them."""

    def __init__(self, bench: EngineBench, prompt: str) -> None:
        self.bench = bench
        self.prompt = prompt
        jobs = [request(prompt, {**GREEDY, "max_tokens": k}) for k in range(1, MAX_TOKENS + 1)]
        results = [samples[0] for samples in bench.submit(jobs)]
        self.texts = [result.text for result in results]
        self.token_ids = results[-1].token_ids

    @property
    def text(self) -> str:
        return self.texts[-1]

    def expect_cut(self, stopped: EngineResult, *stops: str) -> None:
        """It ended with the token that completes a stop string, its text before the first one."""
        n = 1 + next(k for k, text in enumerate(self.texts) if any(stop in text for stop in stops))
        text = self.text[: min(self.text.index(stop) for stop in stops if stop in self.text)]
        expect, said = self.bench.expect, f"stop strings {stops}: "
        found = stopped.token_ids
        expect(len(found) == n, "STP-3a", f"{said}{len(found)} tokens, expected {n}")
        expect(found == self.token_ids[:n], "SCH-12c", f"{said}tokens {found}")
        expect(stopped.text == text, "STP-3b", f"{said}{stopped.text!r}, expected {text!r}")
        expect(stopped.finish_reason == "stop", "SCH-12d", f"{said}{stopped.finish_reason}")


@engine("STP-3a", "STP-3b", "SCH-12c", "SCH-12d", needs=STOP)
def stop_strings_end_the_text_wherever_they_lie(door: EngineDoor, seen: Evaluations) -> None:
    """Wherever it lies between tokens, the text ends before its first occurrence."""
    bench = EngineBench(door, seen)
    for prompt in TEXTS[:2]:
        spoken = Spoken(bench, prompt)
        for stop in _substrings(spoken.text):
            spoken.expect_cut(bench.ask_one(prompt, stop=(stop,)), stop)


@engine("STP-3a", "STP-3b", needs=STOP)
def earliest_of_several_stop_strings_wins(door: EngineDoor, seen: Evaluations) -> None:
    """Several at once, in both orders, one of which never occurs."""
    bench = EngineBench(door, seen)
    spoken = Spoken(bench, TEXTS[0])
    stops = ("~ never said ~", *_substrings(spoken.text)[1:3])
    for order in (stops, stops[::-1]):
        spoken.expect_cut(bench.ask_one(TEXTS[0], stop=order), *order)


@engine("STP-3a", "SCH-12c", needs=STOP)
def stop_string_ends_its_request_alone(door: EngineDoor, seen: Evaluations) -> None:
    """Of two twins in a batch the one that asked for it stops; the other goes on."""
    bench = EngineBench(door, seen)
    spoken = Spoken(bench, TEXTS[0])
    stop = spoken.text[7:10]
    jobs = [request(TEXTS[0], {**GREEDY, **extra}) for extra in ({"stop": (stop,)}, {})]
    stopped, other = (samples[0] for samples in bench.submit(jobs))
    spoken.expect_cut(stopped, stop)
    same = other.token_ids == spoken.token_ids
    bench.expect(same, "SCH-12c", other, "beside a twin that stops")


# ---- streams -----------------------------------------------------------------------------------


@engine("STP-4", needs=STREAM)
def stream_concatenates_to_the_text(door: EngineDoor, seen: Evaluations) -> None:
    """One token, and several."""
    bench = EngineBench(door, seen)
    for text in TEXTS[:3]:
        for max_tokens in (1, MAX_TOKENS):
            whole = bench.ask_one(text, max_tokens=max_tokens).text
            pieces = _stream(door, text, max_tokens=max_tokens)
            _expect_pieces(bench, pieces, whole)


@engine("STP-3c", "STP-4", needs=("greedy", "stream", "stop"))
def what_is_streamed_is_never_taken_back(door: EngineDoor, seen: Evaluations) -> None:
    """A stop string of several tokens: what is delivered is a prefix of the final text."""
    bench = EngineBench(door, seen)
    for text in TEXTS[:2]:
        free = bench.ask_one(text).text
        for stop in _substrings(free):
            whole = bench.ask_one(text, stop=(stop,)).text
            pieces = _stream(door, text, stop=(stop,))
            delivered = ""
            for piece in pieces:
                delivered += piece
                leaks = not whole.startswith(delivered)
                bench.expect(not leaks, "STP-3c", f"{delivered!r} delivered, the text is {whole!r}")
            _expect_pieces(bench, pieces, whole)
        almost = free[5:9] + "~"
        _expect_pieces(bench, _stream(door, text, stop=(almost,)), free)


def _stream(door: EngineDoor, text: str, **params: Any) -> list[str]:
    return door.stream(request(text, {**GREEDY, **params}))


def _expect_pieces(bench: EngineBench, pieces: list[str], whole: str) -> None:
    delivered = "".join(pieces)
    bench.expect(delivered == whole, "STP-4", f"pieces {pieces} make not {whole!r}")


# ---- eos ids ------------------------------------------------------------------------------------


@contextmanager
def _checkpoint(file: str, eos: object) -> Iterator[Path]:
    """A copy of the model whose `file` declares this `eos_token_id`, or is MISSING."""
    with TemporaryDirectory() as name:
        directory = Path(name) / "model"
        shutil.copytree(MODEL, directory)
        path = directory / file
        if eos is MISSING:
            path.unlink()
        else:
            path.write_text(json.dumps({**json.loads(path.read_text()), "eos_token_id": eos}))
        yield directory


def _fresh_token(result: EngineResult) -> tuple[int, int]:
    """A token of an output that was not said before, and its place; the later the better."""
    tokens = result.token_ids
    places = [i for i, token in enumerate(tokens) if token not in tokens[:i] and 2 <= i <= 12]
    return tokens[places[-1]], places[-1]


@engine("STP-1", "SCH-12a", needs=("greedy",))
def engine_b80_several_eos_ids(door: EngineDoor, seen: Evaluations) -> None:
    """An id of generation_config.json ends a request; as an int, in a list, null, or no file."""
    free = EngineBench(door, seen).ask_one(TEXTS[0])
    token, place = _fresh_token(free)
    own = json.loads((MODEL / "config.json").read_text())["eos_token_id"]
    for file, eos, ends in (
        ("generation_config.json", token, True),
        ("generation_config.json", [own, token], True),
        ("generation_config.json", [own], False),
        ("generation_config.json", None, False),
        ("generation_config.json", MISSING, False),
        ("config.json", token, True),
    ):
        with _checkpoint(file, eos) as directory:
            bench = EngineBench(door, seen, directory)
            _expect_end(bench, free, place if ends else None, f"eos {eos} in {file}")
            door.close()


def _expect_end(bench: EngineBench, free: EngineResult, place: int | None, label: str) -> None:
    """The output ends with the token at `place`, which it keeps; None is to the length."""
    found = bench.ask_one(TEXTS[0], ignore_eos=False)
    n = len(free.token_ids) if place is None else place + 1
    got = found.token_ids, found.finish_reason
    wanted = free.token_ids[:n], "length" if place is None else "stop"
    bench.expect(got == wanted, "STP-1", f"{label}: ended as {got}, expected {wanted}")
    if place is not None:
        ignored = bench.ask_one(TEXTS[0], ignore_eos=True)
        bench.expect(ignored.token_ids == free.token_ids, "SCH-12a", ignored, "with ignore_eos")


@engine("STP-2", needs=("greedy", "min_tokens"))
def engine_b82_min_tokens_with_several_eos_ids(door: EngineDoor, seen: Evaluations) -> None:
    """The model says an eos; with min_tokens it says none of them before."""
    free = EngineBench(door, seen).ask_one(TEXTS[0])
    token, place = _fresh_token(free)
    with _checkpoint("generation_config.json", [0, 2, token]) as directory:
        bench = EngineBench(door, seen, directory)
        for min_tokens in (0, place, place + 1, place + 4):
            found = bench.ask_one(TEXTS[0], ignore_eos=False, min_tokens=min_tokens).token_ids
            early = [t for t in found[:min_tokens] if t in (0, 2, token)]
            bench.expect(not early, "STP-2", f"eos {early} within min_tokens={min_tokens}: {found}")
            long = len(found) > min_tokens
            bench.expect(long, "STP-2", f"{len(found)} tokens, min_tokens={min_tokens}")
            if min_tokens <= place:
                same = found == free.token_ids[: place + 1]
                bench.expect(same, "STP-2", f"min_tokens={min_tokens}: {found}, eos is at {place}")
        ask = partial(bench.ask_one, TEXTS[0], max_tokens=3, min_tokens=4)
        bench.expect_refused("STP-2", "min_tokens=4 of max_tokens=3", ask)
        door.close()


@engine("STP-2", "SCH-12c", needs=("greedy", "min_tokens", "stop"))
def min_tokens_outlasts_stop_ids_and_strings(door: EngineDoor, seen: Evaluations) -> None:
    """Both are ignored while there are fewer."""
    bench = EngineBench(door, seen)
    free = bench.ask_one(TEXTS[0])
    token, place = _fresh_token(free)
    stopped = bench.ask_one(TEXTS[0], stop_token_ids=(token,))
    got = stopped.token_ids, stopped.finish_reason
    bench.expect(got == (free.token_ids[: place + 1], "stop"), "SCH-12c", f"stop id {token}: {got}")
    found = bench.ask_one(TEXTS[0], stop_token_ids=(token,), min_tokens=place + 3).token_ids
    early = token in found[: place + 3]
    bench.expect(not early, "STP-2", f"stop id {token} within {place + 3} tokens: {found}")
    once = bench.ask_one(TEXTS[0], stop=(free.text[:3],), min_tokens=8)
    bench.expect(
        len(once.token_ids) > 8, "STP-2", f"stop string after {len(once.token_ids)} tokens"
    )


SCENARIOS = scenarios_of(globals())
