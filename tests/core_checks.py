"""What must hold at the core door after every call, one small check a requirement.

Checks of a state are called between any two calls, checks of a plan right after `schedule`. They
only read; `Book` says what is right, the scheduler and its plans are what is judged.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable
from typing import TYPE_CHECKING

from shadow_kv import History, require

from nanovllm.engine.block_manager import Prefix
from nanovllm.engine.sequence import FinishReason, Sequence, SequenceStatus
from nanovllm.engine.step import ScheduledStep

if TYPE_CHECKING:
    from core_book import Admission, Before, Entry
    from core_door import Door


def ceil_div(a: int, b: int) -> int:
    return -(-a // b)


# ---- a state ---------------------------------------------------------------------------------


def check_sequences(door: Door, entries: Iterable[Entry]) -> None:
    bs = door.config.kvcache_block_size
    for entry in entries:
        seq, n = entry.seq, len(entry.tokens)
        require(seq.token_ids == entry.tokens, "SCH-9", seq.token_ids, "of", entry)
        require(seq.prompt_token_ids == list(entry.prompt), "SEQ-5", "prompt of", entry)
        require(seq.completion_token_ids == entry.completion, "SEQ-5", "completion of", entry)
        require(seq.num_blocks == ceil_div(n, bs), "SEQ-3", seq.num_blocks, "of", entry)
        require(1 <= seq.last_block_num_tokens <= bs, "SEQ-3", "last block of", entry)
        require(seq.finish_reason == entry.reason, "SCH-12d", seq.finish_reason, "of", entry)
        require(seq.num_cached_tokens == entry.cached, "PFX-17", seq.num_cached_tokens, "of", entry)
        if entry.reason is not None:
            status = SequenceStatus.FINISHED
        else:
            status = SequenceStatus.RUNNING if entry.is_seated else SequenceStatus.WAITING
        require(seq.status is status, "SEQ-2", seq, "should be", status)
        require(list(seq.block_table) == entry.table, "BLK-4", seq.block_table, "of", entry)
        require(seq.params.seed == entry.params.seed, "FRK-1", "seed of", entry)


def check_queues(door: Door) -> None:
    running = [seq.seq_id for seq in door.scheduler.running]
    require(running == sorted(running), "SCH-11", "the batch is", running)
    require(set(running) == {e.seq_id for e in door.book.seated}, "SCH-3", "running", running)
    require(len(running) <= door.config.max_num_seqs, "SCH-3", "running", running)
    waiting = [seq.seq_id for seq in door.scheduler.waiting]
    require(waiting == [e.seq_id for e in door.book.queued], "SCH-8, SCH-10", "queue", waiting)
    followers = {k: [s.seq_id for s in seqs] for k, seqs in door.scheduler.followers.items()}
    require(followers == door.book.followers, "FRK-2, FRK-3", "followers", followers)
    require(door.scheduler.is_finished() == (not door.book.live), "SCH-5", "is_finished")


def check_pool(door: Door) -> None:
    pool, n = door.blocks, door.config.num_kvcache_blocks
    free = list(pool.free_block_ids)
    used = [block.block_id for block in pool.blocks if block.ref_count > 0]
    require(sorted(free + used) == list(range(n)), "BLK-1", "free", free, "used", used, "of", n)
    tables = {entry.seq_id: list(entry.seq.block_table) for entry in door.book.live}
    held = Counter(block_id for table in tables.values() for block_id in table)
    counts = {block.block_id: block.ref_count for block in pool.blocks if block.ref_count}
    require(counts == held, "BLK-2", "ref counts", counts, "tables", tables)


def check_tables_read_their_own(door: Door) -> None:
    for entry in door.book.seated:
        history = History(entry.root, tuple(entry.tokens[: entry.num_computed]))
        door.shadow.read(history, entry.table)


def check_shared_blocks_are_full(door: Door) -> None:
    if door.pending:
        return
    bs = door.config.kvcache_block_size
    for entry in door.book.seated:
        for i, block_id in enumerate(entry.table):
            shared = door.book.num_holders(block_id) > 1
            full = (i + 1) * bs <= entry.num_computed
            require(full or not shared, "BLK-8", "block", block_id, "of", entry, "is shared")


def history_of(prefix: Prefix) -> History:
    tokens: tuple[int, ...] = ()
    link: Prefix | None = prefix
    while link is not None:
        raw = link.tokens
        ids = (int.from_bytes(raw[i : i + 4], "little") for i in range(0, len(raw), 4))
        tokens = (*ids, *tokens)
        link = link.parent
    return History(prefix.salt, tokens)


def check_published(door: Door) -> None:
    pool = door.blocks
    prefixes = {b.block_id: b.prefix for b in pool.blocks if b.prefix is not None}
    listed = [(h, block_id) for h, ids in pool.hash_to_block_ids.items() for block_id in ids]
    expected = sorted((prefix.hash, block_id) for block_id, prefix in prefixes.items())
    require(sorted(listed) == expected, "PFX-7", "the map lists", listed)
    require(len(listed) <= door.config.num_kvcache_blocks, "PFX-7", len(listed), "entries")
    claimed = {block_id: history_of(prefix) for block_id, prefix in prefixes.items()}
    for block_id, history in claimed.items():
        holds = door.shadow.holds(history, block_id)
        require(holds, "PFX-4, PFX-7", "block", block_id, "does not hold", history)
    published = door.book.published
    require(claimed == published, "PFX-3, PFX-8, PFX-16", "claims", claimed, "not", published)


def check_stats(door: Door) -> None:
    stats, book = door.scheduler.stats, door.book
    require(stats.num_computed_tokens == book.num_computed_tokens, "PFX-17", stats)
    require(stats.num_steps == book.num_steps, "API-8", stats)
    require(stats.num_preemptions == book.num_preemptions, "PFX-17", stats)
    cached = book.num_cached_tokens
    require(stats.num_cached_tokens == cached, "PFX-17", stats, "but", cached, "were cached")


def check_state(door: Door) -> None:
    check_sequences(door, door.book.live)
    check_queues(door)
    check_pool(door)
    check_tables_read_their_own(door)
    check_shared_blocks_are_full(door)
    check_published(door)
    check_stats(door)


# ---- a plan ----------------------------------------------------------------------------------


def check_rows(door: Door, before: Before, step: ScheduledStep) -> None:
    config, bs = door.config, door.config.kvcache_block_size
    ids = [row.seq.seq_id for row in step.rows]
    require(step.step_id == door.book.num_steps - bool(ids), "API-5", "step", step.step_id)
    total = sum(row.count for row in step.rows)
    require(total <= config.max_num_batched_tokens, "SCH-2", total, "tokens in a plan")
    require(step.num_tokens == total, "SCH-2", "num_tokens is", step.num_tokens, "not", total)
    require(len(set(ids)) == len(ids), "SCH-4", "rows of", ids)
    for row in step.rows:
        entry = door.book.entries[row.seq.seq_id]
        require(entry.reason is None, "SCH-13", entry, "has ended and has a row")
        require(row.count >= 1, "SCH-4", "an empty row of", entry)
        require(row.end <= len(entry.tokens), "KV-7", row.start, "+", row.count, "of", entry)
        require(row.start == entry.num_computed, "KV-7", entry, "goes on at", row.start)
        require(row.samples == (row.end == len(entry.tokens)), "SCH-14", "sampling of", entry)
        held = len(row.block_table)
        require(held == ceil_div(row.end, bs), "BLK-4, BLK-5", held, "blocks up to", row.end)
        kept = before.tables.get(entry.seq_id, [])
        require(list(row.block_table[: len(kept)]) == kept, "BLK-4", entry, "had", kept)


def check_idle(door: Door, before: Before, step: ScheduledStep) -> None:
    has_work = bool(door.book.live) and not before.in_flight
    require(bool(step.rows) == has_work, "SCH-5", len(step.rows), "rows for", door.book.live)


def check_preemption(door: Door, before: Before, step: ScheduledStep) -> None:
    """Newest first; never the oldest; whoever lost its blocks has no row in this plan."""
    victims = [seq.seq_id for seq in step.preempted]
    rows = {row.seq.seq_id for row in step.rows}
    survivors = [entry.seq_id for entry in before.seated if entry.is_seated]
    require(rows.isdisjoint(victims), "SCH-8", "rows", rows, "victims", victims)
    require(victims == sorted(victims, reverse=True), "SCH-8", "victims", victims)
    if victims:
        require(survivors, "SCH-8", "the oldest of", before.seated, "was preempted")
        require(max(survivors) < min(victims), "SCH-8", victims, "instead of", survivors)


def check_admission(
    door: Door, before: Before, step: ScheduledStep, admissions: list[Admission]
) -> None:
    """First come, first served; and whoever fits an engine where nothing runs is let in."""
    order = [admission.entry.seq_id for admission in admissions]
    queue = [entry.seq_id for entry in before.queued]
    require(order == queue[: len(order)], "SCH-1, SCH-10", "admitted", order, "of", queue)
    if queue and not before.seated and not before.in_flight:
        require(order, "PFX-10", "nothing runs, and", before.queued[0], "is not admitted")


def check_head_of_queue(door: Door, before: Before, step: ScheduledStep) -> None:
    """It stays out of a mixed plan only for want of a seat, of budget or of blocks."""
    config, queue = door.config, door.book.queued
    if config.policy != "mixed" or before.in_flight or step.preempted or not queue:
        return
    seat = len(door.book.seated) < config.max_num_seqs
    if seat and step.num_tokens < config.max_num_batched_tokens:
        require(not door.book.fits(queue[0]), "PFX-10, SCH-16", queue[0], "is not admitted")


def check_hits(door: Door, admissions: list[Admission]) -> None:
    bs = door.config.kvcache_block_size
    for a in admissions:
        require(a.num_cached <= a.num_tokens - 1, "PFX-6", a.num_cached, "cached of", a.entry)
        require(a.num_cached % bs == 0, "PFX-3", a.num_cached, "cached of", a.entry)
        if not door.injected_hash:
            complete = bs * min(a.resident, (a.num_tokens - 1) // bs)
            require(a.num_cached == complete, "PFX-5, PFX-11", a.num_cached, "cached:", a)


def check_eviction_order(door: Door, before: Before, step: ScheduledStep) -> None:
    """No published block was reused while one released before it stayed free (PFX-9)."""
    free = set(door.book.released_at)
    for row in step.rows:
        kept = before.tables.get(row.seq.seq_id, [])
        for block_id in row.block_table[max(len(kept), row.start // door.blocks.block_size) :]:
            if block_id not in before.published:
                continue
            released = before.released_at.get(block_id, math.inf)
            older = [
                other
                for other, when in before.released_at.items()
                if other in free and other in before.published and when < released
            ]
            require(not older, "PFX-9", "block", block_id, "is reused before", older)


def check_service(door: Door, before: Before, step: ScheduledStep) -> None:
    """A running request advances in one of M steps, in each of a mixed plan; no decode starves."""
    if not step.rows:
        return
    mixed = door.config.policy == "mixed"
    bound = 0 if mixed else door.config.max_consecutive_prefills
    served = {row.seq.seq_id for row in step.rows}
    for entry in door.book.live:
        idle = entry.seq_id not in served and entry.is_seated
        entry.steps_without_row = entry.steps_without_row + 1 if idle else 0
        require(entry.steps_without_row <= bound, "SCH-6", entry, "starves")
    starved = before.decoding.intersection(e.seq_id for e in door.book.seated)
    waits = starved and served.isdisjoint(starved)
    door.book.prefill_streak = door.book.prefill_streak + 1 if waits else 0
    require(door.book.prefill_streak <= bound, "SCH-1", starved, "wait to decode")


def check_plan(
    door: Door, before: Before, step: ScheduledStep, admissions: list[Admission]
) -> None:
    check_rows(door, before, step)
    check_idle(door, before, step)
    check_preemption(door, before, step)
    check_admission(door, before, step, admissions)
    check_head_of_queue(door, before, step)
    check_hits(door, admissions)
    check_eviction_order(door, before, step)
    check_service(door, before, step)


# ---- the end of a sequence -------------------------------------------------------------------


def check_ended(door: Door, ended: Iterable[Sequence], expected: list[Entry]) -> None:
    ids, wanted = [seq.seq_id for seq in ended], [entry.seq_id for entry in expected]
    require(ids == wanted, "SCH-12, SCH-15", ids, "ended, not", wanted)
    check_sequences(door, expected)
    for entry in expected:
        completion, reason = door.book.oracle(entry, door.alphabet)
        if entry.reason in (FinishReason.STOP, FinishReason.LENGTH):
            same = (entry.completion, entry.reason) == (completion, reason)
        else:
            same = entry.completion == completion[: len(entry.completion)]
        require(same, "SCH-9", entry, "ended by", entry.reason, "alone:", completion, reason)
