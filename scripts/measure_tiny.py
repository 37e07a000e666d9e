"""Measure the embedded model: how decided its greedy tokens are, and how much they need attention.

    python scripts/measure_tiny.py src/nanovllm/assets/tiny-qwen3 --corpus corpus

Prompts are held-out text of 64-200 tokens, continued by 64 greedy tokens in fp32. One block of 16
keys is then hidden (`drop`), or gets the keys and values that another request has there
(`exchange`), either as soon as it is computed (`whole`) or from the first new token on (`decode`,
which leaves the first new token as it was). Reported: the share of continuations that change.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import torch
import typer
from tiny_corpus import read_corpus
from train_tiny import DEVICE, token_stream
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache

BLOCK = 16
NEW_TOKENS = 64
Spoil = Callable[[slice, torch.Tensor, DynamicCache], None]


def drop(block: slice, mask: torch.Tensor, cache: DynamicCache) -> None:
    """Hide the block from all later queries."""
    mask[:, block] = 0


def exchange(block: slice, mask: torch.Tensor, cache: DynamicCache) -> None:
    """Give every request the keys and values that another one has in this block."""
    for layer in cache.layers:
        layer.keys[:, :, block] = layer.keys[:, :, block].roll(1, dims=0)
        layer.values[:, :, block] = layer.values[:, :, block].roll(1, dims=0)


def continue_greedily(
    model: torch.nn.Module,
    prompts: torch.Tensor,
    spoil: Spoil | None = None,
    block: int = 0,
    when: str = "whole",
) -> tuple[torch.Tensor, torch.Tensor]:
    """Continuations of `prompts` [B, T] and their top-2 logit gaps, both [B, NEW_TOKENS]."""
    length = prompts.shape[1]
    mask = torch.ones(len(prompts), length + NEW_TOKENS, dtype=torch.long, device=prompts.device)
    cache = DynamicCache()

    def forward(ids: torch.Tensor, start: int) -> torch.Tensor:
        end = start + ids.shape[1]
        positions = torch.arange(start, end, device=ids.device).expand(len(ids), -1)
        return model(
            ids, attention_mask=mask[:, :end], position_ids=positions, past_key_values=cache
        ).logits[:, -1]

    split = (block + 1) * BLOCK if when == "whole" else length
    logits = forward(prompts[:, :split], 0)
    if spoil is not None:
        spoil(slice(block * BLOCK, (block + 1) * BLOCK), mask, cache)
    if split < length:
        logits = forward(prompts[:, split:], split)
    chosen, gaps = [], []
    for position in range(length, length + NEW_TOKENS):
        best = logits.topk(2)
        chosen.append(best.indices[:, :1])
        gaps.append(best.values[:, :1] - best.values[:, 1:])
        logits = forward(chosen[-1], position)
    return torch.cat(chosen, 1), torch.cat(gaps, 1)


def ends_in_loop(tokens: list[int]) -> bool:
    """Whether the last 32 tokens have a period of at most 16."""
    tail = tokens[-32:]
    return any(tail[period:] == tail[:-period] for period in range(1, 17))


@torch.no_grad()
def main(
    path: Path,
    corpus: Annotated[Path, typer.Option(help="folder that `train_tiny.py corpus` wrote")],
    prompts: Annotated[int, typer.Option(help="prompts of each of four lengths")] = 32,
) -> None:
    """Print margins, loops, and the share of continuations that each change of a block changes."""
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).to(DEVICE)
    tokenizer = AutoTokenizer.from_pretrained(path)
    _, held = read_corpus(corpus)
    stream = token_stream(tokenizer, ["\n".join(d) for ds in held.values() for d in ds], seed=0)
    changed: dict[str, list[bool]] = {}
    gaps, loops = [], []
    for length in (64, 96, 136, 200):
        windows = stream.unfold(0, length, (len(stream) - length) // prompts)[:prompts].to(DEVICE)
        plain, plain_gaps = continue_greedily(model, windows)
        gaps.append(plain_gaps.flatten())
        loops += [ends_in_loop(row) for row in plain.tolist()]
        last = length // BLOCK - 1
        for where, block in {"first": 0, "middle": last // 2, "last but one": last - 1}.items():
            for spoil in (drop, exchange):
                for when in ("whole", "decode"):
                    other, _ = continue_greedily(model, windows, spoil, block, when)
                    name = f"{spoil.__name__} {where} block, {when}"
                    changed.setdefault(name, []).extend((other != plain).any(1).tolist())
    gap = torch.cat(gaps)
    typer.echo(f"gap > 1e-4: {(gap > 1e-4).float().mean():.4f}")
    typer.echo(f"gap > 0.75: {(gap > 0.75).float().mean():.4f}")
    typer.echo(f"end in a short loop: {sum(loops)} of {len(loops)}")
    for name, values in changed.items():
        typer.echo(f"{name}: {sum(values) / len(values):.3f} of {len(values)} changed")


if __name__ == "__main__":
    typer.run(main)
