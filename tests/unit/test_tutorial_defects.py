"""Where the tutorial's own code is wrong, as behaviour: defects 1 to 7 of the requirements."""

from __future__ import annotations

import pytest
import torch
from core_door import Door

from nanovllm.engine.model_input import prepare_model_input
from nanovllm.engine.step import StepKind
from nanovllm.layers.layernorm import RMSNorm
from nanovllm.layers.sampler import RowSampling, Sampler, SamplingInput
from nanovllm.sampling_params import SamplingParams

EIGHT = [1, 2, 3, 4, 5, 6, 7, 8]


@pytest.mark.spec("PFX-6", "KV-8")
def test_defect_1_a_whole_prompt_hit_gives_a_row_and_a_token_of_its_own() -> None:
    door = Door(alphabet=range(100))
    (solo,) = door.run(EIGHT, max_tokens=1)
    other, hit = *door.add([9] * 5, max_tokens=1), *door.add(EIGHT, max_tokens=1)
    step = door.schedule()
    inputs = prepare_model_input(step, 4)
    assert [row.count for row in step.rows] == [5, 4]
    assert inputs.last_tokens.tolist() == [4, 8]
    door.commit(step)
    assert hit.completion_token_ids == solo.completion_token_ids != other.completion_token_ids


@pytest.mark.spec("PFX-2")
def test_defect_2_a_stale_entry_never_reads_another_prefix() -> None:
    door = Door(kvcache_block_size=2, num_kvcache_blocks=3)
    prompts = ([1, 1, 5, 5, 9], [2, 2, 5, 5], [1, 1, 5, 5, 8])
    cached = [door.run(prompt, max_tokens=1)[0].num_cached_tokens for prompt in prompts]
    assert cached == [0, 0, 2]


@pytest.mark.spec("PFX-4", "PFX-7")
def test_defect_3_blocks_are_published_when_computed_and_only_then() -> None:
    door = Door()
    door.add(EIGHT, max_tokens=1)
    door.fail_step(door.schedule())
    assert door.blocks.num_published_blocks == 0
    for i in range(20):
        (seq,) = door.run([i, *EIGHT[1:]], max_tokens=1)
        assert seq.num_cached_tokens == 0
    assert len(door.blocks.hash_to_block_ids) <= 8


@pytest.mark.spec("SCH-6", "SCH-14")
@pytest.mark.parametrize("policy", ["prefill_first", "mixed"])
def test_defect_4_a_preempted_request_that_outgrew_the_budget_returns(policy: str) -> None:
    door = Door(num_kvcache_blocks=5, max_num_batched_tokens=8, policy=policy)
    seqs = [*door.add([1] * 8, max_tokens=8), *door.add([2] * 8, max_tokens=8)]
    steps = door.drain()
    assert any(step.preempted for step in steps)
    assert [seq.num_completion_tokens for seq in seqs] == [8, 8]


@pytest.mark.spec("SEQ-6")
def test_defect_5_a_preempted_request_crosses_with_its_tokens() -> None:
    door = Door(num_kvcache_blocks=5, max_num_batched_tokens=8, enable_prefix_caching=False)
    door.add([1] * 8, max_tokens=8)
    (seq,) = door.add([2] * 8, max_tokens=8)
    crossed: list[int] = []
    num_known = 0
    while not seq.is_finished:
        step = door.schedule()
        if seq in step.preempted:
            num_known, crossed = seq.num_tokens, []
        for i, row in enumerate(step.rows):
            if row.seq is seq:
                inputs = prepare_model_input(step, 4)
                crossed += inputs.input_ids[slice(*inputs.cu_seqlens_q[i : i + 2])].tolist()
        door.commit(step)
    assert num_known > 8
    assert crossed == seq.token_ids[:-1]


@pytest.mark.spec("SCH-5", "SCH-7a")
def test_defect_6_idle_and_impossible_states_are_no_assertions() -> None:
    door = Door(num_kvcache_blocks=2)
    assert door.schedule().kind is StepKind.IDLE
    for prompt, message in (([], "0 tokens"), ([1] * 9, "9 tokens; the KV cache holds 8")):
        with pytest.raises(ValueError, match=message):
            door.add(prompt, max_tokens=1)
    assert door.schedule().kind is StepKind.IDLE
    assert door.run([1] * 8, max_tokens=1)[0].finish_reason == "length"


@pytest.mark.spec("SCH-3")
@pytest.mark.parametrize("policy", ["prefill_first", "mixed"])
def test_defect_7_seats_bound_the_running_set(policy: str) -> None:
    door = Door(max_num_seqs=2, max_num_batched_tokens=2, policy=policy, num_kvcache_blocks=32)
    for i in range(6):
        door.add([i + 1], max_tokens=8)
    seated = []
    while door.live:
        door.step()
        seated.append(len(door.scheduler.running))
    assert max(seated) == 2


@pytest.mark.spec("MOD-3")
def test_defect_8_norm_and_sampler_leave_their_inputs_alone() -> None:
    torch.manual_seed(0)
    x, residual, logits = torch.randn(3, 8), torch.randn(3, 8), torch.randn(2, 50)
    before = [t.clone() for t in (x, residual, logits)]
    norm = RMSNorm(8, 1e-6)
    norm.weight.data.fill_(1.5)
    norm(x)
    norm(x, residual)
    params = [SamplingParams(temperature=t, top_k=5, repetition_penalty=1.5) for t in (0.7, 0)]
    rows = [RowSampling(p, seed=1, position=3, prompt_token_ids=[1, 2]) for p in params]
    Sampler()(logits, SamplingInput.from_rows(rows))
    assert all(torch.equal(a, b) for a, b in zip(before, (x, residual, logits), strict=True))


@pytest.mark.spec("SMP-1")
def test_defect_11_there_is_a_greedy_mode() -> None:
    logits = torch.tensor([[0.0, 3.0, 3.0, 1.0], [5.0, 4.9, 0.0, 0.0]])
    rows = [RowSampling(SamplingParams(temperature=0), seed=s, position=1) for s in (1, 2)]
    assert Sampler()(logits, SamplingInput.from_rows(rows)).token_ids == [1, 0]
