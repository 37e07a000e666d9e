"""The models under test, each with its oracle, its measured error and HF's outputs."""

import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from pathlib import Path

import numpy as np
import torch
from hf_oracle import HFOracle
from rule_r1 import RuleR1
from tiny_models import make_checkpoint

from nanovllm import LLM, SamplingParams
from nanovllm.config import EMBEDDED_MODEL
from nanovllm.engine.model_input import prepare_model_input
from nanovllm.engine.model_runner import ModelRunner
from nanovllm.engine.sequence import Sequence
from nanovllm.engine.step import StepBuilder
from nanovllm.models.model_config import ModelConfig
from nanovllm.utils.tokenizer import load_tokenizer

MAX_TOKENS = 64
GREEDY = SamplingParams(temperature=0.0, max_tokens=MAX_TOKENS, ignore_eos=True)

# GQA ratio 1, 2, 4 by head_dim 16, 32, 64; the other traits vary along.
SHAPES: dict[str, dict] = {
    "gqa1-dim16": {"num_key_value_heads": 4, "head_dim": 16},
    "gqa1-dim32-untied-bias": {
        "num_key_value_heads": 4,
        "head_dim": 32,
        "tie_word_embeddings": False,
        "attention_bias": True,
    },
    "gqa1-dim64-odd": {"num_key_value_heads": 4, "head_dim": 64, "vocab_size": 301},
    "gqa2-dim16-untied-odd": {
        "head_dim": 16,
        "tie_word_embeddings": False,
        "vocab_size": 301,
    },
    "gqa2-dim32-bias-odd": {"head_dim": 32, "attention_bias": True, "vocab_size": 301},
    "gqa2-dim64": {"head_dim": 64},
    "gqa4-dim16-bias": {"num_key_value_heads": 1, "head_dim": 16, "attention_bias": True},
    "gqa4-dim32": {"num_key_value_heads": 1, "head_dim": 32},
    "gqa4-dim64-untied-bias-odd": {
        "num_key_value_heads": 1,
        "head_dim": 64,
        "tie_word_embeddings": False,
        "attention_bias": True,
        "vocab_size": 301,
    },
}
EMBEDDED = "embedded"
MODELS = (EMBEDDED, *SHAPES)
CI_MODELS = (
    EMBEDDED,
    "gqa1-dim16",
    "gqa2-dim32-bias-odd",
    "gqa4-dim64-untied-bias-odd",
)

# Around multiples of the block sizes. The first is the only one that fills a block of 256.
PROMPT_LENGTHS = (
    *(257, 1, 2, 48, 100, 150, 199, 200),
    *(multiple + i for multiple in (4, 8, 16, 32, 64, 128) for i in (-1, 0, 1)),
)
# (length, tokens that it shares with the first prompt): twins of it and of its beginnings.
SHARED_PREFIXES = ((200, 200), (70, 40), (50, 48), (40, 17), (33, 33), (12, 4))

PASSAGE = Path(__file__).parent / "passage.txt"

Draw = Callable[[int], list[int]]


def draw_ids(path: Path, seed: int) -> Draw:
    """Draws any number of any ids."""
    vocab_size, rng = ModelConfig.from_pretrained(path).vocab_size, random.Random(seed)
    return lambda count: [rng.randrange(vocab_size) for _ in range(count)]


def draw_english(path: Path, seed: int) -> Draw:
    """Draws consecutive tokens of a passage, from anywhere in it."""
    passage, rng = load_tokenizer(path).encode(PASSAGE.read_text()), random.Random(seed)

    def draw(count: int) -> list[int]:
        begin = rng.randrange(len(passage) - count + 1)
        return passage[begin : begin + count]

    return draw


@dataclass(frozen=True)
class Subject:
    """One model; what is expensive is computed once, on first use."""

    path: Path

    def draw(self, seed: int) -> Draw:
        """A source of prompts: English for the model that reads it."""
        return (draw_english if self.path == EMBEDDED_MODEL else draw_ids)(self.path, seed)

    @cached_property
    def oracle(self) -> HFOracle:
        return HFOracle(self.path)

    @cached_property
    def prompts(self) -> list[list[int]]:
        """32 of 1-257 tokens, some with a common beginning."""
        draw = self.draw(seed=0)
        prompts = [draw(length) for length in PROMPT_LENGTHS]
        shared = [prompts[0][:n] + draw(length - n) for length, n in SHARED_PREFIXES]
        return prompts + shared

    @cached_property
    def reference(self) -> list[list[int]]:
        """HF's greedy outputs."""
        return self.oracle.greedy(self.prompts, MAX_TOKENS)

    @cached_property
    def plain(self) -> list[list[int]]:
        """Our outputs with all options at their defaults."""
        with LLM(self.path, skip_tokenizer=True) as llm:
            return greedy(llm, self.prompts)

    @cached_property
    def measured(self) -> "Measured":
        """Our logits against HF's, over every prompt and its reference output."""
        texts = [p + r[:-1] for p, r in zip(self.prompts, self.reference, strict=True)]
        theirs = [self.oracle.logits(text) for text in texts]
        best = torch.cat([logits[-MAX_TOKENS:].topk(2).values for logits in theirs])
        with LLM(self.path, skip_tokenizer=True, num_kvcache_blocks=512) as llm:
            errors = {
                count: largest_error(teacher_forced(llm.model_runner, texts, count), theirs)
                for count in (1, 7, 1000)
            }
        return Measured(errors, best[:, 0] - best[:, 1])

    @cached_property
    def rule(self) -> RuleR1:
        return RuleR1(lambda ids: self.oracle.logits(ids)[-1], max(self.measured.errors.values()))

    @cached_property
    def decided(self) -> float:
        """Share of the reference's tokens that are no tie to R1."""
        return (self.measured.gaps > self.rule.tolerance).float().mean().item()


@dataclass(frozen=True)
class Measured:
    """Teacher-forced logits of one model in float32.

    Attributes:
        errors: the largest error by tokens computed per step; 1 is decoding.
        gaps: between HF's two largest logits, one per token of the reference.
    """

    errors: dict[int, float]
    gaps: torch.Tensor


def largest_error(ours: list[torch.Tensor], theirs: list[torch.Tensor]) -> float:
    return max((a - b).abs().max().item() for a, b in zip(ours, theirs, strict=True))


def greedy(llm: LLM, prompts: list[list[int]]) -> list[list[int]]:
    """`MAX_TOKENS` greedy tokens of each prompt."""
    return [output.token_ids for output in llm.generate(prompts, GREEDY, use_tqdm=False)]


def teacher_forced(
    runner: ModelRunner, texts: list[list[int]], tokens_per_step: int
) -> list[torch.Tensor]:
    """Our logits after every token of given texts, computed together: [T, vocab_size] of each.

    Every step computes up to `tokens_per_step` positions of each text: 1 is decoding. The blocks
    of the texts lie scattered over the pool.
    """
    blocks = torch.randperm(runner.num_blocks, generator=torch.Generator().manual_seed(0)).tolist()
    seqs = []
    for i, text in enumerate(texts):
        seq = Sequence(i, text, GREEDY, block_size=runner.block_size, max_tokens=1)
        seq.block_table.extend(blocks.pop() for _ in range(seq.num_blocks))
        seqs.append(seq)
    logits: list[list[torch.Tensor]] = [[] for _ in texts]
    while unfinished := [seq for seq in seqs if seq.num_uncomputed_tokens]:
        plan = StepBuilder(sum(map(len, texts)))
        for seq in unfinished:
            plan.add(seq, min(tokens_per_step, seq.num_uncomputed_tokens))
        step = plan.build(0)
        inputs = prepare_model_input(step, runner.block_size)
        every = replace(inputs, last_tokens=np.arange(step.num_tokens))
        parts = runner.compute_logits(every).split([row.count for row in step.rows])
        for row, part in zip(step.rows, parts, strict=True):
            logits[row.seq.seq_id].append(part)
            row.seq.num_computed_tokens = row.end
    return [torch.cat(parts) for parts in logits]


class Subjects:
    """All models, made under `directory` when they are asked for."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.get = lru_cache(self._make)

    def _make(self, name: str) -> Subject:
        if name == EMBEDDED:
            return Subject(EMBEDDED_MODEL)
        directory = self.directory / name
        return Subject(make_checkpoint(directory, seed=1, tokenizer=True, **SHAPES[name]))
