"""Imports what a planner does not need, as the tutorial's does."""

from dataclasses import dataclass

import torch
from transformers import AutoConfig


@dataclass
class Config:
    max_num_seqs: int
    max_num_batched_tokens: int
    num_kvcache_blocks: int
    kvcache_block_size: int
    eos: int
    hf_config: AutoConfig | None = None
    dtype: torch.dtype | None = None
