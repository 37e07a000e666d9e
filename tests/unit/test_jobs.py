"""The offline job: order, parameters, bad lines, and how it shares the engine."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from job_files import DEFAULTS, REQUESTS, open_job, records, run, write

from nanovllm import LLM, SamplingParams


@pytest.fixture(scope="module")
def llm(checkpoint: Path) -> Iterator[LLM]:
    with LLM(checkpoint, kvcache_block_size=4, num_kvcache_blocks=64, max_num_seqs=4) as engine:
        yield engine


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return write(tmp_path / "in.jsonl", REQUESTS)


@pytest.fixture
def target(tmp_path: Path) -> Path:
    return tmp_path / "out.jsonl"


@pytest.mark.spec("API-2")
def test_results_come_in_input_order_with_each_lines_own_parameters(
    llm: LLM, source: Path, target: Path
) -> None:
    yielded = run(llm, source, target)

    assert yielded == records(target)
    assert [r["line"] for r in yielded] == [1, 2, 3, 4, 5]
    assert [r.get("id") for r in yielded] == [None, "ids", {"any": "value"}, None, None]
    prompts = ["hello", [5, 6, 7], llm.apply_chat_template(REQUESTS[2]["messages"]), "hello"]
    changes: list[dict[str, Any]] = [
        {"max_tokens": 9},
        {},
        {},
        {"n": 2, "temperature": 0.9, "seed": 3},
    ]
    params = [SamplingParams(**DEFAULTS | change) for change in changes]
    expected = llm.generate(prompts, params, use_tqdm=False)
    for record, output in zip(yielded, expected, strict=False):
        assert record["num_prompt_tokens"] == output.num_prompt_tokens
        assert [s["token_ids"] for s in record["samples"]] == [s.token_ids for s in output.samples]
        assert [s["text"] for s in record["samples"]] == [s.text for s in output.samples]


@pytest.mark.spec("SMP-6")
def test_log_probabilities_are_there_if_asked_for(llm: LLM, tmp_path: Path, target: Path) -> None:
    source = write(tmp_path / "in.jsonl", [{"prompt": "a", "logprobs": 2}, {"prompt": "a"}])
    run(llm, source, target)
    asked, not_asked = (record["samples"][0] for record in records(target))
    greedy = [token_logprobs[0][0] for token_logprobs in asked["logprobs"]]
    assert greedy == asked["token_ids"] == not_asked["token_ids"]
    assert [len(token_logprobs) for token_logprobs in asked["logprobs"]] == [2, 2, 2, 2]
    assert "logprobs" not in not_asked


BAD_LINES: list[tuple[Any, str]] = [
    (b"{not json", "not JSON"),
    (b"\xff\xfe", "not JSON"),
    (b"[" * 100_000, "not JSON"),
    ([1], "must be a JSON object, got a list"),
    ({}, "none of them"),
    ({"prompt": "x", "prompt_token_ids": [1]}, "prompt and prompt_token_ids"),
    ({"prompt": 7}, "prompt must be a string, got 7"),
    ({"prompt_token_ids": "abc"}, "prompt_token_ids must be a list, got 'abc'"),
    ({"prompt_token_ids": [1.5]}, "1.5"),
    ({"prompt_token_ids": [10**6]}, "outside the vocabulary of 300"),
    ({"messages": [{"role": "user"}]}, "a message needs a role and a content"),
    ({"prompt": "x", "max_token": 3}, "unknown key 'max_token'"),
    ({"prompt": "x", "sampling_params": {"prompt": "y"}}, "unknown key 'prompt'"),
    ({"prompt": "x", "sampling_params": 3}, "sampling_params must be an object, got 3"),
    ({"prompt": "x", "n": 1, "sampling_params": {"n": 1}}, "n given both"),
    ({"prompt": "x", "temperature": -1}, "temperature must be in"),
    ({"prompt": "x", "top_k": 10**30}, "top_k must be in"),
    ({"prompt": "x", "stop_token_ids": [10**6], "min_tokens": 2}, "outside the vocabulary of 300"),
    ({"prompt": "x", "stop": 3}, "stop must be"),
    ({"prompt": ""}, "the prompt is empty"),
    ({"prompt": "x" * 400}, "the KV cache holds 256"),
]


@pytest.mark.spec("SCH-7a", "SCH-7c")
def test_a_bad_line_gets_an_error_and_stops_no_other(
    llm: LLM, tmp_path: Path, target: Path
) -> None:
    good = {"prompt": "hello"}
    requests = [item for bad, _ in BAD_LINES for item in (bad, good)]

    with open_job(write(tmp_path / "in.jsonl", requests), target) as job:
        results = list(job.run(llm))

    assert job.num_failed == len(BAD_LINES)
    assert [r["line"] for r in results] == list(range(1, len(requests) + 1))
    for record, (_, message) in zip(results[::2], BAD_LINES, strict=True):
        assert message in record["error"]
        assert "samples" not in record
    assert all("error" not in r for r in results[1::2])
    assert len({str(r["samples"]) for r in results[1::2]}) == 1


def test_a_line_that_its_chat_template_refuses_is_a_bad_line(
    llm: LLM, source: Path, target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    template = "{{ raise_exception('roles must alternate') }}"
    monkeypatch.setattr(llm.tokenizer, "chat_template", template)
    results = run(llm, source, target)
    assert [r["line"] for r in results if "error" in r] == [3]
    assert "roles must alternate" in results[2]["error"]
    assert results[2]["id"] == {"any": "value"}


@pytest.mark.spec("SCH-15")
def test_a_failing_step_fails_its_lines_only(
    llm: LLM, tmp_path: Path, target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = write(tmp_path / "in.jsonl", [{"prompt": "hello"}] * 6)
    run_step, calls = llm.model_runner.run, iter(range(1000))

    def fail_once(step: Any) -> Any:
        if next(calls) == 1:
            raise RuntimeError("out of luck")
        return run_step(step)

    monkeypatch.setattr(llm.model_runner, "run", fail_once)
    results = run(llm, source, target)
    failed = [r["line"] for r in results if "error" in r]
    assert failed == [1, 2, 3, 4]  # the four that ran
    assert "out of luck" in results[0]["error"]
    assert [r["samples"][0]["finish_reason"] for r in results[4:]] == ["length"] * 2


def test_blank_lines_count_but_have_no_result(llm: LLM, tmp_path: Path, target: Path) -> None:
    source = write(tmp_path / "in.jsonl", [b"", {"prompt": "a"}, b" \t", {"prompt": "b"}])
    assert [r["line"] for r in run(llm, source, target)] == [2, 4]
    with open_job(source, target) as job:
        assert job.is_complete


def test_bad_defaults_are_refused_before_the_output_is_touched(source: Path, target: Path) -> None:
    with pytest.raises(ValueError, match="top_p must be in"):
        open_job(source, target, defaults={"top_p": 3})
    assert not target.exists()


@pytest.mark.spec("API-4")
def test_leaving_early_aborts_what_runs_and_keeps_the_engine_clean(
    llm: LLM, tmp_path: Path, target: Path
) -> None:
    source = write(
        tmp_path / "in.jsonl", [{"prompt": "a", "max_tokens": n} for n in (1, 9, 9, 9, 9)]
    )
    with open_job(source, target) as job:
        results = job.run(llm)
        next(results)
        assert not llm.is_finished()
        results.close()
    assert llm.is_finished()
    stats = llm.stats()
    assert stats.num_free_blocks == stats.num_blocks
    request_id = llm.add_request("mine", SamplingParams(max_tokens=1))
    with pytest.raises(ValueError, match="must not have other requests"):
        run(llm, source, target)
    assert [output.request_id for output in llm.step().outputs] == [request_id]
    assert [r["line"] for r in run(llm, source, target)][-1] == 5


def test_lines_are_read_as_the_engine_takes_them(llm: LLM, tmp_path: Path, target: Path) -> None:
    source = write(tmp_path / "in.jsonl", [{"prompt": "x"}] * 40)
    before = llm.stats().num_requests
    with open_job(source, target) as job:
        for written, _ in enumerate(job.run(llm, window=6)):
            assert llm.stats().num_requests - before <= written + 6
    assert llm.stats().num_requests - before == 40


@pytest.mark.spec("SCH-3")
def test_a_long_line_does_not_keep_the_others_waiting(
    llm: LLM, tmp_path: Path, target: Path
) -> None:
    long, short = {"prompt": "x", "max_tokens": 40}, {"prompt": "y", "max_tokens": 4}
    source = write(tmp_path / "in.jsonl", [long, *[short] * 27])
    before = llm.stats().num_steps
    assert len(run(llm, source, target)) == 28
    # Nine times three short lines beside the long one, whose 40 steps they interrupt to prefill;
    # in batches of four it would be 40 and six times four.
    assert llm.stats().num_steps - before <= 40 + 9 + 1
