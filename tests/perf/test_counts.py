"""How much is done, exactly: `nanovllm gate counts` compares it with counts.json.

Each number is of the smallest case that has it, so that a change of one says what changed.
"""

from collections.abc import Callable
from typing import Any

import pytest
from host_step import BLOCK_SIZE, commit, decoding_scheduler
from torch.overrides import TorchFunctionMode

import nanovllm.engine
from nanovllm import LLM, SamplingParams
from nanovllm.config import SchedulerConfig
from nanovllm.engine.block_manager import hash_block
from nanovllm.engine.scheduler import Scheduler
from nanovllm.gate.counting import calls_into

Record = Callable[[str, object], None]


class CountedHashes:
    """The real hash function, and how often it was called."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, tokens: bytes, parent_hash: bytes) -> bytes:
        self.calls += 1
        return hash_block(tokens, parent_hash)


class CountedOperations(TorchFunctionMode):
    """Calls of torch made by the engine; reading a tensor's attribute is none."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls += getattr(func, "__name__", "") != "__get__"
        return func(*args, **(kwargs or {}))


def counting_scheduler(num_blocks: int = 1_000) -> tuple[Scheduler, CountedHashes]:
    hashes = CountedHashes()
    config = SchedulerConfig(
        max_num_seqs=8,
        max_num_batched_tokens=4096,
        max_model_len=2048,
        num_kvcache_blocks=num_blocks,
        kvcache_block_size=BLOCK_SIZE,
        seed=0,
    )
    return Scheduler(config, hashes), hashes


def serve(scheduler: Scheduler, num_tokens: int, max_tokens: int) -> None:
    scheduler.add(list(range(num_tokens)), SamplingParams(max_tokens=max_tokens))
    while not scheduler.is_finished():
        commit(scheduler, scheduler.schedule())


@pytest.mark.spec("PFX-1", "PRF-2")
def test_hashes(record_property: Record) -> None:
    """Each full block is hashed once, whether it is found or not; the last one may be partial."""
    scheduler, hashes = counting_scheduler()
    for state in ("cold", "warm"):
        hashes.calls = 0
        serve(scheduler, num_tokens=512, max_tokens=1)
        record_property(f"count:hashes of a {state} prompt of 512 tokens", hashes.calls)
        assert hashes.calls == 512 // BLOCK_SIZE
    hashes.calls = 0
    serve(scheduler, num_tokens=1, max_tokens=160)
    record_property("count:hashes of 160 tokens, one by one", hashes.calls)
    assert hashes.calls == 160 // BLOCK_SIZE


@pytest.mark.spec("SCH-8", "PRF-2")
def test_hashes_of_a_preempted_request(record_property: Record) -> None:
    """What was hashed before it gave way is not hashed again."""
    scheduler, hashes = counting_scheduler(num_blocks=12)
    for i in range(2):
        scheduler.add([i] * 80, SamplingParams(max_tokens=80))
    while not scheduler.is_finished():
        commit(scheduler, scheduler.schedule())
    assert scheduler.stats.num_preemptions == 1
    record_property("count:hashes of two requests of 10 blocks, one preempted", hashes.calls)
    assert hashes.calls <= 2 * 10


def calls_of_a_step(num_seqs: int) -> int:
    scheduler = decoding_scheduler(num_seqs, num_blocks=20_000)
    with calls_into(nanovllm.engine) as calls:
        commit(scheduler, scheduler.schedule())
    return calls.total()


@pytest.mark.spec("PRF-2")
def test_scheduler_work_of_a_decode_step(record_property: Record) -> None:
    """Calls within the engine; each row costs the same, however many there are."""
    one, two, many = (calls_of_a_step(num_seqs) for num_seqs in (1, 2, 256))
    record_property("count:calls of a decode step of one row", one)
    record_property("count:calls of each further row", two - one)
    assert many == one + 255 * (two - one)


@pytest.mark.spec("PRF-2")
def test_scheduler_work_of_an_admission(record_property: Record) -> None:
    """Calls within the engine for a prompt of 32 blocks, cold and found in the cache."""
    scheduler, _ = counting_scheduler()
    found: list[int] = []
    for state in ("cold", "warm"):
        with calls_into(nanovllm.engine) as calls:
            serve(scheduler, num_tokens=512, max_tokens=1)
        found.append(calls.total())
        record_property(f"count:calls for a {state} prompt of 32 blocks", calls.total())
    assert found[0] != found[1]


def operations_of_a_step(num_requests: int, num_tokens: int) -> tuple[int, int]:
    """Of the first step, which computes the prompts, and of the second, which decodes."""
    with LLM(enable_prefix_caching=False) as llm:
        for i in range(num_requests):
            prompt = list(range(300 + i, 300 + i + num_tokens))
            llm.add_request(prompt, SamplingParams(temperature=0, max_tokens=4, ignore_eos=True))
        steps = []
        for _ in range(2):
            with CountedOperations() as operations:
                llm.step()
            steps.append(operations.calls)
    return steps[0], steps[1]


@pytest.mark.spec("PRF-2")
def test_operations_of_a_step(record_property: Record) -> None:
    """Calls of torch per step of the embedded model; longer prompts and contexts add none."""
    one, two, four = (operations_of_a_step(*case) for case in ((1, 8), (2, 8), (4, 19)))
    for kind, first, second, fourth in zip(("prefill", "decode"), one, two, four, strict=True):
        record_property(f"count:operations of a {kind} step of one row", first)
        record_property(f"count:operations of each further row in {kind}", second - first)
        assert fourth == first + 3 * (second - first)
