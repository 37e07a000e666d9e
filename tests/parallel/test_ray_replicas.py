"""Two engines of the embedded model as Ray actors: prefixes stay, strangers spread, and a kill
changes no token.
"""

import logging
import os
import signal
from dataclasses import dataclass

import pytest
from tp_engines import is_running, wait_for_end

from nanovllm import LLM, RequestOutput, SamplingParams
from nanovllm.outputs import Stats

ray = pytest.importorskip("ray", reason="ray is not installed: pip install 'nanovllm[ray]'")

OPTIONS = {"num_kvcache_blocks": 600, "kvcache_block_size": 4, "seed": 7}
FAMILIES = [[[k] * 12 + [i + 1] for i in range(6)] for k in (91, 92)]
BRIEF = SamplingParams(max_tokens=3, ignore_eos=True)
STRANGERS = [[i + 1] * (i + 5) for i in range(8)]
LONG = [
    SamplingParams(temperature=temperature, max_tokens=250, seed=seed, ignore_eos=True)
    for temperature, seed in ((0, None), (1, 5), (1, None), (0.5, None))
] * 2


@pytest.fixture(scope="module", autouse=True)
def one_ray():
    """One Ray for all tests, so that it is not an engine's to shut down."""
    ray.init(
        address="local",
        num_cpus=2,
        include_dashboard=False,
        log_to_driver=False,
        logging_level=logging.WARNING,
    )
    yield
    ray.shutdown()


@dataclass
class Story:
    """What two engines did with members of two families, then with strangers until one died."""

    relatives: list[RequestOutput]
    after_relatives: list[Stats]
    in_mid_job: list[Stats]
    strangers: list[list[int]]
    losses: dict[int, str]
    log: list[str]
    pids: list[int]
    all_ended: bool


class Lines(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


def begin(llm: LLM) -> list[int]:
    return [llm.add_request(*request) for request in zip(STRANGERS, LONG, strict=True)]


def finish(llm: LLM, ids: list[int]) -> list[list[int]]:
    outputs = {}
    while not llm.is_finished():
        outputs.update((output.request_id, output) for output in llm.step().outputs)
    assert {outputs[i].finish_reason for i in ids} == {"length"}
    return [outputs[i].token_ids for i in ids]


@pytest.fixture(scope="module")
def story() -> Story:
    """One story for all tests: engines take seconds to start."""
    handler, logger = Lines(), logging.getLogger("nanovllm.data_parallel")
    logger.addHandler(handler)
    with LLM(data_parallel_size=2, **OPTIONS) as llm:
        pids = [info.pid for info in llm._dispatcher.pool.infos]
        llm.generate([family[0] for family in FAMILIES], BRIEF, use_tqdm=False)
        members = [member for family in FAMILIES for member in family[1:]]
        relatives = llm.generate(members, BRIEF, use_tqdm=False)
        after_relatives = llm.replica_stats()

        ids = begin(llm)
        assert not llm.step().outputs, "too short to be killed in mid-job"
        in_mid_job = llm.replica_stats()
        os.kill(pids[0], signal.SIGKILL)
        strangers, losses = finish(llm, ids), llm.losses
        assert is_running(pids[1])
    logger.removeHandler(handler)
    return Story(
        *(relatives, after_relatives, in_mid_job, strangers, losses),
        *(handler.lines, pids, wait_for_end(pids)),
    )


@pytest.mark.spec("PFX-5", "API-2")
def test_prefixes_stay_with_one_replica(story: Story) -> None:
    members = [member for family in FAMILIES for member in family[1:]]
    assert [output.prompt_token_ids for output in story.relatives] == members
    assert [output.num_cached_tokens for output in story.relatives] == [12] * len(members)
    assert [stats.num_requests for stats in story.after_relatives] == [6, 6]
    assert [stats.num_cached_tokens for stats in story.after_relatives] == [60, 60]


def test_strangers_spread(story: Story) -> None:
    assert [stats.num_requests for stats in story.in_mid_job] == [10, 10]


@pytest.mark.spec("SMP-1", "SMP-4")
def test_a_kill_changes_no_token(story: Story) -> None:
    """Greedy, seeded and unseeded; the single engine has drawn as many seeds before."""
    with LLM(**OPTIONS) as single:
        single.generate([member for family in FAMILIES for member in family], BRIEF, use_tqdm=False)
        assert story.strangers == finish(single, begin(single))


def test_the_loss_is_reported(story: Story) -> None:
    assert story.losses.keys() == {0}
    assert f"process {story.pids[0]}: ActorDiedError" in story.losses[0]
    (line,) = story.log
    assert line.startswith(f"replica 0 is lost ({story.losses[0]})")
    assert "of its 4 requests 4 are tried elsewhere" in line


def test_closing_ends_the_actors_and_no_more(story: Story) -> None:
    assert story.all_ended
    assert ray.is_initialized()


@pytest.mark.spec("CFG-1")
def test_what_ray_cannot_place_is_refused() -> None:
    with pytest.raises(ValueError, match="takes 3 CPUs, 1 a replica, but Ray has 2"):
        LLM(data_parallel_size=3, **OPTIONS)
