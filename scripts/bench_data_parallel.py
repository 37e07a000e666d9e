"""Weak scaling of data parallelism: n engines with n times the requests against one engine.

    python scripts/bench_data_parallel.py --model path/to/Qwen3-0.6B --size 2

Both run nano-vllm's offline workload, n engines n times `--requests` of it; `--runs` times each,
with another seed each time. The figure is the ratio of the medians of output tokens per second. On
CUDA every engine has a GPU of its own; on a CPU it is for trying the script out.
"""

from __future__ import annotations

import argparse
import json
import statistics
from pathlib import Path
from time import perf_counter
from typing import Any

from nanovllm import LLM
from nanovllm.bench.workload import MAX_LEN, NUM_REQUESTS, offline_workload

WARM_UP_SEED = 1_000_000


def tokens_per_second(llm: LLM, seed: int, num_requests: int, max_len: int) -> float:
    """Output tokens only; a cold prefix cache."""
    workload = offline_workload(seed, num_requests, max_len, llm.model_config.vocab_size)
    llm.reset_prefix_cache()
    begin = perf_counter()
    outputs = llm.generate(workload.prompts, workload.sampling_params(), use_tqdm=False)
    seconds = perf_counter() - begin
    lengths = [len(output.token_ids) for output in outputs]
    if lengths != list(workload.max_tokens):
        raise RuntimeError(f"some of {num_requests} requests ended early: {outputs[0].error}")
    return sum(lengths) / seconds


def measure(options: argparse.Namespace, engine: dict[str, Any]) -> dict[str, Any]:
    """Rates of each run, by number of engines, and their ratio."""
    # Actors first: they leave nothing on a GPU, while a closed engine leaves its CUDA context.
    rates: dict[int, list[float]] = {options.size: [], 1: []}
    for size, runs in rates.items():
        with LLM(options.model, data_parallel_size=size, **engine) as llm:
            tokens_per_second(llm, WARM_UP_SEED, size * 16, options.max_len)
            for seed in range(options.runs):
                num_requests = size * options.requests
                runs.append(tokens_per_second(llm, seed, num_requests, options.max_len))
    many, one = (statistics.median(runs) for runs in rates.values())
    return {"tokens_per_second": rates, "scaling": many / one}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model", type=Path, help="checkpoint; the embedded model if not given")
    parser.add_argument("--size", type=int, default=2, help="engines (default 2)")
    parser.add_argument("--requests", type=int, default=NUM_REQUESTS, help="requests an engine")
    parser.add_argument("--max-len", type=int, default=MAX_LEN, help="longest prompt and output")
    parser.add_argument("--runs", type=int, default=3, help="of each size (default 3)")
    parser.add_argument("--max-model-len", type=int, default=None)
    options = parser.parse_args()
    engine = {"max_model_len": options.max_model_len}
    print(json.dumps(measure(options, engine), indent=1))


if __name__ == "__main__":
    main()
