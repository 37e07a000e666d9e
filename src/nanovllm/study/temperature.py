"""Temperature: requests that sample differently share the KV of what they have in common."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory
from typing import Any

from nanovllm.conformance.log import check_log
from nanovllm.conformance.protocol import World
from nanovllm.conformance.verdicts import Outcome
from nanovllm.llm import LLM
from nanovllm.outputs import RequestOutput
from nanovllm.sampling_params import SamplingParams
from nanovllm.study.findings import Findings, Table, checked
from nanovllm.study.lab import Run, run
from nanovllm.study.workloads import singles, text

TEMPERATURES = (0.0, 0.3, 0.7, 1.0, 1.5)
PROMPT = (
    "And it came to pass in those days, that there went out a decree from the king, and all the "
    "people were gathered together in one place. And they said one to another, What shall we do? "
    "for the waters are come in unto us, and there is none to help. And an old man answered them, "
)


@dataclass(frozen=True, slots=True)
class Measured:
    """One temperature.

    Attributes:
        cold, warm: prompt tokens found in the cache by the request alone in an empty engine, and
            by the same request behind one of another temperature, in one batch with all others.
        same_tokens: whether both gave the same completion.
        as_greedy: leading tokens of the completion that are those of temperature 0.
        next_turn: tokens found by a greedy request that continues this completion.
    """

    temperature: float
    prompt: int
    cold: int
    warm: int
    same_tokens: bool
    as_greedy: int
    completion: int
    next_turn: int


def params_of(temperature: float, max_tokens: int) -> SamplingParams:
    return SamplingParams(
        temperature=temperature, top_p=0.95, seed=11, max_tokens=max_tokens, ignore_eos=True
    )


def measure(
    temperatures: Sequence[float] = TEMPERATURES, max_tokens: int = 48
) -> tuple[list[Measured], int]:
    """On the embedded model; and the number of checks that the engine's own log passed."""
    with TemporaryDirectory() as folder:
        log = Path(folder) / "trace.jsonl"
        with LLM(device="cpu", trace=log, max_num_seqs=16) as llm:
            lines = _measure(llm, temperatures, max_tokens)
        verdicts = check_log(log.read_text(encoding="utf-8").splitlines())
    failed = [v for v in verdicts if v.outcome in (Outcome.FAIL, Outcome.ERROR)]
    assert not failed, failed
    return lines, sum(verdict.evaluations for verdict in verdicts)


def _measure(llm: LLM, temperatures: Sequence[float], max_tokens: int) -> list[Measured]:
    def ask(prompts: list[Any], params: list[SamplingParams]) -> list[RequestOutput]:
        return llm.generate(prompts, params, use_tqdm=False)

    params = [params_of(t, max_tokens) for t in temperatures]
    cold: list[RequestOutput] = []
    for each in params:
        llm.reset_prefix_cache()
        cold += ask([PROMPT], [each])
    llm.reset_prefix_cache()
    ask([PROMPT], [params_of(2.0, 1)])
    warm = ask([PROMPT] * len(params), params)
    said = [list(output.prompt_token_ids) + list(output.token_ids) for output in warm]
    turns = ask([[*tokens, 5] for tokens in said], [params_of(0.0, 1)] * len(said))
    greedy = cold[0].token_ids
    return [
        Measured(
            temperature=temperature,
            prompt=len(a.prompt_token_ids),
            cold=a.num_cached_tokens,
            warm=b.num_cached_tokens,
            same_tokens=a.token_ids == b.token_ids,
            as_greedy=num_common(a.token_ids, greedy),
            completion=len(a.token_ids),
            next_turn=turn.num_cached_tokens,
        )
        for temperature, a, b, turn in zip(temperatures, cold, warm, turns, strict=True)
    ]


def num_common(a: Sequence[int], b: Sequence[int]) -> int:
    pairs = list(zip(a, b, strict=False))
    return next((i for i, (x, y) in enumerate(pairs) if x != y), len(pairs))


def same_plans(num_requests: int = 24, length: int = 100) -> tuple[Run, Run]:
    """At the core door: one prompt, first drawn from with one seed, then with a seed each."""
    prompt = text(Random(0), length)
    talks = singles([(prompt, 24)] * num_requests, every=1)
    world = World(16, 256, max_num_seqs=16, max_num_batched_tokens=512, max_model_len=256)
    return run(world, talks, seed_of=lambda _: 0), run(world, talks)


def study() -> Findings:
    alike, apart = same_plans()
    equal = [a.rows for a in alike.steps] == [b.rows for b in apart.steps]
    outputs = {tuple(entry.completion) for entry in apart.entries}
    lines, num_checks = measure()
    runs = [run.evaluations.total() for run in (alike, apart)]
    return Findings(
        tables=(table(lines),),
        remarks=(
            f"At the core door, {len(apart.entries)} requests with one prompt and "
            f"{len(outputs)} different outputs: the plans are "
            f"{'' if equal else 'not '}those of as many requests that draw alike, row for row and "
            f"block for block.",
            checked([num_checks, *runs]),
        ),
        draw=lambda figure: draw(figure, lines),
    )


def table(lines: Sequence[Measured]) -> Table:
    columns = (
        "temperature",
        "found alone",
        "found behind temperature 2",
        "same tokens",
        "as greedy",
        "found by the next turn",
    )
    cells = [
        (
            f"{line.temperature:g}",
            str(line.cold),
            f"{line.warm} of {line.prompt}",
            "yes" if line.same_tokens else "no",
            f"{line.as_greedy} of {line.completion}",
            f"{line.next_turn} of {line.prompt + line.completion + 1}",
        )
        for line in lines
    ]
    return Table("Embedded model, one prompt, blocks of 16", columns, cells)


def draw(figure: Any, lines: Sequence[Measured]) -> None:
    axes = figure.subplots()
    names = [f"temperature {line.temperature:g}" for line in lines]
    parts = {
        "prompt, found in the cache": ([line.warm for line in lines], "C0"),
        "prompt, computed": ([line.prompt - line.warm for line in lines], "C9"),
        "output, as greedy": ([line.as_greedy for line in lines], "C2"),
        "output, different": ([line.completion - line.as_greedy for line in lines], "C3"),
    }
    left = [0] * len(lines)
    for label, (widths, colour) in parts.items():
        axes.barh(names, widths, left=left, color=colour, label=label)
        left = [a + b for a, b in zip(left, widths, strict=True)]
    axes.invert_yaxis()
    axes.set(xlabel="tokens", title="one prompt at five temperatures")
    axes.grid(visible=False, axis="y")
    figure.legend(loc="outside right upper")
