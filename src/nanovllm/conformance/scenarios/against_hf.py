"""The engine door against HF transformers: tokens, log probabilities, distributions, penalties."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from functools import partial
from typing import Any

from nanovllm.conformance.protocol import EngineDoor
from nanovllm.conformance.scenarios.engine_driver import TEXTS, EngineBench, request
from nanovllm.conformance.scenarios.scenario import scenario, scenarios_of
from nanovllm.conformance.scenarios.track import span
from nanovllm.conformance.verdicts import Evaluations

engine = partial(scenario, door="engine")

NUM_DRAWS = 1500
Z_OF_ALPHA = 4.75
"""Normal quantile of 1 - 1e-6: chi-square tests convict a right engine once in a million runs."""
ERROR = 1e-4
"""Probabilities that are so close are not told apart."""


@engine("MOD-1", needs=("greedy",))
def greedy_tokens_equal_those_of_hf(door: EngineDoor, seen: Evaluations) -> None:
    """Four texts, 32 tokens each, by rule R1."""
    bench = EngineBench(door, seen)
    outputs = bench.ask(TEXTS, max_tokens=32)
    theirs = [bench.oracle.greedy(bench.oracle.encode(text), 32) for text in TEXTS]
    bench.expect_equal("MOD-1", TEXTS, outputs, theirs, "against HF transformers")


@engine("SMP-6", needs=("logprobs", "sampling"))
def logprobs_are_those_of_the_raw_logits(door: EngineDoor, seen: Evaluations) -> None:
    """Of the token drawn and of the five best, at temperatures 0.5 and 1.5, within 1e-4."""
    bench = EngineBench(door, seen)
    for temperature in (0.5, 1.5):
        found = bench.ask_one(TEXTS[0], temperature=temperature, max_tokens=6, logprobs=5)
        prefix = bench.oracle.encode(TEXTS[0])
        bench.expect(found.logprobs, "SMP-6", "no logprobs are given")
        for token, entries in zip(found.token_ids, found.logprobs or (), strict=True):
            expected = bench.oracle.log_probs(prefix)
            bench.expect(entries[0][0] == token, "SMP-6", entries, "begin not with", token)
            bench.expect(len(entries) >= 5, "SMP-6", len(entries), "entries, asked for 5")
            for other, value in entries:
                error = abs(value - float(expected[other]))
                bench.expect(error <= 1e-4, "SMP-6", f"token {other}: {value}, off by {error:.1e}")
            prefix.append(token)


@engine("SMP-7", needs=("greedy", "penalties"))
def penalties_change_the_logits_as_stated(door: EngineDoor, seen: Evaluations) -> None:
    """Each alone and all together: greedy is the largest of the oracle's penalised logits."""
    bench = EngineBench(door, seen)
    for params in (
        {"repetition_penalty": 1.5},
        {"presence_penalty": 1.5},
        {"frequency_penalty": 1.0},
        {"repetition_penalty": 1.2, "presence_penalty": 0.5, "frequency_penalty": 0.5},
    ):
        _expect_penalised(bench, TEXTS[0], params)


def _expect_penalised(bench: EngineBench, text: str, params: dict[str, float]) -> None:
    found = bench.ask_one(text, **params)
    prompt = bench.oracle.encode(text)
    output: list[int] = []
    for token in found.token_ids:
        raw = bench.oracle.logits([*prompt, *output])[-1].tolist()
        logits = _penalised(raw, prompt, output, params)
        best = max(range(len(logits)), key=logits.__getitem__)
        gap = logits[best] - logits[token]
        message = f"{params}: {token} after {output}, {gap:.1e} below the best, {best}"
        bench.expect(gap <= ERROR, "SMP-7", message)
        output.append(token)


def _penalised(
    logits: list[float], prompt: Sequence[int], output: Sequence[int], params: dict[str, float]
) -> list[float]:
    """Repetition over prompt and output, then presence and frequency over the output."""
    factor = params.get("repetition_penalty", 1.0)
    for token in {*prompt, *output}:
        logits[token] *= 1 / factor if logits[token] > 0 else factor
    for token, count in Counter(output).items():
        logits[token] -= params.get("presence_penalty", 0.0)
        logits[token] -= params.get("frequency_penalty", 0.0) * count
    return logits


# ---- distributions -----------------------------------------------------------------------------


def _draws(bench: EngineBench, prompt: Sequence[int], num: int, **params: Any) -> Counter[int]:
    """First tokens of `num` requests; with seeds of their own where the engine takes them."""
    params = {"max_tokens": 1, "ignore_eos": True, **params}
    seeded = "seed" in bench.door.hello().capabilities
    jobs = [request(prompt, {**params, "seed": i} if seeded else params) for i in range(num)]
    return Counter(samples[0].token_ids[0] for samples in bench.submit(jobs))


def _probabilities(bench: EngineBench, prompt: Sequence[int], temperature: float) -> list[float]:
    logits = bench.oracle.logits(prompt)[-1]
    return [float(p) for p in (logits / temperature).softmax(-1)]


@engine("SMP-2", needs=("sampling",))
def draws_follow_the_softmax(door: EngineDoor, seen: Evaluations) -> None:
    """Chi-square of 1,500 first tokens at temperatures 1 and 0.6."""
    bench = EngineBench(door, seen)
    prompt = bench.oracle.encode(TEXTS[-1])
    for temperature in (1.0, 0.6):
        counts = _draws(bench, prompt, NUM_DRAWS, temperature=temperature)
        probabilities = _probabilities(bench, prompt, temperature)
        statistic, bound = _chi_square(counts, probabilities)
        label = f"temperature {temperature}: chi-square {statistic:.0f}, at most {bound:.0f}"
        bench.expect(statistic <= bound, "SMP-2", label)


def _chi_square(counts: Counter[int], probabilities: Sequence[float]) -> tuple[float, float]:
    """The statistic, and its quantile (Wilson-Hilferty); rare tokens make one class."""
    total = counts.total()
    common = [token for token, p in enumerate(probabilities) if p * total >= 10]
    expected = [probabilities[token] * total for token in common]
    observed = [counts[token] for token in common]
    expected.append(total - sum(expected))
    observed.append(total - sum(observed))
    statistic = sum((o - e) ** 2 / max(e, 1.0) for o, e in zip(observed, expected, strict=True))
    freedom = len(common)
    width = 2 / (9 * freedom)
    return statistic, freedom * (1 - width + Z_OF_ALPHA * width**0.5) ** 3


def _expect_support(
    bench: EngineBench,
    spec_id: str,
    counts: Counter[int],
    kept: Collection[int],
    allowed: Collection[int],
    probabilities: Sequence[float],
) -> None:
    """Draws lie in `allowed`, and no likely one of `kept` is missing."""
    outside = sorted(set(counts) - set(allowed))
    bench.expect(not outside, spec_id, f"drawn: {outside}, which the filter leaves out")
    share = sum(probabilities[token] for token in allowed)
    likely = [t for t in kept if counts.total() * probabilities[t] / share >= 20]
    missing = [token for token in likely if token not in counts]
    bench.expect(not missing, spec_id, f"never drawn: {missing}, which the filter keeps")


@engine("SMP-7", needs=("penalties", "sampling"))
def repetition_makes_negative_logits_smaller(door: EngineDoor, seen: Evaluations) -> None:
    """Divided, they would become likelier: of 256 seen tokens, those of negative logits are out."""
    bench = EngineBench(door, seen)
    prompt = span(300, 555)
    logits = bench.oracle.logits(prompt)[-1].tolist()
    banned = {token for token in prompt if logits[token] < -1}
    counts = _draws(bench, prompt, 400, temperature=30.0, repetition_penalty=1000.0)
    drawn = sorted(banned & set(counts))
    bench.expect(not drawn, "SMP-7", f"drawn: {drawn}, whose logits are far below zero")


HOT = 1.5
"""Temperature of the draws below; it comes before the filters."""


def _ranked(bench: EngineBench) -> tuple[list[int], list[float], list[int]]:
    """A prompt, the probabilities after it, and the tokens from the most probable on."""
    prompt = bench.oracle.encode(TEXTS[-1])
    probabilities = _probabilities(bench, prompt, HOT)
    order = sorted(range(len(probabilities)), key=lambda token: -probabilities[token])
    return prompt, probabilities, order


@engine("SMP-3a", needs=("sampling", "top_k"))
def top_k_keeps_the_k_best(door: EngineDoor, seen: Evaluations) -> None:
    """k = 4, and whatever ties with the fourth."""
    bench = EngineBench(door, seen)
    prompt, p, order = _ranked(bench)
    counts = _draws(bench, prompt, 400, temperature=HOT, top_k=4)
    allowed = [token for token in order if p[token] >= p[order[3]] - ERROR]
    _expect_support(bench, "SMP-3a", counts, order[:4], allowed, p)


@engine("SMP-3b", needs=("sampling", "top_p"))
def top_p_keeps_the_smallest_set_that_reaches_it(door: EngineDoor, seen: Evaluations) -> None:
    """p lies in the midst of the third token, which crosses it and is kept."""
    bench = EngineBench(door, seen)
    prompt, p, order = _ranked(bench)
    top_p = p[order[0]] + p[order[1]] + p[order[2]] / 2
    counts = _draws(bench, prompt, 400, temperature=HOT, top_p=top_p)
    allowed = [token for token in order if p[token] >= p[order[2]] - ERROR]
    _expect_support(bench, "SMP-3b", counts, order[:3], allowed, p)


@engine("SMP-3c", needs=("sampling", "min_p"))
def min_p_keeps_what_is_so_probable(door: EngineDoor, seen: Evaluations) -> None:
    """A third of the best one's probability."""
    bench = EngineBench(door, seen)
    prompt, p, order = _ranked(bench)
    counts = _draws(bench, prompt, 400, temperature=HOT, min_p=1 / 3)
    least = p[order[0]] / 3
    kept, allowed = ([t for t in order if p[t] >= least + error] for error in (ERROR, -ERROR))
    _expect_support(bench, "SMP-3c", counts, kept, allowed, p)


SCENARIOS = scenarios_of(globals())
