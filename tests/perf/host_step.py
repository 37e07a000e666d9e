"""A scheduler in steady decode, without a model: what a step costs on the host."""

from nanovllm.config import SchedulerConfig
from nanovllm.engine.model_input import prepare_model_input
from nanovllm.engine.model_runner import sampling_row
from nanovllm.engine.scheduler import Scheduler
from nanovllm.engine.step import ScheduledStep
from nanovllm.layers.sampler import SamplingInput
from nanovllm.sampling_params import SamplingParams

BLOCK_SIZE = 16


def decoding_scheduler(
    num_seqs: int, num_blocks: int, prompt_len: int = 20, max_tokens: int = 10_000
) -> Scheduler:
    """`num_seqs` sequences with their prompts computed, each with room to decode on."""
    scheduler = Scheduler(
        SchedulerConfig(
            max_num_seqs=num_seqs,
            max_num_batched_tokens=num_seqs * prompt_len,
            max_model_len=prompt_len + max_tokens,
            num_kvcache_blocks=num_blocks,
            kvcache_block_size=BLOCK_SIZE,
            seed=0,
        )
    )
    for i in range(num_seqs):
        scheduler.add([i] * prompt_len, SamplingParams(max_tokens=max_tokens))
    commit(scheduler, scheduler.schedule())
    assert len(scheduler.running) == num_seqs
    return scheduler


def commit(scheduler: Scheduler, step: ScheduledStep) -> None:
    scheduler.commit(step, {row.seq.seq_id: 7 for row in step.rows if row.samples})


def host_step(scheduler: Scheduler) -> int:
    """Schedule, prepare all arrays of model and sampler, commit; returns the rows."""
    step = scheduler.schedule()
    prepare_model_input(step, BLOCK_SIZE)
    SamplingInput.from_rows([sampling_row(row.seq, frozenset()) for row in step.rows])
    commit(scheduler, step)
    return len(step.rows)
