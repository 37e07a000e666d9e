"""Ctrl-C at any line of `nanovllm.engine`: the call ends, and the engine is whole."""

import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import product
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
from ahead_or_not import late_runners
from tiny_models import make_checkpoint

from nanovllm import LLM, SamplingParams
from nanovllm.engine import interrupts

PROMPTS = ["abcdef", "bcd", "cdefghij"]
PARAMS = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
EVERY = 17
"""Lines between two that are tried: every one would take minutes."""


@contextmanager
def interrupted_at(line: int) -> Iterator[None]:
    """Ctrl-C before this line of the engine's code that runs, counted from here on."""
    left, folder = line, str(Path(interrupts.__file__).parent)

    def trace(frame: FrameType, event: str, _: Any) -> Callable[..., Any] | None:
        nonlocal left
        file = frame.f_code.co_filename
        if not file.startswith(folder) or file == interrupts.__file__:
            return None
        if event == "line":
            left -= 1
            if left == 0:
                signal.raise_signal(signal.SIGINT)
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        yield
    finally:
        sys.settrace(before)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("model"), tokenizer=True)


@pytest.fixture(params=[0, 1], ids=["not-ahead", "ahead"])
def llm(request: pytest.FixtureRequest, checkpoint: Path) -> Iterator[LLM]:
    sizes = {"kvcache_block_size": 4, "num_kvcache_blocks": 12, "max_num_batched_tokens": 9}
    with (
        late_runners(request.param),
        LLM(checkpoint, max_num_seqs=2, enable_prefix_caching=False, **sizes) as engine,
    ):
        yield engine


def generated(llm: LLM) -> list[list[int]]:
    return [output.token_ids for output in llm.generate(PROMPTS, PARAMS, use_tqdm=False)]


@pytest.mark.spec("SCH-15", "API-4")
def test_it_ends_a_call_and_leaves_the_engine_whole(llm: LLM) -> None:
    expected, line = generated(llm), 1
    while True:
        try:
            with interrupted_at(line):
                generated(llm)
            break
        except KeyboardInterrupt:
            assert llm.is_finished(), line
            assert llm.step().outputs == (), line
            stats = llm.stats()
            assert stats.num_free_blocks == stats.num_blocks, line
            assert not llm._requests.live, line
            assert not llm._requests.finished, line
        if line % (20 * EVERY) == 1:
            assert generated(llm) == expected
        line += EVERY
    assert line > 20 * EVERY, "the call has as many lines"
    assert generated(llm) == expected


@pytest.mark.spec("SCH-15", "API-4")
def test_step_by_step_nothing_that_finished_is_lost(llm: LLM) -> None:
    expected = generated(llm)
    for line, when in product(range(1, 1000, 5 * EVERY), range(9)):
        ids = [llm.add_request(prompt, PARAMS) for prompt in PROMPTS]
        outputs = {}
        for number in range(1000):
            try:
                with interrupted_at(line if number == when else 0):
                    step = llm.step()
            except KeyboardInterrupt:
                continue
            outputs |= {output.request_id: output for output in step.outputs}
            if llm.is_finished():
                break
        assert [outputs[i].token_ids for i in ids] == expected, line
