"""The step that takes the most memory of all that an engine's options allow (MEM-1)."""

import numpy as np

from nanovllm.config import Config
from nanovllm.engine.model_input import ModelInput
from nanovllm.layers.sampler import RowSampling
from nanovllm.sampling_params import SamplingParams


def largest_step(
    config: Config, max_model_len: int, block_size: int
) -> tuple[ModelInput, list[RowSampling]]:
    """As many rows and tokens as fit a step, all sampled, with every kind of sampling.

    It writes no slot and reads block 0 only, so that a cache of one block will do.
    """
    num_rows = config.max_num_seqs
    num_tokens = min(config.max_num_batched_tokens, num_rows * max_model_len)
    counts = np.full(num_rows, num_tokens // num_rows, dtype=np.int32)
    counts[: num_tokens % num_rows] += 1
    longest = int(counts[0])
    ends = np.concatenate(([0], np.cumsum(counts))).astype(np.int32)
    inputs = ModelInput(
        input_ids=np.zeros(num_tokens, dtype=np.int64),
        positions=np.arange(num_tokens) - np.repeat(ends[:-1], counts),
        slot_mapping=np.full(num_tokens, -1, dtype=np.int64),
        cu_seqlens_q=ends,
        context_lens=counts,
        block_tables=np.zeros((num_rows, -(-longest // block_size)), dtype=np.int32),
        last_tokens=ends[1:].astype(np.int64) - 1,
    )
    params = SamplingParams(top_p=0.9, top_k=50, repetition_penalty=1.1, logprobs=1)
    return inputs, [RowSampling(params, 0, longest, (0,), (0,), (0,))] * num_rows
