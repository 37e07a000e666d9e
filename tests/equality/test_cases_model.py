"""Cases from public reports that need a model, named after their numbers; O is HF transformers."""

from functools import partial
from itertools import combinations

import pytest
import torch
from subjects import Subject

from nanovllm import LLM, SamplingParams
from nanovllm.engine.scheduler import Scheduler
from nanovllm.outputs import RequestOutput, StepOutput

MODEL = "gqa2-dim32-bias-odd"


@pytest.fixture
def subject(subjects) -> Subject:
    return subjects.get(MODEL)


@pytest.fixture
def engine(subject):
    """Makes engines on the model: `engine(bs, N, **options)`."""
    made = []

    def make(block_size: int, num_blocks: int, **options) -> LLM:
        llm = LLM(
            subject.path,
            skip_tokenizer=True,
            kvcache_block_size=block_size,
            num_kvcache_blocks=num_blocks,
            **options,
        )
        made.append(llm)
        return llm

    yield make
    for llm in made:
        llm.close()


@pytest.fixture
def assert_equals_oracle(subject):
    def check(*outputs: RequestOutput) -> None:
        for output in outputs:
            prompt, tokens = output.prompt_token_ids, output.token_ids
            theirs = subject.oracle.greedy([prompt], len(tokens))
            subject.rule.compare([prompt], [tokens], theirs).require_exercised()

    return check


def greedy(max_tokens: int, **params) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True, **params)


def ask(llm: LLM, prompt: list[int], max_tokens: int) -> RequestOutput:
    return llm.generate([prompt], greedy(max_tokens), use_tqdm=False)[0]


def steps_until_idle(llm: LLM) -> list[StepOutput]:
    steps = []
    while not llm.is_finished():
        steps.append(llm.step())
    return steps


def tokens(first: int, last: int) -> list[int]:
    return list(range(first, last + 1))


@pytest.mark.spec("PFX-6", "PFX-11", "PFX-12", "KV-8")
def test_b12_whole_prompt_in_the_cache(engine, assert_equals_oracle):
    llm = engine(4, 16)
    first, second = (ask(llm, tokens(1, 8), 1) for _ in range(2))
    third = ask(llm, tokens(1, 12), 1)
    assert (first.num_cached_tokens, third.num_cached_tokens) == (0, 8)
    assert 4 <= second.num_cached_tokens <= 7
    assert first.token_ids == second.token_ids
    assert_equals_oracle(first, second, third)


@pytest.mark.spec("PFX-7", "PFX-12")
def test_b14_no_stale_entry_after_reuse(engine, assert_equals_oracle):
    llm = engine(4, 2)
    outputs = []
    for prompt in (tokens(1, 8), tokens(11, 18), tokens(1, 8)):
        outputs.append(ask(llm, prompt, 1))
        assert llm.stats().num_cached_blocks <= 2
    assert outputs[2].num_cached_tokens == 0
    assert_equals_oracle(*outputs)


@pytest.mark.spec("PFX-10", "PFX-12")
def test_b16_cached_count_of_a_failed_admission_is_forgotten(engine, assert_equals_oracle):
    llm = engine(4, 4, max_num_batched_tokens=16, max_num_seqs=4)
    ask(llm, tokens(1, 4), 1)
    assert llm.stats().num_cached_blocks == 1
    llm.add_request(tokens(21, 28), greedy(6))
    before = llm.step()
    waiting = llm.add_request(tokens(1, 16), greedy(1))
    steps = [before, *steps_until_idle(llm)]
    outputs = {output.request_id: output for step in steps for output in step.outputs}
    prefills = [step.num_prefill_tokens for step in steps if step.num_prefill_tokens]
    assert prefills == [8, 16]
    assert outputs[waiting].num_cached_tokens == 0
    assert_equals_oracle(*outputs.values())


def constant_hash(tokens: bytes, parent_hash: bytes) -> bytes:
    return b""


def one_bit_hash(tokens: bytes, parent_hash: bytes) -> bytes:
    return bytes([(sum(tokens) + sum(parent_hash)) % 2])


@pytest.mark.spec("PFX-2", "PFX-12")
@pytest.mark.parametrize("hash_function", [constant_hash, one_bit_hash])
def test_b17_colliding_hashes(hash_function, engine, assert_equals_oracle, monkeypatch):
    colliding = partial(Scheduler, hash_function=hash_function)
    monkeypatch.setattr("nanovllm.engine.llm_engine.Scheduler", colliding)
    llm = engine(4, 64, max_num_seqs=4)
    generator = torch.Generator().manual_seed(0)
    prompts = [torch.randint(2, (12,), generator=generator).tolist() for _ in range(20)]
    for prompt in prompts:
        llm.add_request(prompt, greedy(4))
    outputs, num_shared = [], 0
    while not llm.is_finished():
        outputs += llm.step().outputs
        for a, b in combinations(llm.scheduler.running, 2):
            for block in set(a.block_table) & set(b.block_table):
                end = 4 * (a.block_table.index(block) + 1)
                assert a.token_ids[:end] == b.token_ids[:end]
                num_shared += 1
    assert num_shared
    assert any(output.num_cached_tokens for output in outputs)
    assert_equals_oracle(*outputs)


@pytest.mark.spec("SCH-7a", "SCH-7d")
def test_b31_what_never_fits_the_pool_is_refused(engine, assert_equals_oracle):
    llm = engine(4, 4, max_model_len=64)
    with pytest.raises(ValueError, match=r"20 tokens.* 16 "):
        llm.add_request(tokens(1, 20), greedy(2))
    with pytest.raises(ValueError, match=r"23 slots.* 16 "):
        llm.add_request(tokens(1, 14), greedy(10))
    assert_equals_oracle(ask(llm, tokens(1, 3), 2))
    assert llm.stats().num_requests == 1


@pytest.mark.spec("SCH-8", "SCH-9", "PFX-17")
def test_b37_preempted_output_is_complete_and_counted_once(engine, assert_equals_oracle):
    """The older request takes its second block as the younger one has three outputs."""
    llm = engine(4, 3)
    llm.add_request([50, 51], greedy(4))
    younger = llm.add_request(tokens(1, 5), greedy(6))
    outputs = []
    while not llm.is_finished():
        step = llm.step()
        outputs += step.outputs
        if step.num_preempted:
            assert llm.scheduler.waiting[0].num_completion_tokens == 3
    assert llm.stats().num_preemptions == 1
    assert outputs[1].request_id == younger
    assert outputs[1].num_prompt_tokens == 5
    assert outputs[1].num_completion_tokens == 6
    assert outputs[1].finish_reason == "length"
    assert_equals_oracle(*outputs)


@pytest.mark.spec("SCH-7a", "SCH-7d", "SCH-12b")
def test_b43_total_length_at_max_model_len(engine, assert_equals_oracle):
    llm = engine(4, 64, max_model_len=16)
    for p, k in ((10, 6), (15, 1)):
        output = ask(llm, tokens(1, p), 100)
        assert (output.num_completion_tokens, output.finish_reason) == (k, "length")
        assert_equals_oracle(output)
    for p in (16, 17):
        with pytest.raises(ValueError, match=f"{p} tokens; max_model_len is 16"):
            llm.add_request(tokens(1, p), greedy(100))


@pytest.mark.spec("KV-3", "KV-5")
def test_b51_nan_in_unused_slots(engine, subject):
    outputs = []
    for garbage in (0.0, float("nan")):
        llm = engine(4, 64)
        llm.model_runner.kv_cache.fill_(garbage)
        prompts = [tokens(1, 1), tokens(1, 3), tokens(11, 14), tokens(21, 25)]
        outputs.append(llm.generate(prompts, greedy(8, logprobs=0), use_tqdm=False))
    for zeros, nans in zip(*outputs, strict=True):
        assert (nans.finish_reason, nans.token_ids) == ("length", zeros.token_ids)
        assert nans.logprobs == zeros.logprobs


@pytest.mark.spec("KV-5", "SCH-14")
@pytest.mark.parametrize("chunk", [1, 3, 5, 12])
def test_b55_chunks_attend_to_what_is_written(chunk, engine, subject, monkeypatch):
    llm = engine(4, 64, max_num_batched_tokens=chunk, max_num_seqs=1)
    llm.model_runner.kv_cache.fill_(float("nan"))
    compute_logits, seen = llm.model_runner.compute_logits, []

    def record(inputs):
        seen.append(compute_logits(inputs))
        return seen[-1]

    monkeypatch.setattr(llm.model_runner, "compute_logits", record)
    ask(llm, tokens(1, 12), 1)
    assert [len(logits) for logits in seen] == [0] * (-(-12 // chunk) - 1) + [1]
    expected = subject.oracle.logits(tokens(1, 12))[-1:]
    torch.testing.assert_close(seen[-1], expected, atol=1e-4, rtol=0)
