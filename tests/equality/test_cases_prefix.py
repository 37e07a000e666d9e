"""Case B24: outputs do not depend on what the prefix cache holds. Generated with Hypothesis."""

import os
from dataclasses import dataclass

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from subjects import Subject

from nanovllm import LLM, SamplingParams
from nanovllm.outputs import RequestOutput

MODEL = "gqa2-dim32-bias-odd"
DEEP = os.environ.get("NANOVLLM_PROFILE") == "deep"
MAX_TOKENS = 6
NUM_PRINTABLE = 94  # ids below it are one printable character each


@dataclass(frozen=True)
class Job:
    """A prompt, the step at which it arrives, and how it ends if not by its length."""

    prompt: list[int]
    arrival: int
    stops: bool
    abort_after: int | None

    def stop_string(self, llm: LLM, reference: list[int]) -> tuple[str, ...]:
        """A character that the output will contain, beyond its first token."""
        printable = [token for token in reference[1:] if token < NUM_PRINTABLE]
        return (llm.tokenizer.decode(printable[:1]),) if self.stops and printable else ()


jobs = st.builds(
    Job,
    prompt=st.lists(st.sampled_from([3, 40, 77, 150]), min_size=1, max_size=14),
    arrival=st.integers(0, 8),
    stops=st.booleans(),
    abort_after=st.none() | st.integers(1, 5),
)


def run(llm: LLM, todo: list[Job], references: list[list[int]]) -> list[RequestOutput]:
    """Outputs in order of the jobs; each is added at its step, and aborted some steps later."""
    ids: dict[int, int] = {}
    outputs: dict[int, RequestOutput] = {}
    step = 0
    while len(outputs) < len(todo):
        for i, job in enumerate(todo):
            if job.arrival == step:
                stop = job.stop_string(llm, references[i])
                params = SamplingParams(
                    temperature=0.0, max_tokens=MAX_TOKENS, ignore_eos=True, stop=stop, logprobs=0
                )
                ids[i] = llm.add_request(job.prompt, params)
            elif job.abort_after is not None and step == job.arrival + job.abort_after:
                llm.abort_request(ids[i])
        outputs |= {output.request_id: output for output in llm.step().outputs}
        step += 1
    return [outputs[ids[i]] for i in range(len(todo))]


def expected(output: RequestOutput, job: Job, llm: LLM, reference: list[int]) -> list[int]:
    """The oracle's tokens up to where the job's end cuts them."""
    if output.finish_reason == "abort":
        return reference[: len(output.token_ids)]
    stop = job.stop_string(llm, reference)
    if not stop:
        return reference
    return reference[: [llm.tokenizer.decode([token]) for token in reference].index(*stop) + 1]


def judge(
    llm: LLM,
    subject: Subject,
    todo: list[Job],
    references: list[list[int]],
    outputs: list[RequestOutput],
) -> None:
    ours = [output.token_ids for output in outputs]
    theirs = [
        expected(output, job, llm, reference)
        for output, job, reference in zip(outputs, todo, references, strict=True)
    ]
    found = subject.rule.compare([job.prompt for job in todo], ours, theirs)
    if found.planned:
        found.require_exercised()
    for output, job, reference in zip(outputs, todo, references, strict=True):
        stops = bool(job.stop_string(llm, reference))
        assert output.finish_reason in ("abort", "stop" if stops else "length")
        assert output.finish_reason != "abort" or job.abort_after


@pytest.mark.spec("PFX-12", "PFX-4", "SCH-13", "STP-3a")
@settings(
    max_examples=300 if DEEP else 15,
    derandomize=not DEEP,
    deadline=None,
    database=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(
    todo=st.lists(jobs, min_size=1, max_size=12),
    block_size=st.sampled_from([1, 2, 4]),
    slots=st.sampled_from([20, 48, 256]),
    budget=st.sampled_from([5, 64]),
)
def test_b24_outputs_with_caching_on_and_off(subjects, todo, block_size, slots, budget):
    subject = subjects.get(MODEL)
    references = subject.oracle.greedy([job.prompt for job in todo], MAX_TOKENS)
    logprobs = []
    for caching in (False, True):
        with LLM(
            subject.path,
            kvcache_block_size=block_size,
            num_kvcache_blocks=slots // block_size,
            max_num_batched_tokens=budget,
            max_num_seqs=5,
            enable_prefix_caching=caching,
        ) as llm:
            for _ in range(2 if caching else 1):
                outputs = run(llm, todo, references)
                judge(llm, subject, todo, references, outputs)
                logprobs.append(outputs)
    for cold, *warm in zip(*logprobs, strict=True):
        for other in warm:
            assert_logprobs_equal(cold, other)


def assert_logprobs_equal(a: RequestOutput, b: RequestOutput) -> None:
    """As far as the tokens agree: an abort may end either one earlier."""
    for (left, *_), (right, *_) in zip(a.logprobs, b.logprobs, strict=False):
        if left[0] != right[0]:
            return
        assert abs(left[1] - right[1]) <= 1e-4
