"""The public class: what goes in, what comes out, what is refused (API-1..8)."""

import io
from itertools import chain
from pathlib import Path

import numpy as np
import pytest

import nanovllm
from nanovllm import LLM, SamplingParams

GREEDY = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)


@pytest.fixture
def llm(checkpoint: Path):
    with LLM(checkpoint, kvcache_block_size=4, num_kvcache_blocks=64, max_num_seqs=8) as engine:
        yield engine


def generate(llm: LLM, *args, **kwargs):
    return llm.generate(*args, use_tqdm=False, **kwargs)


@pytest.mark.spec("API-1", "API-2")
def test_text_and_ids_one_and_many_give_the_same(llm: LLM) -> None:
    ids = llm.encode("hello")
    one_text = generate(llm, "hello", GREEDY)
    one_ids = generate(llm, ids, GREEDY)
    mixed = generate(llm, ["hello", ids, tuple(ids), np.array(ids).tolist()], GREEDY)
    outputs = [*one_text, *one_ids, *mixed]
    assert len(one_text) == len(one_ids) == 1
    assert {tuple(output.token_ids) for output in outputs} == {tuple(outputs[0].token_ids)}
    assert [output.prompt for output in mixed] == ["hello", None, None, None]
    assert all(output.prompt_token_ids == ids for output in outputs)


@pytest.mark.spec("API-1")
def test_params_are_one_for_all_or_one_each(llm: LLM) -> None:
    prompts = ["a", "b", "c"]
    each = [SamplingParams(temperature=0, max_tokens=k, ignore_eos=True) for k in (1, 2, 3)]
    assert [len(o.token_ids) for o in generate(llm, prompts, each)] == [1, 2, 3]
    assert [len(o.token_ids) for o in generate(llm, prompts, GREEDY)] == [6, 6, 6]
    with pytest.raises(ValueError, match="3 prompts but 2 sampling_params"):
        generate(llm, prompts, each[:2])


@pytest.mark.spec("API-2")
def test_results_in_input_order_with_counts(checkpoint: Path) -> None:
    llm = LLM(checkpoint, kvcache_block_size=4)
    prompts = [[i + 1] * (3 * i + 1) for i in range(12)]
    params = [SamplingParams(temperature=0, max_tokens=12 - i, ignore_eos=True) for i in range(12)]
    outputs = generate(llm, prompts, params)
    for i, output in enumerate(outputs):
        assert output.prompt_token_ids == prompts[i]
        assert output.num_prompt_tokens == 3 * i + 1
        assert output.num_completion_tokens == len(output.token_ids) == 12 - i
        assert output.finish_reason == "length"
        assert output.text == llm.tokenizer.decode(output.token_ids, skip_special_tokens=True)
    again = generate(llm, prompts, params)
    assert [o.num_cached_tokens for o in again] == [(len(p) - 1) // 4 * 4 for p in prompts]


@pytest.mark.spec("API-1")
def test_no_prompts_no_results(llm: LLM) -> None:
    assert generate(llm, [], GREEDY) == []


@pytest.mark.spec("API-4")
def test_requests_of_others_are_not_mixed_in_and_not_lost(llm: LLM) -> None:
    mine = [llm.add_request(text, GREEDY) for text in ("one", "two")]
    results = generate(llm, ["three", "four"], GREEDY)
    assert [r.prompt for r in results] == ["three", "four"]
    assert not llm.is_finished()
    delivered = {}
    while not llm.is_finished():
        delivered |= {output.request_id: output for output in llm.step().outputs}
    assert sorted(delivered) == mine
    assert [delivered[i].prompt for i in mine] == ["one", "two"]


@pytest.mark.spec("API-4", "MEM-3")
def test_closed_engine_refuses_and_a_second_one_works(checkpoint: Path) -> None:
    with LLM(checkpoint) as first, LLM(checkpoint, kvcache_block_size=1) as second:
        expected = generate(first, "hello", GREEDY)[0].token_ids
        assert generate(second, "hello", GREEDY)[0].token_ids == expected
    first.exit()
    for call in (
        first.step,
        first.stats,
        first.reset_prefix_cache,
        lambda: generate(first, "x", GREEDY),
        lambda: generate(first, []),
        lambda: first.add_request("x"),
        lambda: first.abort_request(0),
        lambda: next(first.stream("x")),
        first.is_finished,
        first.__enter__,
    ):
        with pytest.raises(RuntimeError, match="closed"):
            call()


@pytest.mark.spec("API-6", "SCH-7a", "SCH-7c")
def test_one_bad_prompt_adds_none_and_all_bad_ones_are_named(llm: LLM) -> None:
    prompts = ["fine", [], [1, 300], "x" * 600, "fine too", [-1], [1.5]]
    with pytest.raises(ValueError) as raised:
        generate(llm, prompts, GREEDY)
    message = str(raised.value)
    assert [f"prompt {i}:" in message for i in range(7)] == [
        False, True, True, True, False, True, True,
    ]  # fmt: skip
    assert "600" in message
    assert "300" in message
    assert llm.is_finished()
    assert llm.stats().num_requests == 0
    assert len(generate(llm, prompts[0], GREEDY)[0].token_ids) == 6


@pytest.mark.spec("SCH-7a", "SCH-7b", "SCH-7c")
@pytest.mark.parametrize(
    ("prompt", "options", "words"),
    [
        ([], {}, ["empty"]),
        ([1] * 512, {}, ["512", "max_model_len"]),
        ([1] * 257, {}, ["257", "256", "64 blocks of 4"]),
        ([1] * 200, {"max_tokens": 58}, ["200", "58", "256"]),
        ([300], {}, ["300", "vocabulary"]),
        ("a\ud800b", {}, ["surrogate"]),
    ],
)
def test_what_can_never_run_is_refused_with_its_numbers(llm, prompt, options, words) -> None:
    running = llm.add_request("hello", GREEDY)
    with pytest.raises(ValueError) as raised:
        llm.add_request(prompt, SamplingParams(**options))
    assert all(word in str(raised.value) for word in words)
    outputs = []
    while not llm.is_finished():
        outputs += llm.step().outputs
    assert [o.request_id for o in outputs] == [running]
    assert llm.stats().num_free_blocks == 64


@pytest.mark.spec("SCH-7c", "SCH-15")
@pytest.mark.parametrize(
    "options",
    [
        {"top_k": 2**63},
        {"logprobs": 10**20},
        {"seed": 2**64},
        {"n": 10**9},
        {"min_tokens": 10**20, "max_tokens": None},
        {"stop_token_ids": [300], "min_tokens": 3},
        {"stop_token_ids": [-1]},
    ],
)
def test_parameters_that_would_break_a_step_are_refused(llm: LLM, options: dict) -> None:
    """A step that raises takes its batch with it, so nothing that raises may get into one."""
    with pytest.raises(ValueError):
        llm.add_request("hello", SamplingParams(**options))


@pytest.mark.spec("API-1")
def test_what_is_no_prompt_is_a_type_error(llm: LLM) -> None:
    for prompts in ({"prompt": "x"}, b"abc", 7, None):
        with pytest.raises(TypeError, match="prompts must be"):
            generate(llm, prompts, GREEDY)
    for prompt in ([1, [2]], [True], [1.5], [None]):
        with pytest.raises(ValueError, match="token ids must be integers"):
            generate(llm, [prompt], GREEDY)
    with pytest.raises(ValueError, match="prompt 1: a prompt is text or token ids"):
        generate(llm, ["fine", b"abc"], GREEDY)


@pytest.mark.spec("API-1")
def test_arrays_are_token_ids(llm: LLM) -> None:
    (expected,) = generate(llm, [5, 6, 7], GREEDY)
    array = np.array([5, 6, 7])
    for prompts in (array, [array], array[None], (5, 6, 7), [(5, 6, 7)], iter([5, 6, 7])):
        assert [o.token_ids for o in generate(llm, prompts, GREEDY)] == [expected.token_ids]


@pytest.mark.spec("PFX-14", "SCH-15")
def test_a_bad_salt_is_refused(llm: LLM) -> None:
    with pytest.raises(TypeError, match="cache_salt"):
        llm.add_request([1] * 9, GREEDY, cache_salt=5)
    with pytest.raises(ValueError, match="surrogate"):
        llm.add_request([1] * 9, GREEDY, cache_salt="\ud800")
    assert llm.is_finished()


@pytest.mark.spec("API-5", "SCH-9")
def test_a_recomputation_is_prefill_in_every_count(checkpoint: Path) -> None:
    options = {"num_kvcache_blocks": 12, "kvcache_block_size": 4, "max_num_batched_tokens": 16}
    with LLM(checkpoint, max_num_seqs=8, **options) as llm:
        params = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True)
        for i in range(6):
            llm.add_request([5 + i, 6, 7], params)
        steps = []
        while not llm.is_finished():
            steps.append(llm.step())
        assert llm.stats().num_preemptions
    for step in steps:
        decodes, prefills = step.num_decode_tokens, step.num_prefill_tokens
        assert step.kind == (
            "mixed" if decodes and prefills else "decode" if decodes else "prefill"
        )
        assert decodes <= step.num_rows


@pytest.mark.spec("SCH-7d", "API-7")
def test_max_tokens_none_means_to_the_end(checkpoint: Path) -> None:
    endless = SamplingParams(temperature=0, max_tokens=None, ignore_eos=True)
    with LLM(checkpoint, max_model_len=20) as llm:
        assert len(generate(llm, [1] * 5, endless)[0].token_ids) == 15
    with LLM(checkpoint, kvcache_block_size=4, num_kvcache_blocks=3) as llm:
        assert len(generate(llm, [1] * 5, endless)[0].token_ids) == 8


@pytest.mark.spec("API-5")
def test_steps_say_what_they_did(checkpoint: Path) -> None:
    with LLM(checkpoint, max_num_batched_tokens=8, max_num_seqs=2) as llm:
        llm.add_request([1] * 10, GREEDY)
        llm.add_request([2] * 3, GREEDY)
        first, second, third = llm.step(), llm.step(), llm.step()
        assert (first.kind, first.num_rows, first.num_prefill_tokens) == ("prefill", 1, 8)
        assert (second.kind, second.num_rows, second.num_prefill_tokens) == ("prefill", 2, 5)
        assert (third.kind, third.num_rows, third.num_decode_tokens) == ("decode", 2, 2)
        assert (third.num_prefill_tokens, third.num_tokens, third.outputs) == (0, 2, ())
        while not llm.is_finished():
            llm.step()
        assert llm.step().kind == "idle"


@pytest.mark.spec("API-5")
def test_a_mixed_step_says_so(checkpoint: Path) -> None:
    with LLM(checkpoint, scheduling_policy="mixed") as llm:
        llm.add_request([1] * 3, GREEDY)
        llm.step()
        llm.add_request([2] * 5, GREEDY)
        step = llm.step()
        assert (step.kind, step.num_prefill_tokens, step.num_decode_tokens) == ("mixed", 5, 1)


@pytest.mark.spec("API-7")
def test_nano_vllm_calls_work_unchanged(checkpoint: Path) -> None:
    """The calls of nano-vllm's example and benchmark, with this checkpoint's path."""
    llm = LLM(str(checkpoint), enforce_eager=True, tensor_parallel_size=1, max_model_len=4096)
    sampling_params = SamplingParams(temperature=0.6, max_tokens=16)
    outputs = llm.generate(["introduce yourself", "list primes"], sampling_params, use_tqdm=False)
    for output in outputs:
        assert isinstance(output["text"], str)
        assert len(output["token_ids"]) <= 16
    with pytest.raises(KeyError):
        outputs[0]["nonsense"]

    llm.generate(["Benchmark: "], SamplingParams(), use_tqdm=False)
    prompt_token_ids = [[i, 2, 3] for i in range(4)]
    params = [SamplingParams(temperature=0.6, ignore_eos=True, max_tokens=4 + i) for i in range(4)]
    llm.generate(prompt_token_ids, params, use_tqdm=False)

    llm.add_request("step by step", SamplingParams(temperature=0.6, ignore_eos=True, max_tokens=3))
    seen, counts = {}, []
    while not llm.is_finished():
        output, num_tokens = llm.step()
        counts.append(num_tokens)
        seen |= dict(output)
    assert counts == [12, -1, -1]
    assert [len(token_ids) for token_ids in seen.values()] == [3]
    llm.exit()


@pytest.mark.spec("API-8", "PFX-17")
def test_reset_prefix_cache_and_stats(llm: LLM) -> None:
    prompt = list(range(1, 14))
    cached = [generate(llm, prompt, GREEDY)[0].num_cached_tokens for _ in range(2)]
    llm.reset_prefix_cache()
    cached += [generate(llm, prompt, GREEDY)[0].num_cached_tokens]
    assert cached == [0, 12, 0]
    stats = llm.stats()
    assert (stats.num_lookup_tokens, stats.num_cached_tokens) == (39, 12)
    assert stats.prefix_hit_share == pytest.approx(12 / 39)
    assert (stats.num_requests, stats.num_waiting, stats.num_running) == (3, 0, 0)
    assert stats.num_free_blocks == stats.num_blocks == 64
    assert stats.as_dict()["num_cached_tokens"] == 12


@pytest.mark.spec("PFX-14")
def test_salts_do_not_share(llm: LLM) -> None:
    prompt = list(range(1, 14))
    cached = []
    for salt in (None, "a", "b", "a", None):
        llm.add_request(prompt, GREEDY, cache_salt=salt)
        while not llm.is_finished():
            cached += [output.num_cached_tokens for output in llm.step().outputs]
    assert cached == [0, 0, 0, 12, 12]


@pytest.mark.spec("FRK-1", "FRK-2", "FRK-3")
@pytest.mark.parametrize("caching", [True, False])
def test_n_samples_equal_n_requests_with_derived_seeds(checkpoint: Path, caching: bool) -> None:
    params = SamplingParams(temperature=1.0, max_tokens=8, ignore_eos=True, seed=3, n=5)
    prompt = list(range(1, 15))
    options = {"kvcache_block_size": 4, "max_num_seqs": 3, "enable_prefix_caching": caching}
    with LLM(checkpoint, **options) as llm:
        (grouped,) = generate(llm, prompt, params)
        # The prompt once, the last three quarters of a block by each of the other four.
        assert llm.stats().num_computed_tokens == 14 + 4 * 2 + 5 * 7
        alone = [generate(llm, prompt, params.derive(i))[0].token_ids for i in range(5)]
    assert [sample.token_ids for sample in grouped.samples] == alone
    assert len({tuple(token_ids) for token_ids in alone}) > 1
    assert grouped.num_completion_tokens == 40


@pytest.mark.spec("SMP-4")
def test_unseeded_requests_differ_and_an_engine_seed_repeats_them(checkpoint: Path) -> None:
    params = SamplingParams(temperature=1.0, max_tokens=16, ignore_eos=True)

    def run(seed: int | None) -> list[list[int]]:
        with LLM(checkpoint, seed=seed) as llm:
            return [output.token_ids for output in generate(llm, ["same"] * 2, params)]

    first, second = run(None)
    assert first != second
    assert run(None) != run(None)
    assert run(1) == run(1) != run(2)


@pytest.mark.spec("SMP-6")
def test_logprobs_come_with_every_token(llm: LLM) -> None:
    params = SamplingParams(temperature=1.0, seed=1, max_tokens=5, ignore_eos=True, logprobs=2)
    (output,) = generate(llm, "hello", params)
    assert output.logprobs is not None
    assert [pairs[0][0] for pairs in output.logprobs] == output.token_ids
    assert all(2 <= len(pairs) <= 3 for pairs in output.logprobs)
    assert all(logprob <= 0 for pairs in output.logprobs for _, logprob in pairs)
    assert generate(llm, "hello", GREEDY)[0].logprobs is None


@pytest.mark.spec("API-1")
def test_chat_uses_the_template(llm: LLM) -> None:
    conversation = [{"role": "user", "content": "hi"}]
    expected = generate(llm, "user: hi\nassistant: ", GREEDY)[0].token_ids
    assert [o.token_ids for o in llm.chat(conversation, GREEDY, use_tqdm=False)] == [expected]
    many = llm.chat([conversation, conversation], GREEDY, use_tqdm=False)
    assert [o.token_ids for o in many] == [expected, expected]
    for messages in ({"role": "user", "content": "x"}, [{"role": "user", "content": None}]):
        with pytest.raises(TypeError, match="message"):
            llm.chat(messages, GREEDY)
    llm.tokenizer.chat_template = "{{ raise_exception('roles must alternate') }}"
    with pytest.raises(ValueError, match="roles must alternate"):
        llm.chat(conversation, GREEDY)


@pytest.mark.spec("API-1")
def test_without_a_tokenizer_ids_work_and_text_is_refused(checkpoint: Path) -> None:
    with LLM(checkpoint, skip_tokenizer=True) as llm:
        (output,) = generate(llm, [1, 2, 3], GREEDY)
        assert len(output.token_ids) == 6
        assert output.text == ""
        pieces = [chunk.token_ids for chunk in llm.stream([1, 2, 3], GREEDY)]
        assert list(chain.from_iterable(pieces)) == output.token_ids
        with pytest.raises(ValueError, match="tokenizer"):
            generate(llm, "text", GREEDY)
        with pytest.raises(ValueError, match="tokenizer"):
            generate(llm, [1], SamplingParams(stop="x"))


@pytest.mark.spec("API-2")
def test_progress_bar_shows_both_rates_and_the_hit_share(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    stream = io.StringIO()
    monkeypatch.setattr("sys.stderr", stream)
    llm.generate(["hello"] * 3, GREEDY)
    shown = stream.getvalue()
    assert "prefill" in shown
    assert "decode" in shown
    assert "prefix hits" in shown


@pytest.mark.spec("API-7")
def test_package_exports() -> None:
    assert {"LLM", "SamplingParams"} <= set(nanovllm.__all__)
