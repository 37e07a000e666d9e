"""Short experiments that show whether an engine has a capability, at the engine door; see `probes`.

Each takes a door whose model is open. They are about what is there, not about how right it is:
top-k of 1, top-p of almost 0 and min-p of 1 leave one token, so each must be greedy.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from nanovllm.conformance.probes import expect
from nanovllm.conformance.protocol import EngineDoor, EngineRequest, EngineResult

PROMPT = tuple(range(10, 50))
LENGTH = 12


def complete(door: EngineDoor, **params: Any) -> EngineResult:
    """`PROMPT` and `LENGTH` more tokens, greedily unless `params` say otherwise."""
    return door.generate([request(**params)])[0][0]


def request(**params: Any) -> EngineRequest:
    defaults = {"temperature": 0.0, "max_tokens": LENGTH, "ignore_eos": True}
    return EngineRequest(PROMPT, {**defaults, **params})


def probe_generate(door: EngineDoor) -> None:
    """What every engine has: as many tokens as were asked for, drawn or not."""
    result = complete(door, temperature=1.0)
    expect(len(result.token_ids) == LENGTH, f"{len(result.token_ids)} tokens came, not {LENGTH}")


def probe_greedy(door: EngineDoor) -> None:
    first, second = complete(door), complete(door)
    expect(
        first.token_ids == second.token_ids,
        f"temperature 0 gave {first.token_ids}, then {second.token_ids}",
    )


def probe_sampling(door: EngineDoor) -> None:
    drawn = {complete(door, temperature=2.0).token_ids for _ in range(4)}
    expect(len(drawn) > 1, f"temperature 2 gave {drawn} four times")


def probe_seed(door: EngineDoor) -> None:
    drawn = [complete(door, temperature=2.0, seed=seed).token_ids for seed in (1, 1, 2, 3)]
    expect(drawn[0] == drawn[1], f"seed 1 gave {drawn[0]}, then {drawn[1]}")
    expect(len(set(drawn)) > 1, f"three seeds all gave {drawn[0]}")


def one_left(**params: Any) -> Callable[[EngineDoor], None]:
    """A probe that `params` leave nothing to draw."""

    def probe(door: EngineDoor) -> None:
        drawn, best = complete(door, temperature=1.0, **params), complete(door)
        expect(drawn.token_ids == best.token_ids, f"{params} gave {drawn.token_ids}, not the best")

    return probe


def probe_penalties(door: EngineDoor) -> None:
    plain, penalised = complete(door), complete(door, frequency_penalty=2.0, presence_penalty=2.0)
    repeats = [len(set(result.token_ids)) for result in (plain, penalised)]
    expect(
        repeats[1] > repeats[0] or plain.token_ids != penalised.token_ids or repeats[0] == LENGTH,
        f"penalties of 2 changed nothing in {plain.token_ids}",
    )


def probe_logprobs(door: EngineDoor) -> None:
    result = complete(door, logprobs=0)
    expect(result.logprobs is not None, "there are none")
    rows = result.logprobs or ()
    expect(len(rows) == LENGTH, f"{len(rows)} rows for {LENGTH} tokens")
    expect(all(row[0][1] <= 0 for row in rows), f"a log probability above 0 in {rows}")


def probe_min_tokens(door: EngineDoor) -> None:
    first = complete(door, max_tokens=1).token_ids[0]
    result = complete(door, stop_token_ids=[first], min_tokens=3)
    expect(len(result.token_ids) >= 3, f"min_tokens=3 gave {len(result.token_ids)} tokens")


def probe_n(door: EngineDoor) -> None:
    samples = door.generate([request(temperature=1.0, n=2)])[0]
    expect(len(samples) == 2, f"n=2 gave {len(samples)} samples")


def probe_stop(door: EngineDoor) -> None:
    text = complete(door).text
    middle = text[len(text) // 2 :][:3]
    result = complete(door, stop=[middle])
    expect(middle not in result.text, f"the stop string {middle!r} is in {result.text!r}")
    expect(result.finish_reason == "stop", f"a stop string ended it as {result.finish_reason}")


def probe_stream(door: EngineDoor) -> None:
    pieces, text = door.stream(request()), complete(door).text
    expect("".join(pieces) == text, f"the pieces {pieces} are not {text!r}")


def probe_abort(door: EngineDoor) -> None:
    pieces = door.stream(request(), abort_after=1)
    expect(len(pieces) == 1, f"left after one piece, there are {pieces}")
    complete(door)


def probe_prefix_cache(door: EngineDoor) -> None:
    complete(door)
    cached = complete(door).num_cached_tokens
    if cached is None:
        declared = "prefix_cache" in door.hello().capabilities
        expect(declared, "it does not tell how many tokens were cached")
    else:
        expect(cached > 0, "the same prompt, a second time, had no cached token")


ENGINE_PROBES: Mapping[str, Callable[[EngineDoor], None]] = {
    "abort": probe_abort,
    "greedy": probe_greedy,
    "logprobs": probe_logprobs,
    "min_p": one_left(min_p=1.0),
    "min_tokens": probe_min_tokens,
    "n": probe_n,
    "penalties": probe_penalties,
    "prefix_cache": probe_prefix_cache,
    "sampling": probe_sampling,
    "seed": probe_seed,
    "stop": probe_stop,
    "stream": probe_stream,
    "top_k": one_left(top_k=1),
    "top_p": one_left(top_p=1e-6),
}
