"""Plain requests at a core door, for tests of adapters."""

from __future__ import annotations

from pathlib import Path

from nanovllm.conformance.protocol import Finished, Plan, RequestOptions, World
from nanovllm.conformance.transport import OpenDoor

ENGINES = Path(__file__).parent / "conformance_engines"
WORLD = World(block_size=2, num_blocks=6, max_num_batched_tokens=8, eos_token_ids=(0,))
PLAIN = RequestOptions()


def complete(
    door: OpenDoor, request: int, prompt: tuple[int, ...], max_tokens: int, token: int = 5
) -> tuple[list[Plan], list[Finished]]:
    """One request with `token` as every output."""
    door.add(request, prompt, max_tokens, PLAIN)
    known, plans, finished = len(prompt), [], []
    while not finished:
        plan = door.schedule()
        tokens = {row.id: token for row in plan.rows if row.end == known}
        known += len(tokens)
        finished = door.commit(plan.step, tokens)
        plans.append(plan)
    return plans, finished
