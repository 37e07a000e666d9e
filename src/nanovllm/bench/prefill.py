"""A prefill of equal prompts: how long the device is busy, and at what share of its matmul rate."""

from __future__ import annotations

from dataclasses import dataclass

from nanovllm.bench.kernels import Kernel, profiled
from nanovllm.bench.roofline import DeviceRates, ModelCosts
from nanovllm.bench.workload import batch_workload
from nanovllm.llm import LLM

NUM_PROMPTS, PROMPT_LEN = 16, 1024
PROFILED_PREFILLS = 3


@dataclass(frozen=True)
class PrefillRun:
    """On average of a few prefills; on a CPU the kernels are torch's operators.

    Attributes:
        flops: of all products with weights, of this rank.
        attention_flops: of attention's own, the causal half.
    """

    num_prompts: int
    prompt_len: int
    flops: int
    attention_flops: int
    kernels: list[Kernel]

    @property
    def us(self) -> float:
        return sum(kernel.us for kernel in self.kernels)

    def matmul_share(self, rates: DeviceRates, *, attention: bool = True) -> float:
        """Of the rate of a large product, which all of it would take at least."""
        flops = self.flops + attention * self.attention_flops
        return flops / (rates.matmul * self.us / 1e6)


def run_prefill(
    llm: LLM, num_prompts: int = NUM_PROMPTS, prompt_len: int = PROMPT_LEN
) -> PrefillRun:
    """Profiles prompts that share nothing, after one prefill to warm up."""
    llm.reset_prefix_cache()
    vocab_size = llm.model_config.vocab_size
    work = batch_workload(0, (1 + PROFILED_PREFILLS) * num_prompts, prompt_len, 1, vocab_size)
    requests = list(zip(work.prompts, work.sampling_params(), strict=True))

    def prefill(round: int) -> None:
        for prompt, params in requests[round * num_prompts :][:num_prompts]:
            llm.add_request(prompt, params)
        while not llm.is_finished():
            llm.step()

    prefill(0)
    kernels = profiled(llm, PROFILED_PREFILLS, lambda i: prefill(1 + i))
    costs, model = ModelCosts.of(llm), llm.model_config
    heads = model.num_attention_heads // llm.model_runner.tp.size
    pairs = num_prompts * prompt_len * (prompt_len + 1) // 2
    return PrefillRun(
        num_prompts,
        prompt_len,
        num_prompts * (prompt_len * costs.token_flops + costs.head_flops),
        4 * pairs * heads * model.head_dim * model.num_hidden_layers,
        kernels,
    )
