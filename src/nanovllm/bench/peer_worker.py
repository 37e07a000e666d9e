"""Runs workloads on a peer: `python peer_worker.py JOB.json RESULT.json`.

It runs in the peer's environment, so it imports nothing of this package, and is a script.
"""

from __future__ import annotations

import json
import os
import sys
import time
from importlib.metadata import PackageNotFoundError, version
from typing import Any

Job = dict[str, Any]
Prompts = list[list[int]]

HF_BATCH_SIZE = 32


class VllmLike:
    """vLLM and nano-vllm: one call takes all requests."""

    def __init__(
        self, module: Any, job: Job, prompt_key: str | None = None, **options: Any
    ) -> None:
        self.params, self.temperature = module.SamplingParams, job["temperature"]
        self.prompt_key = prompt_key
        self.llm = module.LLM(job["model"], max_model_len=job["max_model_len"], **options)

    def generate(self, prompts: Prompts, max_tokens: list[int]) -> None:
        params = [
            self.params(temperature=self.temperature, ignore_eos=True, max_tokens=count)
            for count in max_tokens
        ]
        keyed = [{self.prompt_key: prompt} for prompt in prompts]
        self.llm.generate(keyed if self.prompt_key else prompts, params, use_tqdm=False)


class HuggingFace:
    """`generate` in static batches of requests of similar length, padded on the left."""

    def __init__(self, module: Any, job: Job) -> None:
        import torch

        self.torch, self.temperature = torch, job["temperature"]
        self.device = "cuda" if torch.cuda.is_available() else "cpu"
        model = module.AutoModelForCausalLM.from_pretrained(job["model"], dtype="auto")
        self.model = model.to(self.device).eval()

    def generate(self, prompts: Prompts, max_tokens: list[int]) -> None:
        order = sorted(range(len(prompts)), key=lambda i: max_tokens[i])
        for begin in range(0, len(order), HF_BATCH_SIZE):
            batch = order[begin : begin + HF_BATCH_SIZE]
            self._batch([prompts[i] for i in batch], max(max_tokens[i] for i in batch))

    def _batch(self, prompts: Prompts, steps: int) -> None:
        width = max(map(len, prompts))
        ids = [[0] * (width - len(prompt)) + prompt for prompt in prompts]
        mask = [[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts]
        with self.torch.inference_mode():
            self.model.generate(
                self.torch.tensor(ids, device=self.device),
                attention_mask=self.torch.tensor(mask, device=self.device),
                max_new_tokens=steps,
                min_new_tokens=steps,
                do_sample=True,
                temperature=self.temperature,
                pad_token_id=0,
            )


def load(job: Job) -> tuple[VllmLike | HuggingFace, str]:
    """The peer's engine and its version."""
    name = job["peer"]
    if name == "vllm":
        import vllm

        return VllmLike(vllm, job, "prompt_token_ids", skip_tokenizer_init=True), release("vllm")
    if name == "hf":
        import transformers

        return HuggingFace(transformers, job), release("transformers")
    import nanovllm

    if os.path.realpath(os.path.dirname(nanovllm.__file__)) == os.path.realpath(job["not_this"]):
        raise ImportError("`nanovllm` is this package here, not the peer: give --peer-path")
    return VllmLike(nanovllm, job), release("nano-vllm")


def release(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "(unknown version)"


def main(job_path: str, result_path: str) -> None:
    with open(job_path) as file:
        job = json.load(file)
    engine, peer_version = load(job)
    # Whatever compiles or grows on first use does so here.
    engine.generate([run["prompts"][0] for run in job["runs"]], [4] * len(job["runs"]))
    seconds = []
    for run in job["runs"]:
        begin = time.perf_counter()
        engine.generate(run["prompts"], run["max_tokens"])
        seconds.append(time.perf_counter() - begin)
    with open(result_path, "w") as file:
        json.dump({"version": peer_version, "seconds": seconds}, file)


if __name__ == "__main__":
    # The directory of a script comes first on its path, and has modules of this package.
    sys.path.pop(0)
    main(*sys.argv[1:])
