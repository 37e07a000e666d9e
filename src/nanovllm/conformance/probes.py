"""Short experiments that show whether an engine has a capability, at the blocks and core doors.

`doctor` compares them with what the engine declares. Each is a function of a door that raises
`Absent` if the capability is not there; `engine_probes` has those of the engine door.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import replace

from nanovllm.conformance.protocol import (
    BlocksDoor,
    CoreDoor,
    Finished,
    Plan,
    RequestId,
    RequestOptions,
    Row,
    Unsupported,
    World,
)

EOS = 7
WORLD = World(block_size=2, num_blocks=8, max_num_batched_tokens=16, eos_token_ids=(EOS,))
PLAIN = RequestOptions()
MAX_STEPS = 40


class Absent(Exception):  # noqa: N818
    """The engine does not behave as one that has the capability."""


def expect(holds: object, message: str) -> None:
    if not holds:
        raise Absent(message)


# ---- core ------------------------------------------------------------------------------------


def commit(door: CoreDoor, plan: Plan, lengths: dict[RequestId, int], token: int) -> list[Finished]:
    """Give `token` to each row that reaches the last known one of `lengths`, and count it there."""
    strangers = [row.id for row in plan.rows if row.id not in lengths]
    expect(not strangers, f"rows of {strangers}, who are not there")
    tokens = {row.id: token for row in plan.rows if row.end == lengths[row.id]}
    for id in tokens:
        lengths[id] += 1
    return door.commit(plan.step, tokens)


def run(
    door: CoreDoor,
    request: int,
    prompt: Iterable[int],
    *,
    max_tokens: int = 3,
    options: RequestOptions = PLAIN,
    token: int = 5,
) -> tuple[list[Plan], list[Finished]]:
    """Complete one request with `token` as every output; its plans, and who ended."""
    tokens = tuple(prompt)
    door.add(request, tokens, max_tokens, options)
    lengths = {RequestId(request, i): len(tokens) for i in range(options.n)}
    plans: list[Plan] = []
    finished: list[Finished] = []
    while len(finished) < options.n:
        expect(len(plans) < MAX_STEPS, f"request {request} has not ended after {MAX_STEPS} steps")
        plans.append(door.schedule())
        expect(plans[-1].rows, f"nothing was planned, but request {request} has not ended")
        finished += commit(door, plans[-1], lengths, token)
    return plans, finished


def first_start(plans: list[Plan]) -> int:
    """Where the first row starts: as many tokens were cached."""
    return plans[0].rows[0].start


def only_row(plan: Plan) -> Row:
    expect(len(plan.rows) == 1, f"one request, and the rows {plan.rows}")
    return plan.rows[0]


def probe_steps(door: CoreDoor) -> None:
    door.reset(WORLD)
    plans, finished = run(door, 0, (1, 2, 3))
    counts = [row.count for plan in plans for row in plan.rows]
    expect(counts[-2:] == [1, 1], f"3 outputs were planned as rows of {counts} tokens")
    expect(finished == [Finished(RequestId(0), "length")], f"it ended as {finished}")


def probe_abort(door: CoreDoor) -> None:
    door.reset(WORLD)
    door.add(0, (1, 2, 3), 3, PLAIN)
    expect(door.abort(0) is True, "the abort of a waiting request said no")
    expect(door.abort(0) is False, "the second abort of a request said yes")
    expect(not door.schedule().rows, "an aborted request was planned")


def probe_chunked_prefill(door: CoreDoor) -> None:
    door.reset(replace(WORLD, max_num_seqs=2, max_num_batched_tokens=2))
    plans, _ = run(door, 0, (1, 2, 3, 4, 5))
    counts = [row.count for plan in plans for row in plan.rows]
    expect(max(counts) <= 2, f"with 2 tokens a step, rows have {counts}")


def probe_prefix_cache(door: CoreDoor) -> None:
    door.reset(WORLD)
    run(door, 0, (1, 2, 3, 4, 5))
    plans, _ = run(door, 1, (1, 2, 3, 4, 5))
    expect(first_start(plans), "the same prompt, a second time, was computed from its first token")
    with suppress(Unsupported):  # it need not offer this world, but is not to pretend
        door.reset(replace(WORLD, prefix_cache=False))
        run(door, 0, (1, 2, 3, 4, 5))
        plans, _ = run(door, 1, (1, 2, 3, 4, 5))
        expect(not first_start(plans), "with prefix_cache=False in the world, a prompt was cached")


def probe_salt(door: CoreDoor) -> None:
    door.reset(WORLD)
    run(door, 0, (1, 2, 3, 4, 5), options=RequestOptions(salt="red"))
    plans, _ = run(door, 1, (1, 2, 3, 4, 5), options=RequestOptions(salt="blue"))
    expect(first_start(plans) == 0, "another salt was a hit")


def probe_min_tokens(door: CoreDoor) -> None:
    door.reset(WORLD)
    _, early = run(door, 0, (1, 2, 3), token=EOS)
    expect(early[0].reason == "stop", f"an eos ended it as {early[0].reason}")
    plans, _ = run(door, 1, (1, 2, 3), options=RequestOptions(min_tokens=2), token=EOS)
    expect(len(plans) == 3, f"min_tokens=2 and nothing but eos: {len(plans)} outputs, not 3")


def probe_stop(door: CoreDoor) -> None:
    door.reset(WORLD)
    plans, finished = run(door, 0, (1, 2, 3), options=RequestOptions(stop_token_ids=(5,)))
    expect(len(plans) == 1, f"a stop id as first output: {len(plans)} outputs")
    expect(finished[0].reason == "stop", f"a stop id ended it as {finished[0].reason}")


def probe_n(door: CoreDoor) -> None:
    door.reset(WORLD)
    _, finished = run(door, 0, (1, 2, 3), options=RequestOptions(n=2))
    ids = sorted(f.id for f in finished)
    expect(ids == [RequestId(0, 0), RequestId(0, 1)], f"of 2 samples, {ids} ended")


def probe_cow(door: CoreDoor) -> None:
    door.reset(WORLD)
    plans, _ = run(door, 0, (1, 2, 3), options=RequestOptions(n=2))
    expect(any(plan.copies for plan in plans), "two samples of 3 tokens, and no block was copied")


def probe_fail_step(door: CoreDoor) -> None:
    door.reset(WORLD)
    door.add(0, (1, 2, 3), 3, PLAIN)
    failed = door.fail_step(door.schedule().step)
    expect(all(f.reason == "error" for f in failed), f"a failed step ended {failed}")
    if failed:
        run(door, 1, (4, 5, 6))


def probe_pool(door: CoreDoor) -> None:
    door.reset(WORLD)
    door.add(0, (1, 2, 3), 3, PLAIN)
    row = only_row(door.schedule())
    view = door.pool()
    used = {block for block, count in view.ref_counts.items() if count}
    everything = sorted([*view.free, *used, *view.reserved])
    expect(
        everything == list(range(WORLD.num_blocks)),
        f"free, used and reserved are {everything}, not the {WORLD.num_blocks} blocks",
    )
    expect(used >= set(row.block_table), f"{row} is planned, {used} are used")


def probe_hash(door: CoreDoor) -> None:
    door.reset(WORLD)
    hashes = [door.hash((1, 2), None), door.hash((1, 3), None)]
    hashes.append(door.hash((1, 2), hashes[0]))
    expect(len(set(hashes)) == 3, f"three prefixes have the hashes {hashes}")


def probe_hash_override(door: CoreDoor) -> None:
    door.reset(replace(WORLD, hash="constant"))
    run(door, 0, (1, 2, 3, 4, 5))
    run(door, 1, (1, 2, 4, 4, 5))
    declared = door.hello().capabilities
    if "hash" in declared:
        hashes = {door.hash((1, 2), None), door.hash((1, 3), None)}
        expect(len(hashes) == 1, f"a constant hash gives {sorted(hashes)}")
    else:
        expect("hash_override" in declared, "without the capability hash it does not show")


def probe_stats(door: CoreDoor) -> None:
    door.reset(WORLD)
    run(door, 0, (1, 2, 3))
    lookups = door.stats().num_lookup_tokens
    expect(lookups == 3, f"after a prompt of 3 tokens, {lookups} were looked up")


def probe_wire(door: CoreDoor) -> None:
    door.reset(WORLD)
    door.add(0, (1, 2, 3), 3, PLAIN)
    size = door.wire(only_row(door.schedule()).id)
    expect(size > 0, f"a row of 3 tokens takes {size} bytes")


def probe_ahead(door: CoreDoor) -> None:
    door.reset(WORLD)
    door.add(0, (1, 2, 3), 3, PLAIN)
    first = door.schedule()
    door.schedule()
    door.commit(first.step, {RequestId(0): 5})


CORE_PROBES: Mapping[str, Callable[[CoreDoor], None]] = {
    "abort": probe_abort,
    "chunked_prefill": probe_chunked_prefill,
    "cow": probe_cow,
    "fail_step": probe_fail_step,
    "hash": probe_hash,
    "hash_override": probe_hash_override,
    "min_tokens": probe_min_tokens,
    "n": probe_n,
    "pool": probe_pool,
    "prefix_cache": probe_prefix_cache,
    "salt": probe_salt,
    "stats": probe_stats,
    "stop": probe_stop,
    "wire": probe_wire,
}


# ---- blocks ----------------------------------------------------------------------------------


def probe_blocks(door: BlocksDoor) -> None:
    """All of the door, on a pool of 8 blocks of 2 tokens."""
    door.reset(WORLD)
    got = door.allocate(0, (1, 2, 3))
    expect(got is not None and len(got[0]) == 2, f"3 tokens were given {got}")
    table = door.append(0, 4)
    expect(table is not None and len(table) == 2, f"with a 4th token they have {table}")
    expect(door.allocate(1, (5,) * 17) is None, "17 tokens were given blocks that do not exist")
    used = sum(count > 0 for count in door.pool().ref_counts.values())
    expect(used == 2, f"{used} blocks are in use, not 2")
    door.release(0)
    expect(len(door.pool().free) == WORLD.num_blocks, f"after the release {door.pool().free} are")


def probe_lookup(door: BlocksDoor) -> None:
    """`prefix_cache` at the blocks door."""
    door.reset(WORLD)
    door.allocate(0, (1, 2, 3))
    found = door.lookup((1, 2, 3))
    expect(found == 2, f"of the tokens 1, 2, 3 in blocks of 2, {found} are cached, not 2")
