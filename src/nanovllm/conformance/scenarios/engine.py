"""Relations between outputs that need no oracle: what must not change them, and what must."""

from __future__ import annotations

import random
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from itertools import permutations
from typing import Any

from nanovllm.conformance.protocol import EngineDoor, Refused, Unsupported
from nanovllm.conformance.scenarios.engine_driver import (
    TEXTS,
    EngineBench,
    Prompt,
    request,
    tokens_of,
)
from nanovllm.conformance.scenarios.scenario import scenario, scenarios_of
from nanovllm.conformance.scenarios.track import span
from nanovllm.conformance.verdicts import Evaluations

engine = partial(scenario, door="engine")
GREEDY = ("greedy",)
CACHED = ("greedy", "prefix_cache")


def _solo(door: EngineDoor, seen: Evaluations) -> tuple[EngineBench, list[tuple[int, ...]]]:
    """An engine without prefix cache, and what it gives for each text alone."""
    bench = EngineBench(door, seen, prefix_cache=False)
    return bench, tokens_of(bench.solo(TEXTS))


def _under(door: EngineDoor, seen: Evaluations, spec_id: str, *settings: dict[str, Any]) -> None:
    """All texts as one batch under each of these options, against each alone without them."""
    bench, alone = _solo(door, seen)
    for options in settings:
        if bench.try_open(**options):
            label = ", ".join(f"{name}={value}" for name, value in options.items())
            bench.expect_equal(spec_id, TEXTS, bench.ask(TEXTS), alone, label)


# ---- what must not change an output ----------------------------------------------------------


@engine("MOD-2", needs=GREEDY)
def batched_equals_solo(door: EngineDoor, seen: Evaluations) -> None:
    """Four texts in one batch give what each gives alone."""
    bench, alone = _solo(door, seen)
    bench.expect_equal("MOD-2", TEXTS, bench.ask(TEXTS), alone, "in a batch")


@engine("KV-8", needs=GREEDY)
def each_request_gets_the_token_of_its_own_row(door: EngineDoor, seen: Evaluations) -> None:
    """Each order of three texts of different lengths, two tokens each."""
    bench = EngineBench(door, seen, prefix_cache=False)
    alone = dict(zip(TEXTS, tokens_of(bench.solo(TEXTS, max_tokens=2)), strict=True))
    for texts in permutations(TEXTS[:3]):
        found = bench.ask(texts, max_tokens=2)
        bench.expect_equal("KV-8", texts, found, [alone[text] for text in texts], "in a batch")


@engine("KV-5", needs=GREEDY)
def decoded_equals_computed_at_once(door: EngineDoor, seen: Evaluations) -> None:
    """Each token of an output is what follows all before it, as one prompt or in chunks."""
    bench = EngineBench(door, seen, prefix_cache=False)
    prompt = span(300, 312)
    decoded = bench.ask_one(prompt).token_ids
    prefixes = [[*prompt, *decoded[:i]] for i in range(len(decoded))]
    found = bench.ask(prefixes, max_tokens=1)
    expected = [(token,) for token in decoded]
    bench.expect_equal("KV-5", prefixes, found, expected, "at once")
    if bench.try_open(max_num_batched_tokens=5, max_num_seqs=1, prefix_cache=False):
        found = bench.ask(prefixes, max_tokens=1)
        bench.expect_equal("KV-5", prefixes, found, expected, "in chunks")


@engine("KV-7", needs=GREEDY)
def chunks_go_on_at_their_positions(door: EngineDoor, seen: Evaluations) -> None:
    """The first output of a prompt in chunks of 3, 5 and 8 tokens is that of the whole."""
    bench = EngineBench(door, seen, prefix_cache=False)
    whole = tokens_of(bench.ask(TEXTS, max_tokens=3))
    for budget in (3, 5, 8):
        if bench.try_open(max_num_batched_tokens=budget, max_num_seqs=1, prefix_cache=False):
            found = bench.ask(TEXTS, max_tokens=3)
            bench.expect_equal("KV-7", TEXTS, found, whole, f"in chunks of {budget}")


@engine("SCH-14", needs=GREEDY)
def chunked_equals_whole(door: EngineDoor, seen: Evaluations) -> None:
    """Prompts split over steps of 5 and of 8 tokens."""
    budgets = [{"max_num_batched_tokens": n, "max_num_seqs": 4} for n in (5, 8)]
    _under(door, seen, "SCH-14", *budgets)


@engine("SCH-9", needs=GREEDY)
def preempted_equals_undisturbed(door: EngineDoor, seen: Evaluations) -> None:
    """A pool of 64 tokens for four requests of up to 34."""
    tight = [{"block_size": bs, "num_blocks": 64 // bs, "max_model_len": 64} for bs in (4, 16)]
    _under(door, seen, "SCH-9", *tight)


@engine("MOD-2", needs=GREEDY)
def block_size_does_not_matter(door: EngineDoor, seen: Evaluations) -> None:
    """Blocks of 1, 8, 32 and 256 tokens, as far as the engine takes them."""
    sizes = [{"block_size": bs, "num_blocks": 4096 // bs} for bs in (1, 8, 32, 256)]
    _under(door, seen, "MOD-2", *sizes)


@engine("MOD-2", needs=GREEDY)
def seats_do_not_matter(door: EngineDoor, seen: Evaluations) -> None:
    """One, two and three of four requests run at a time."""
    _under(door, seen, "MOD-2", *({"max_num_seqs": n} for n in (1, 2, 3)))


@engine("PFX-12", needs=CACHED)
def warm_equals_cold_equals_off(door: EngineDoor, seen: Evaluations) -> None:
    """The same texts without a cache, with an empty one, and with a full one."""
    bench, alone = _solo(door, seen)
    bench.try_open(block_size=4, num_blocks=1024, prefix_cache=True)
    for label in ("cold", "warm"):
        bench.expect_equal("PFX-12", TEXTS, bench.ask(TEXTS), alone, label)
    with suppress(Unsupported):
        door.reset_prefix_cache()
        bench.expect_equal("PFX-12", TEXTS, bench.ask(TEXTS), alone, "after reset_prefix_cache")


@engine("PFX-15", needs=GREEDY)
def twins_equal_one_asked_twice(door: EngineDoor, seen: Evaluations) -> None:
    """[P, P] is [P] and again [P], whatever of it is cached."""
    bench = EngineBench(door, seen, block_size=4, num_blocks=1024)
    for text in TEXTS[:2]:
        twins = bench.ask([text, text])
        apart = tokens_of([bench.ask_one(text), bench.ask_one(text)])
        bench.expect_equal("PFX-15", [text, text], twins, apart, "twins")


# ---- the prefix cache, as far as results tell of it --------------------------------------------


@engine("PFX-6", "PFX-11", "PFX-12", needs=CACHED)
def engine_b12_whole_prompt_in_the_cache(door: EngineDoor, seen: Evaluations) -> None:
    """bs=4: [1..8] twice, then [1..12]; also behind another request (KV-8)."""
    bench = EngineBench(door, seen)
    if not bench.try_open(block_size=4, num_blocks=64):
        return
    first, second = bench.ask_one(span(1, 8)), bench.ask_one(span(1, 8))
    third = bench.ask_one(span(1, 12))
    if second.num_cached_tokens is not None:
        bench.expect(4 <= second.num_cached_tokens <= 7, "PFX-6", second, "cached: not 4 to 7")
        bench.expect(third.num_cached_tokens == 8, "PFX-11", third, "cached: not 8")
    bench.expect_equal("PFX-12", [span(1, 8)], [second], tokens_of([first]), "warm")
    behind = bench.ask([span(30, 34), span(1, 8)])[1]
    bench.expect_equal("KV-8", [span(1, 8)], [behind], tokens_of([first]), "behind another")


@engine("PFX-13", needs=("greedy", "sampling", "prefix_cache"))
def sampling_does_not_affect_sharing(door: EngineDoor, seen: Evaluations) -> None:
    """What a greedy request left is found at temperature 1, and the reverse."""
    bench = EngineBench(door, seen)
    for first, second in ((0.0, 1.0), (1.0, 0.0)):
        prompt = span(100, 132) if first else span(200, 232)
        bench.ask_one(prompt, temperature=first, max_tokens=1)
        found = bench.ask_one(prompt, temperature=second, max_tokens=1).num_cached_tokens
        if found is not None:
            bench.expect(found == 32, "PFX-13", f"{found} cached tokens, expected 32")


@engine("PFX-12", needs=CACHED)
def engine_b24_outputs_with_caching_on_and_off(door: EngineDoor, seen: Evaluations) -> None:
    """Twelve prompts over four tokens, so that prefixes collide often, in blocks of two."""
    draw = random.Random(24)
    prompts: list[Sequence[int]] = [
        [draw.choice((300, 400, 700, 900)) for _ in range(draw.randint(1, 14))] for _ in range(12)
    ]
    bench = EngineBench(door, seen, prefix_cache=False)
    off = tokens_of(bench.ask(prompts, max_tokens=8))
    if bench.try_open(block_size=2, num_blocks=24, max_num_seqs=5, max_model_len=32):
        for label in ("cold", "warm"):
            outputs = bench.ask(prompts, max_tokens=8)
            bench.expect_equal("PFX-12", prompts, outputs, off, label)


# ---- limits and ends ---------------------------------------------------------------------------


@engine("SCH-7c", needs=("sampling",))
def nonsense_is_refused_and_nothing_is_left(door: EngineDoor, seen: Evaluations) -> None:
    """Ids outside the vocabulary; temperatures that are negative or no number."""
    bench = EngineBench(door, seen)
    prompts: tuple[tuple[Prompt, float], ...] = (
        ([1, 10**6], 0.0),
        ([-1, 5], 0.0),
        ([5], -1.0),
        ([5], float("nan")),
        ([5], float("inf")),
    )
    for prompt, temperature in prompts:
        what = f"prompt {prompt} at temperature {temperature}"
        bench.expect_refused(
            "SCH-7c", what, partial(bench.ask_one, prompt, temperature=temperature)
        )
    good = bench.ask_one([5], max_tokens=3, temperature=1.0)
    bench.expect(len(good.token_ids) == 3, "SCH-7c", good, "after what was refused")


@engine("SCH-7d", "SCH-7a", needs=GREEDY)
def engine_b43_total_length_at_max_model_len(door: EngineDoor, seen: Evaluations) -> None:
    """max_model_len=16: ten tokens get six outputs, 15 get one, 16 and 17 are refused."""
    bench = EngineBench(door, seen)
    if not bench.try_open(max_model_len=16):
        return
    for p, k in ((10, 6), (15, 1)):
        try:
            result = bench.ask_one(span(1, p), max_tokens=100)
        except Refused:  # the other right answer
            result = bench.ask_one(span(1, p), max_tokens=k)
        got = len(result.token_ids), result.finish_reason
        bench.expect(got == (k, "length"), "SCH-7d", f"p={p}: {got}, expected {(k, 'length')}")
    for p in (16, 17):
        ask = partial(bench.ask_one, span(1, p), max_tokens=1)
        bench.expect_refused("SCH-7a", f"a prompt of {p} tokens", ask)


@engine("SCH-9", "SCH-12d", needs=GREEDY)
def engine_b37_preempted_output_is_complete(door: EngineDoor, seen: Evaluations) -> None:
    """bs=4, N=3: the younger of two is preempted with three of its six outputs."""
    bench = EngineBench(door, seen)
    prompts = [50, 51], span(1, 5)
    alone = tokens_of(
        [bench.ask_one(prompts[0], max_tokens=4), bench.ask_one(prompts[1], max_tokens=6)]
    )
    if not bench.try_open(block_size=4, num_blocks=3, max_model_len=12):
        return
    wanted = {"temperature": 0.0, "ignore_eos": True}
    jobs = [request(p, {**wanted, "max_tokens": k}) for p, k in zip(prompts, (4, 6), strict=True)]
    outputs = [samples[0] for samples in bench.submit(jobs)]
    bench.expect_equal("SCH-9", prompts, outputs, alone, "preempted")
    reasons = [output.finish_reason for output in outputs]
    bench.expect(reasons == ["length"] * 2, "SCH-12d", f"ended by {reasons}")


@engine("SCH-13", needs=("greedy", "stream", "abort"))
def abort_in_the_middle_disturbs_nobody(door: EngineDoor, seen: Evaluations) -> None:
    """A stream is left after a piece; what follows is what it was before."""
    bench, alone = _solo(door, seen)
    for pieces in (1, 3):
        job = request(TEXTS[0], {"temperature": 0.0, "max_tokens": 30, "ignore_eos": True})
        found = door.stream(job, pieces)
        bench.expect(len(found) <= pieces + 1, "SCH-13", f"{len(found)} pieces after {pieces}")
        bench.expect_equal("SCH-13", TEXTS, bench.ask(TEXTS), alone, f"after {pieces} pieces")


SCENARIOS = scenarios_of(globals())
