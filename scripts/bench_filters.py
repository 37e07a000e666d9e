"""What top-k, top-p and min-p add to a decode step: medians in ms, by batch size.

    python scripts/bench_filters.py --model synthetic:qwen3-0.6b

Prompts of 300 tokens, temperature 0.6, 30 steps after warm-up; every row on the same engine.
"""

from __future__ import annotations

import argparse
from contextlib import nullcontext
from typing import Any

from rich.console import Console
from rich.table import Table

from nanovllm import LLM
from nanovllm.bench.profiles import run_latency, warm_up
from nanovllm.bench.synthetic import model_directory

FILTERS: dict[str, dict[str, Any]] = {
    "no filter": {},
    "min-p 0.1": {"min_p": 0.1},
    "top-p 0.9": {"top_p": 0.9},
    "top-k 20 and top-p 0.95": {"top_k": 20, "top_p": 0.95},
}
BATCHES = (1, 64, 256)
PROMPT_LEN, STEPS = 300, 30


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model", help="directory or synthetic:NAME; not given: the embedded one")
    options = parser.parse_args()
    table = Table("ms a step", *(f"batch {size}" for size in BATCHES))
    made = model_directory(options.model) if options.model else nullcontext()
    with made as model, LLM(model, skip_tokenizer=True) as llm:
        warm_up(llm, PROMPT_LEN)
        for name, filters in FILTERS.items():
            runs = (run_latency(llm, size, PROMPT_LEN, STEPS, **filters) for size in BATCHES)
            table.add_row(name, *(f"{run.median_ms:.2f}" for run in runs))
    Console().print(table)


if __name__ == "__main__":
    main()
