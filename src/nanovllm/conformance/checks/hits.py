"""PFX: what a request found in the prefix cache when it was admitted."""

from __future__ import annotations

from collections.abc import Iterator

from nanovllm.conformance.book import Book
from nanovllm.conformance.checks.check import Require, check
from nanovllm.conformance.entries import Admission, Seating
from nanovllm.conformance.events import Ended, Executed, Planned
from nanovllm.conformance.shadow import Misread


def hits_of(executed: Executed) -> Iterator[tuple[Seating, list[Misread]]]:
    """Admissions that found something, and what of it is not their own.

    What another row of the same plan has just overwritten is not the cache's fault (BLK-8).
    """
    for seating, reading in zip(executed.flight.seatings, executed.readings, strict=True):
        if seating.is_admission and seating.row.start:
            wrong = [
                misread
                for misread in reading.misreads
                if misread.position < seating.row.start and misread.before is not misread.wanted
            ]
            yield seating, wrong


def was_meant(book: Book, misread: Misread) -> bool:
    """Whether the block was taken for what is looked for there, but it was not computed (yet)."""
    if misread.block is None or misread.block not in book.blocks.meant:
        return False
    entry, index = book.blocks.meant[misread.block]
    i = misread.position
    in_block = index == i // book.world.block_size
    return in_block and i < len(entry.path) and entry.path[i] is misread.wanted


def is_foreign(misread: Misread) -> bool:
    """Whether the slot holds what is looked for, of another salt."""
    found, wanted = misread.found, misread.wanted
    return found is not None and found.salt != wanted.salt and found.tokens == wanted.tokens


def judged(planned: Planned) -> tuple[Admission, ...]:
    """Admissions of which it is known what they should have found."""
    book = planned.book
    certain = book.caches and not (planned.before.num_in_flight or planned.before.uncertain)
    return planned.flight.admissions if certain else ()


# ---- what is found is right --------------------------------------------------------------------


@check("PFX-2", Executed, "prefix_cache")
def another_prefix_is_never_a_hit(executed: Executed, require: Require) -> None:
    for seating, wrong in hits_of(executed):
        other = [
            misread
            for misread in wrong
            if misread.found is not None
            and not is_foreign(misread)
            and not was_meant(executed.book, misread)
        ]
        require(not other, seating.entry, "at", *other[:1])


@check("PFX-4", Executed, "prefix_cache")
def what_was_not_computed_is_never_a_hit(executed: Executed, require: Require) -> None:
    for seating, wrong in hits_of(executed):
        missing = [
            misread
            for misread in wrong
            if misread.found is None or was_meant(executed.book, misread)
        ]
        require(not missing, seating.entry, "at", *missing[:1])


@check("PFX-14", Executed, "prefix_cache", "salt")
def salts_never_share(executed: Executed, require: Require) -> None:
    for seating, wrong in hits_of(executed):
        foreign = [misread for misread in wrong if is_foreign(misread)]
        require(not foreign, seating.entry, "at", *foreign[:1])


@check("PFX-14", Planned, "prefix_cache", "salt")
def content_of_another_salt_is_no_hit(planned: Planned, require: Require) -> None:
    """Judges the admissions that would have found it."""
    bs, resident = planned.book.world.block_size, planned.book.blocks.resident
    for admission in judged(planned):
        salt, row = admission.entry.options.salt, admission.seating.row
        first = admission.entry.contents(bs)[:1]
        contents = {found.content for found in planned.before.resident.values()}
        others = [c for c in contents if c.depth == bs and c.salt != salt]
        if first and any(other.tokens == first[0].tokens for other in others):
            hits = [b for b in row.block_table[: row.start // bs] if b in resident]
            foreign = [b for b in hits if resident[b].content.salt != salt]
            require(not foreign, admission.entry, "finds blocks of another salt:", foreign)


@check("PFX-3", Planned, "prefix_cache")
def only_full_blocks_are_hits(planned: Planned, require: Require) -> None:
    """A prompt that is resident as a whole is cut to leave a token (PFX-6)."""
    bs = planned.book.world.block_size
    copies = "cow" in planned.book.hello.capabilities
    for admission in planned.flight.admissions:
        n, cached = admission.num_known, admission.num_cached
        if copies and admission.entry.id.sample:
            continue
        whole = n % bs == 0 and cached >= n - bs
        require(cached % bs == 0 or whole, cached, "of", n, "tokens are cached of", admission.entry)


@check("PFX-5", Planned, "prefix_cache")
def hits_end_at_the_first_miss(planned: Planned, require: Require) -> None:
    """Behind what was found, no block is one that another request already had."""
    bs, before = planned.book.world.block_size, planned.before
    for admission in planned.flight.admissions:
        row, contents = admission.seating.row, admission.entry.contents(bs)
        found = {resident.content for resident in before.resident.values()}
        theirs = {
            block_id
            for entry in before.seated
            if entry.seated and entry is not admission.entry
            for block_id in before.tables[entry.id]
        }
        num_hits = -(-row.start // bs)
        r = num_hits
        while r < len(contents) and contents[r] in found:
            r += 1
        late = [b for b in row.block_table[r:] if b in theirs]
        require(not late, admission.entry, "misses block", r, "and shares", late, "behind it")


@check("PFX-5", Executed, "prefix_cache")
def misses_are_not_jumped_over(executed: Executed, require: Require) -> None:
    """Nor is a block behind the first miss a hit because its own tokens are cached."""
    bs = executed.book.world.block_size
    for seating, wrong in hits_of(executed):
        first = min((misread.position // bs for misread in wrong), default=0)
        later = [m for m in wrong if _looked_for(seating, m, bs) > first]
        require(not later, seating.entry, "misses block", first, "and at", *later[:1])


def _looked_for(seating: Seating, misread: Misread, block_size: int) -> int:
    """The block of the request whose token was found in this slot; -1 if it is none's."""
    found, path = misread.found, seating.entry.path
    if found is None or found.depth <= misread.position or found.depth > len(path):
        return -1
    same = path[found.depth - 1].token == found.token
    return (found.depth - 1) // block_size if same else -1


@check("PFX-6", Planned, "prefix_cache")
def a_token_is_left_to_compute(planned: Planned, require: Require) -> None:
    for admission in planned.flight.admissions:
        n, cached, count = admission.num_known, admission.num_cached, admission.seating.row.count
        left = cached <= n - 1 and count >= 1
        require(left, cached, "cached and", count, "computed of the", n, "of", admission.entry)


# ---- all that is there is found ------------------------------------------------------------------


@check("PFX-8", Planned, "prefix_cache")
def freed_blocks_are_found(planned: Planned, require: Require) -> None:
    book, bs = planned.book, planned.book.world.block_size
    for admission in judged(planned):
        run = admission.run[: (admission.num_known - 1) // bs]
        freed = [c for c in run if all(not planned.before.held.get(r.block) for r in c)]
        if not any(not r.generated for copies in freed for r in copies):
            continue
        missed = admission.missed(bs)
        lost = (
            missed in freed
            and not missed[0].generated
            and missed[0].content not in book.blocks.lost
        )
        require(not lost, admission.entry, "does not find", missed[:1], "which is free")


@check("PFX-11", Planned, "prefix_cache")
def hits_are_complete(planned: Planned, require: Require) -> None:
    book, bs = planned.book, planned.book.world.block_size
    for admission in judged(planned):
        least, cached = admission.least(bs), admission.num_cached
        missed = admission.missed(bs)
        hidden = bool(missed) and missed[0].content in book.blocks.lost
        message = (admission.entry, "finds", cached, "tokens cached,", least, "are")
        require(cached >= least or hidden, *message)


@check("PFX-13", Planned, "prefix_cache")
def parameters_do_not_matter(planned: Planned, require: Require) -> None:
    """What a request with other parameters computed is found as well."""
    bs = planned.book.world.block_size
    for admission in judged(planned):
        entry = admission.entry
        run = admission.run[: (admission.num_known - 1) // bs]
        others = [c for c in run if all(_differ(r.producer, entry) for r in c)]
        if others:
            missed = admission.missed(bs)
            hidden = missed in others and missed[0].content not in planned.book.blocks.lost
            require(not hidden, entry, "does not find", missed[:1])


def _differ(producer: object, entry: object) -> bool:
    """Whether two requests ask for different things beyond their prompts."""
    names = ("max_tokens", "options")
    return any(getattr(producer, name) != getattr(entry, name) for name in names)


@check("PFX-15", Planned, "prefix_cache")
def lost_copy_does_not_hide_another(planned: Planned, require: Require) -> None:
    book, bs = planned.book, planned.book.world.block_size
    for admission in judged(planned):
        run = admission.run[: (admission.num_known - 1) // bs]
        if any(copies[0].content in book.blocks.lost for copies in run):
            missed = admission.missed(bs)
            hidden = bool(missed) and missed[0].content in book.blocks.lost
            require(not hidden, admission.entry, "does not find the copy in", missed[:1])


@check("PFX-15", Ended, "prefix_cache")
def twins_equal_solo_runs(ended: Ended, require: Require) -> None:
    entry = ended.entry
    if ended.alone is not None and entry.is_twin and entry.reason in ("stop", "length"):
        got = entry.completion, entry.reason
        require(got == ended.alone, entry, "ended by", entry.reason, "alone:", *ended.alone)


@check("PFX-16", Planned, "prefix_cache")
def generated_blocks_are_found(planned: Planned, require: Require) -> None:
    """Full blocks of outputs, of requests that finished or were preempted."""
    book, bs = planned.book, planned.book.world.block_size
    for admission in judged(planned):
        run = admission.run[: (admission.num_known - 1) // bs]
        generated = [
            copies for copies in run if all(r.generated and not r.producer.seated for r in copies)
        ]
        if generated:
            missed = admission.missed(bs)
            lost = missed in generated and missed[0].content not in book.blocks.lost
            require(not lost, admission.entry, "does not find", missed[:1])
