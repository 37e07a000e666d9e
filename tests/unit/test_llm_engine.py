"""The engine's steps: aborts, failures, stops and streams leave everybody else alone."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from nanovllm import LLM, SamplingParams
from nanovllm.engine.model_runner import StepResult
from nanovllm.engine.step import ScheduledStep

NUM_BLOCKS = 64
PROMPTS = ["first prompt", "second", "the third one"]
GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)


@pytest.fixture
def llm(checkpoint: Path):
    with LLM(checkpoint, kvcache_block_size=4, num_kvcache_blocks=NUM_BLOCKS) as engine:
        yield engine


def drain(llm: LLM, num_steps: int | None = None) -> dict:
    """Outputs by request id of the next steps; by default until the engine is idle."""
    outputs = {}
    while num_steps != 0 and not llm.is_finished():
        outputs |= {output.request_id: output for output in llm.step().outputs}
        num_steps = None if num_steps is None else num_steps - 1
    if num_steps is None:
        assert llm.stats().num_free_blocks == NUM_BLOCKS
    return outputs


def tokens_alone(llm: LLM, params: SamplingParams = GREEDY) -> list[list[int]]:
    return [llm.generate(p, params, use_tqdm=False)[0].token_ids for p in PROMPTS]


def force_tokens(llm: LLM, monkeypatch: pytest.MonkeyPatch, token_ids: list[int]) -> None:
    """The model's best token at step i of a lone request is `token_ids[i]`, by a wide margin."""
    real, pending = llm.model_runner.compute_logits, list(token_ids)

    def compute_logits(inputs) -> torch.Tensor:
        logits = real(inputs)
        logits[:, pending.pop(0)] = logits.max() + 100
        return logits

    monkeypatch.setattr(llm.model_runner, "compute_logits", compute_logits)


def break_step(
    llm: LLM, monkeypatch: pytest.MonkeyPatch, number: int, error: BaseException
) -> None:
    real, calls = llm.model_runner.run, iter(range(10**6))

    def run(step: ScheduledStep) -> StepResult:
        if next(calls) == number:
            raise error
        return real(step)

    monkeypatch.setattr(llm.model_runner, "run", run)


@pytest.mark.spec("SCH-13")
def test_abort_ends_a_waiting_and_a_running_request(checkpoint: Path) -> None:
    options = {"kvcache_block_size": 4, "num_kvcache_blocks": NUM_BLOCKS, "max_num_seqs": 1}
    with LLM(checkpoint, **options) as llm:
        expected = tokens_alone(llm)[2]
        running, waiting, last = (llm.add_request(p, GREEDY) for p in PROMPTS)
        for _ in range(3):
            llm.step()
        assert llm.abort_request(running)
        assert llm.abort_request(waiting)
        assert not llm.abort_request(running)
        assert not llm.abort_request(10**6)
        outputs = drain(llm)
        assert [outputs[i].finish_reason for i in (running, waiting, last)] == [
            "abort",
            "abort",
            "length",
        ]
        assert [len(outputs[i].token_ids) for i in (running, waiting)] == [3, 0]
        assert outputs[last].token_ids == expected
        assert not llm.abort_request(last)


@pytest.mark.spec("FRK-3", "SCH-13")
@pytest.mark.parametrize("steps", [0, 1, 3])
def test_abort_drops_all_samples(checkpoint: Path, steps: int) -> None:
    options = {"kvcache_block_size": 4, "num_kvcache_blocks": NUM_BLOCKS, "max_num_seqs": 2}
    with LLM(checkpoint, **options) as llm:
        request = llm.add_request("hello", SamplingParams(n=4, max_tokens=9, ignore_eos=True))
        for _ in range(steps):
            llm.step()
        assert llm.abort_request(request)
        outputs = drain(llm)
        assert [s.finish_reason for s in outputs[request].samples] == ["abort"] * 4


@pytest.mark.spec("SCH-15")
@pytest.mark.parametrize("number", [0, 1, 4])
def test_a_step_that_raises_ends_its_requests_and_nobody_else(
    llm: LLM, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    expected = tokens_alone(llm)
    break_step(llm, monkeypatch, number, RuntimeError("out of something"))
    in_step = [llm.add_request(p, GREEDY) for p in PROMPTS[:2]]
    outputs = drain(llm, number + 1)
    later = llm.add_request(PROMPTS[2], GREEDY)
    outputs |= drain(llm)
    for request in in_step:
        assert outputs[request].finish_reason == "error"
        assert outputs[request].error == "RuntimeError: out of something"
        assert len(outputs[request].token_ids) == number
    assert outputs[later].token_ids == expected[2]
    assert tokens_alone(llm) == expected


@pytest.mark.spec("TP-4")
def test_a_device_that_fails_for_good_ends_everything(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those that run, wait, or wait for another sample; and nothing is accepted afterwards."""
    llm = LLM(checkpoint, num_kvcache_blocks=NUM_BLOCKS, max_num_seqs=2)
    runner = llm.model_runner
    monkeypatch.setattr(runner, "examine", lambda: setattr(runner, "fault", "cpu: gone"))
    break_step(llm, monkeypatch, 2, RuntimeError("no answer"))
    requests = [llm.add_request(p, GREEDY) for p in PROMPTS]
    requests.append(llm.add_request("more", SamplingParams(n=3, max_tokens=9)))
    outputs = {}
    for _ in range(3):
        outputs |= {output.request_id: output for output in llm.step().outputs}
    ends = {(s.finish_reason, s.error) for r in requests for s in outputs[r].samples}
    assert ends == {("error", "cpu: gone")}
    for call in (llm.step, llm.stats, llm.is_finished, lambda: llm.add_request("x", GREEDY)):
        with pytest.raises(RuntimeError, match="this engine has failed: cpu: gone"):
            call()


@pytest.mark.spec("SCH-15")
def test_an_interrupt_reaches_the_caller_and_leaves_a_usable_engine(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = tokens_alone(llm)
    break_step(llm, monkeypatch, 2, KeyboardInterrupt())
    with pytest.raises(KeyboardInterrupt):
        llm.generate(PROMPTS, GREEDY, use_tqdm=False)
    assert llm.is_finished()
    assert llm.stats().num_free_blocks == NUM_BLOCKS
    assert tokens_alone(llm) == expected


@pytest.mark.spec("SCH-15")
@pytest.mark.parametrize("error", [KeyboardInterrupt(), RuntimeError("bad text")])
def test_a_commit_that_raises_halfway_loses_nothing(
    llm: LLM, monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    """The first row is committed and even ends, the second one is not."""
    expected = tokens_alone(llm)
    one = SamplingParams(temperature=0, max_tokens=1)
    requests = [llm.add_request(p, one) for p in PROMPTS]
    real = llm.scheduler._append

    def append(seq, token_id: int, stopped: bool):
        if seq.seq_id == requests[1]:
            raise error
        return real(seq, token_id, stopped)

    monkeypatch.setattr(llm.scheduler, "_append", append)
    if isinstance(error, Exception):
        outputs = drain(llm)
    else:
        with pytest.raises(type(error)):
            llm.step()
        outputs = drain(llm)
    assert [outputs[r].finish_reason for r in requests] == ["length", "error", "error"]
    monkeypatch.undo()
    assert tokens_alone(llm) == expected


@pytest.mark.spec("SCH-15")
def test_a_tokenizer_that_fails_at_the_end_fails_one_request(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = tokens_alone(llm)
    requests = [llm.add_request(p, GREEDY) for p in PROMPTS]

    def broken() -> str:
        raise OverflowError("half a character")

    detokenizer = llm._requests.sample(requests[1]).detokenizer
    monkeypatch.setattr(detokenizer, "finish", broken)
    outputs = drain(llm)
    assert [outputs[r].finish_reason for r in requests] == ["length", "error", "length"]
    assert outputs[requests[1]].error == "OverflowError: half a character"
    assert outputs[requests[2]].token_ids == expected[2]


@pytest.mark.spec("SCH-15")
def test_a_step_left_behind_by_an_interrupt_does_not_block_the_engine(llm: LLM) -> None:
    expected = tokens_alone(llm)
    lost = llm.add_request(PROMPTS[0], GREEDY)
    llm.scheduler.schedule()
    (output,) = llm.generate(PROMPTS[1], GREEDY, use_tqdm=False)
    assert output.token_ids == expected[1]
    assert drain(llm)[lost].finish_reason == "error"


@pytest.mark.spec("SMP-5", "PFX-4")
def test_nan_logits_end_one_request_only(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = tokens_alone(llm)
    llm.reset_prefix_cache()
    real = llm.model_runner.compute_logits
    prompt_of = [llm.encode(p) for p in PROMPTS]

    def poisoned(inputs) -> torch.Tensor:
        logits = real(inputs)
        ends = inputs.cu_seqlens_q[1:].tolist()
        for row, end in enumerate(ends):
            start = int(inputs.cu_seqlens_q[row])
            if inputs.input_ids[start:end].tolist() == prompt_of[1]:
                logits[row] = float("nan")
        return logits

    monkeypatch.setattr(llm.model_runner, "compute_logits", poisoned)
    requests = [llm.add_request(p, GREEDY) for p in PROMPTS]
    outputs = drain(llm)
    assert [outputs[r].finish_reason for r in requests] == ["length", "error", "length"]
    assert "not finite" in outputs[requests[1]].error
    assert outputs[requests[0]].token_ids == expected[0]
    assert outputs[requests[2]].token_ids == expected[2]
    monkeypatch.undo()
    (again,) = llm.generate(PROMPTS[1], GREEDY, use_tqdm=False)
    assert (again.num_cached_tokens, again.token_ids) == (0, expected[1])


@pytest.mark.spec("SCH-12a", "SCH-12d", "STP-1")
def test_eos_of_any_file_ends_a_request(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """B80: the tokenizer's 256, and what generation_config.json adds."""
    for file in checkpoint.iterdir():
        (tmp_path / file.name).symlink_to(file)
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [5, 9]}')
    for eos in (256, 5, 9):
        with LLM(tmp_path) as llm:
            force_tokens(llm, monkeypatch, [40, eos, 41])
            params = SamplingParams(temperature=0, max_tokens=3)
            (output,) = llm.generate("x", params, use_tqdm=False)
            assert (output.token_ids, output.finish_reason) == ([40, eos], "stop")
            assert output.text == llm.tokenizer.decode([40])


@pytest.mark.spec("SCH-12a", "SCH-12b", "SCH-12d")
def test_ignored_eos_goes_on_and_stop_wins_over_length(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    force_tokens(llm, monkeypatch, [256, 40, 256])
    params = SamplingParams(temperature=0, max_tokens=2, ignore_eos=True)
    (output,) = llm.generate("x", params, use_tqdm=False)
    assert (output.token_ids, output.finish_reason) == ([256, 40], "length")
    (output,) = llm.generate("x", SamplingParams(temperature=0, max_tokens=1), use_tqdm=False)
    assert (output.token_ids, output.finish_reason) == ([256], "stop")


@pytest.mark.spec("SCH-12c", "STP-3b")
def test_stop_ids_and_strings(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    text = llm.encode("abcdef")
    cases: list[tuple[dict, str, int]] = [
        ({"stop_token_ids": [text[2]]}, "ab", 3),
        ({"stop": "cd"}, "ab", 4),
        ({"stop": "cd", "include_stop": True}, "abcd", 4),
        ({"stop": ["ef", "bc"]}, "a", 3),
        ({"stop": "ef"}, "abcd", 6),
    ]
    for options, expected, num_tokens in cases:
        with monkeypatch.context() as patch:
            force_tokens(llm, patch, text)
            params = SamplingParams(temperature=0, max_tokens=6, **options)
            (output,) = llm.generate("x", params, use_tqdm=False)
            assert (output.text, output.finish_reason) == (expected, "stop")
            assert output.token_ids == text[:num_tokens]


@pytest.mark.spec("STP-2")
def test_b82_min_tokens_masks_every_eos(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    real = llm.model_runner.compute_logits

    def eos_on_top(inputs) -> torch.Tensor:
        logits = real(inputs)
        logits[:, 256] = logits.max() + 100
        return logits

    monkeypatch.setattr(llm.model_runner, "compute_logits", eos_on_top)
    for min_tokens in (0, 4):
        params = SamplingParams(temperature=0, max_tokens=9, min_tokens=min_tokens)
        (output,) = llm.generate("x", params, use_tqdm=False)
        assert output.finish_reason == "stop"
        assert len(output.token_ids) == min_tokens + 1
        assert output.token_ids.index(256) == min_tokens


@pytest.mark.spec("STP-4", "STP-3c")
def test_stream_pieces_concatenate_to_what_generate_gives(llm: LLM) -> None:
    params = SamplingParams(temperature=1.0, seed=5, max_tokens=40, n=2, stop=["e"])
    expected = llm.generate(PROMPTS, params, use_tqdm=False)
    text: dict[tuple[int, int], str] = {}
    token_ids: dict[tuple[int, int], list[int]] = {}
    reasons = {}
    for chunk in llm.stream(PROMPTS, params):
        key = (chunk.prompt_index, chunk.sample_index)
        assert key not in reasons, "a piece after the last one"
        text[key] = text.get(key, "") + chunk.text
        token_ids[key] = token_ids.get(key, []) + chunk.token_ids
        if chunk.finish_reason:
            reasons[key] = chunk.finish_reason
    for i, output in enumerate(expected):
        for j, sample in enumerate(output.samples):
            assert text[i, j] == sample.text
            assert token_ids[i, j] == sample.token_ids
            assert reasons[i, j] == sample.finish_reason
    assert llm.stats().num_free_blocks == NUM_BLOCKS


@pytest.mark.spec("STP-4", "SCH-13")
def test_leaving_a_stream_aborts_it(llm: LLM) -> None:
    expected = tokens_alone(llm)
    other = llm.add_request(PROMPTS[0], GREEDY)
    stream = llm.stream(PROMPTS[1], SamplingParams(max_tokens=100, ignore_eos=True))
    next(stream)
    stream.close()
    outputs = drain(llm)
    assert outputs.keys() == {other}
    assert outputs[other].token_ids == expected[0]


@pytest.mark.spec("API-4")
def test_streams_steps_and_generate_interleave(llm: LLM) -> None:
    expected = tokens_alone(llm)
    mine = llm.add_request(PROMPTS[0], GREEDY)
    stream = llm.stream(PROMPTS[1], GREEDY)
    pieces = [next(stream)]
    llm.step()
    (inner,) = llm.generate(PROMPTS[2], GREEDY, use_tqdm=False)
    finished = llm.step().outputs
    pieces += stream
    assert [t for piece in pieces for t in piece.token_ids] == expected[1]
    assert inner.token_ids == expected[2]
    assert [(o.request_id, o.token_ids) for o in finished] == [(mine, expected[0])]


@pytest.mark.spec("API-6", "STP-4")
def test_a_stream_of_a_bad_prompt_raises_at_once(llm: LLM) -> None:
    with pytest.raises(ValueError, match="prompt 1"):
        llm.stream(["fine", []], GREEDY)
    assert llm.is_finished()


@pytest.mark.spec("KV-3")
@pytest.mark.parametrize("length", [1, 3, 4, 5])
def test_b51_nan_in_unwritten_slots_never_shows(llm: LLM, length: int) -> None:
    fill: list[Callable[[torch.Tensor], object]] = [
        lambda cache: cache.zero_(),
        lambda cache: cache.fill_(float("nan")),
    ]
    outputs = []
    for fill_cache in fill:
        llm.reset_prefix_cache()
        fill_cache(llm.model_runner.kv_cache)
        prompts = [[7] * length, [8] * 9]
        outputs.append([o.token_ids for o in llm.generate(prompts, GREEDY, use_tqdm=False)])
    assert outputs[0] == outputs[1]


@pytest.mark.spec("PFX-12", "PFX-13")
def test_caching_and_sampling_parameters_do_not_change_greedy_tokens(checkpoint: Path) -> None:
    prompt = list(range(1, 30))
    with LLM(checkpoint, enable_prefix_caching=False) as cold:
        (expected,) = cold.generate(prompt, GREEDY, use_tqdm=False)
        assert cold.generate(prompt, GREEDY, use_tqdm=False)[0].num_cached_tokens == 0
    with LLM(checkpoint) as warm:
        warm.generate(prompt, SamplingParams(temperature=2, max_tokens=1), use_tqdm=False)
        (output,) = warm.generate(prompt, GREEDY, use_tqdm=False)
    assert (output.num_cached_tokens, output.token_ids) == (16, expected.token_ids)
