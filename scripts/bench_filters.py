"""What top-k, top-p and min-p add to a decode step: medians in ms, by batch size.

    python scripts/bench_filters.py --model synthetic:qwen3-0.6b

Prompts of 300 tokens, temperature 0.6, steps 11 to 40; every row on the same engine.
"""

from __future__ import annotations

import argparse
import statistics
from contextlib import nullcontext
from typing import Any

from rich.console import Console
from rich.table import Table

from nanovllm import LLM, SamplingParams
from nanovllm.bench.profiles import warm_up
from nanovllm.bench.recorder import Recorder
from nanovllm.bench.synthetic import model_directory
from nanovllm.bench.workload import batch_workload

FILTERS: dict[str, dict[str, Any]] = {
    "no filter": {},
    "min-p 0.1": {"min_p": 0.1},
    "top-p 0.9": {"top_p": 0.9},
    "top-k 20 and top-p 0.95": {"top_k": 20, "top_p": 0.95},
}
BATCHES = (1, 64, 256)
PROMPT_LEN, WARM_UP_STEPS, STEPS = 300, 10, 30


def step_ms(llm: LLM, batch_size: int, filters: dict[str, Any]) -> float:
    llm.reset_prefix_cache()
    num_tokens = WARM_UP_STEPS + STEPS + 2
    params = SamplingParams(temperature=0.6, max_tokens=num_tokens, ignore_eos=True, **filters)
    vocab_size = llm.model_config.vocab_size
    for prompt in batch_workload(0, batch_size, PROMPT_LEN, num_tokens, vocab_size).prompts:
        llm.add_request(prompt, params)
    recorder = Recorder(llm)
    recorder.run()
    decodes = [r for r in recorder.records if r.num_decode_tokens == r.num_rows == batch_size]
    return 1e3 * statistics.median(r.seconds for r in decodes[WARM_UP_STEPS:][:STEPS])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model", help="directory or synthetic:NAME; not given: the embedded one")
    options = parser.parse_args()
    table = Table("ms a step", *(f"batch {size}" for size in BATCHES))
    made = model_directory(options.model) if options.model else nullcontext()
    with made as model, LLM(model, skip_tokenizer=True) as llm:
        warm_up(llm, PROMPT_LEN)
        for name, filters in FILTERS.items():
            table.add_row(name, *(f"{step_ms(llm, size, filters):.2f}" for size in BATCHES))
    Console().print(table)


if __name__ == "__main__":
    main()
