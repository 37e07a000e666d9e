"""The core door's own book of every sequence and block, written from plans and tokens alone."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from shadow_kv import History, Row, next_token, require

from nanovllm.config import SchedulerConfig
from nanovllm.engine.sequence import FinishReason, Sequence
from nanovllm.engine.step import ScheduledRow, ScheduledStep
from nanovllm.sampling_params import SamplingParams


@dataclass(eq=False)
class Entry:
    """What is known of one sequence; `leader` is sample 0 of its request, None in sample 0."""

    seq: Sequence
    params: SamplingParams
    root: str | None
    prompt: tuple[int, ...]
    max_tokens: int
    num_samples: int
    leader: Entry | None
    tokens: list[int] = field(default_factory=list)
    num_computed: int = 0
    table: list[int] = field(default_factory=list)
    reason: FinishReason | None = None
    aborting: bool = False
    cached: int | None = None
    steps_without_row: int = 0
    forced: dict[int, int] = field(default_factory=dict)
    stopped_at: int | None = None

    def __post_init__(self) -> None:
        self.tokens = list(self.prompt)

    def __repr__(self) -> str:
        return f"<{self.seq.seq_id}: {list(self.prompt)} + {self.completion}, table {self.table}>"

    @property
    def seq_id(self) -> int:
        return self.seq.seq_id

    @property
    def completion(self) -> list[int]:
        return self.tokens[len(self.prompt) :]

    @property
    def is_seated(self) -> bool:
        return bool(self.table)

    @property
    def decode_waits(self) -> bool:
        return self.is_seated and len(self.tokens) - self.num_computed == 1

    def row(self, row: ScheduledRow) -> Row:
        return Row(History(self.root, tuple(self.tokens[: row.end])), row.start, row.block_table)


@dataclass(frozen=True)
class Admission:
    """`resident` leading full blocks of `entry` were published when it was admitted."""

    entry: Entry
    num_tokens: int
    num_cached: int
    resident: int


@dataclass(frozen=True)
class Before:
    """The book as a plan found it."""

    seated: tuple[Entry, ...]
    queued: tuple[Entry, ...]
    decoding: frozenset[int]
    tables: Mapping[int, list[int]]
    published: Mapping[int, History]
    released_at: Mapping[int, int]
    in_flight: bool


class Book:
    """Sequences, who holds which block, which content is published, when a block was released."""

    def __init__(self, config: SchedulerConfig) -> None:
        self.config = config
        self.block_size = config.kvcache_block_size
        self.entries: dict[int, Entry] = {}
        self._live: dict[int, Entry] = {}
        self.published: dict[int, History] = {}
        self.released_at: dict[int, int] = {}
        self.num_steps = 0
        self.num_computed_tokens = 0
        self.num_cached_tokens = 0
        self.num_preemptions = 0
        self.prefill_streak = 0
        self.events: Counter[str] = Counter()
        self._clock = 0

    # ---- reading ---------------------------------------------------------------------------

    @property
    def live(self) -> list[Entry]:
        return list(self._live.values())

    @property
    def seated(self) -> list[Entry]:
        return [entry for entry in self._live.values() if entry.is_seated]

    @property
    def queued(self) -> list[Entry]:
        """Those that may be admitted: a follower has to wait for its leader's first token."""
        return [
            entry
            for entry in self.live
            if not entry.is_seated and (entry.leader is None or entry.leader.completion)
        ]

    @property
    def followers(self) -> dict[int, list[int]]:
        """Samples that wait for sample 0 to compute their prompt, by its id."""
        waiting: dict[int, list[int]] = {}
        for entry in self._live.values():
            if entry.leader is not None and not entry.leader.completion:
                waiting.setdefault(entry.leader.seq_id, []).append(entry.seq_id)
        return waiting

    def num_holders(self, block_id: int) -> int:
        return sum(block_id in entry.table for entry in self._live.values())

    def num_resident(self, entry: Entry) -> int:
        """Leading full blocks of `entry` whose content is published now."""
        contents = set(self.published.values())
        count = 0
        while (end := (count + 1) * self.block_size) <= len(entry.tokens):
            if History(entry.root, tuple(entry.tokens[:end])) not in contents:
                break
            count += 1
        return count

    def fits(self, entry: Entry) -> bool:
        """Whether blocks for all known tokens of a queued `entry` are to be had now (PFX-10)."""
        held = {block_id for e in self._live.values() for block_id in e.table}
        used = {self.published[block_id] for block_id in held if block_id in self.published}
        hits = min(self.num_resident(entry), (len(entry.tokens) - 1) // self.block_size)
        ends = [(i + 1) * self.block_size for i in range(hits)]
        shared = sum(History(entry.root, tuple(entry.tokens[:end])) in used for end in ends)
        missing = -(-len(entry.tokens) // self.block_size) - shared
        return missing <= self.config.num_kvcache_blocks - len(held)

    def before(self, in_flight: bool) -> Before:
        return Before(
            tuple(self.seated),
            tuple(self.queued),
            frozenset(entry.seq_id for entry in self.seated if entry.decode_waits),
            {entry.seq_id: list(entry.table) for entry in self.seated},
            dict(self.published),
            dict(self.released_at),
            in_flight,
        )

    # ---- writing ---------------------------------------------------------------------------

    def add(
        self,
        seqs: Iterable[Sequence],
        prompt: tuple[int, ...],
        params: SamplingParams,
        salt: str | None,
    ) -> None:
        """Samples of one request; without prefix caching no other request may share with them."""
        seqs = tuple(seqs)
        root = salt if self.config.enable_prefix_caching else f"request-{seqs[0].seq_id}"
        leader: Entry | None = None
        for i, seq in enumerate(seqs):
            room = self._room(len(prompt), params)
            entry = Entry(seq, params.derive(i), root, prompt, room, params.n, leader)
            self.entries[seq.seq_id] = self._live[seq.seq_id] = entry
            leader = leader or entry

    def _room(self, p: int, params: SamplingParams) -> int:
        """Outputs that the request ends with at the latest (SCH-7d)."""
        room = self.config.max_model_len - p
        if params.max_tokens is not None:
            return min(params.max_tokens, room)
        return min(room, self.config.num_kvcache_blocks * self.block_size - p + 1)

    def plan(self, step: ScheduledStep) -> list[Admission]:
        """A plan: its preemptions, then its rows in order, each with the blocks it takes."""
        self.num_steps += bool(step.rows)
        for seq in step.preempted:
            entry = self.entries[seq.seq_id]
            require(entry.is_seated, "SCH-8", entry, "is preempted, but it holds nothing")
            self._release(entry)
            self.num_preemptions += 1
            self.events["preemption"] += 1
        return [a for row in step.rows if (a := self._seat(row)) is not None]

    def _seat(self, row: ScheduledRow) -> Admission | None:
        entry = self.entries[row.seq.seq_id]
        admission: Admission | None = None
        old = len(entry.table)
        if not entry.is_seated:
            old = row.start // self.block_size
            resident = self.num_resident(entry)
            admission = Admission(entry, len(entry.tokens), row.start, resident)
            self._note_hits(entry, row.block_table[:old], resident)
            entry.num_computed = row.start
            if entry.cached is None:
                entry.cached = row.start
                self.num_cached_tokens += row.start
        for block_id in row.block_table[old:]:
            self.events["eviction"] += self.published.pop(block_id, None) is not None
        entry.table = list(row.block_table)
        for block_id in entry.table:
            self.released_at.pop(block_id, None)
        self.events["chunk"] += row.end < len(entry.tokens)
        return admission

    def _note_hits(self, entry: Entry, hits: Iterable[int], resident: int) -> None:
        used = [self.num_holders(block_id) > 0 for block_id in hits]
        self.events["hit on a used block"] += any(used)
        self.events["hit on a free block"] += not all(used)
        self.events["whole prompt resident"] += resident * self.block_size == len(entry.tokens)
        shares = entry.leader is not None and entry.leader.is_seated
        self.events["samples share"] += shares and any(used)

    def commit_row(
        self, row: ScheduledRow, token: int | None, failed: bool, stopped: bool
    ) -> list[Entry]:
        """Outcome of one row; returns who ends by it."""
        entry = self.entries[row.seq.seq_id]
        self.num_computed_tokens += row.count
        if entry.aborting:
            return self.end(entry, FinishReason.ABORT)
        if failed:
            return self.end(entry, FinishReason.ERROR)
        self._publish(entry, row)
        entry.num_computed = row.end
        if token is None:
            return []
        entry.tokens.append(token)
        if stopped:
            entry.stopped_at = len(entry.completion)
        reason = self.ending(entry, entry.completion)
        return self.end(entry, reason) if reason else []

    def _publish(self, entry: Entry, row: ScheduledRow) -> None:
        """A block that filled up is hittable once its parent is (PFX-3, PFX-4)."""
        if not self.config.enable_prefix_caching and entry.num_samples == 1:
            return
        for i in range(row.start // self.block_size, row.end // self.block_size):
            if i == 0 or entry.table[i - 1] in self.published:
                content = History(entry.root, tuple(entry.tokens[: (i + 1) * self.block_size]))
                self.published.setdefault(entry.table[i], content)

    def ending(self, entry: Entry, completion: list[int]) -> FinishReason | None:
        """Why `completion` is the whole of it, if it is (SCH-12, STP-2)."""
        eos = () if entry.params.ignore_eos else self.config.eos_token_ids
        is_end = completion[-1] in eos or completion[-1] in entry.params.stop_token_ids
        if entry.stopped_at == len(completion):
            return FinishReason.STOP
        if is_end and len(completion) > entry.params.min_tokens:
            return FinishReason.STOP
        return FinishReason.LENGTH if len(completion) == entry.max_tokens else None

    def end(self, entry: Entry, reason: FinishReason) -> list[Entry]:
        """`entry` ends, and so do the samples that wait for the prompt it did not complete."""
        entry.reason = reason
        self._release(entry)
        del self._live[entry.seq_id]
        followers = [] if entry.completion else [e for e in self.live if e.leader is entry]
        return [entry, *(e for follower in followers for e in self.end(follower, reason))]

    def _release(self, entry: Entry) -> None:
        table, entry.table, entry.num_computed = entry.table, [], 0
        for block_id in reversed(table):
            if not self.num_holders(block_id):
                self._clock += 1
                self.released_at[block_id] = self._clock

    # ---- the oracle ------------------------------------------------------------------------

    def oracle(self, entry: Entry, alphabet: tuple[int, ...]) -> tuple[list[int], FinishReason]:
        """Completion and reason of the request computed alone, with no cache at all (SCH-9)."""
        completion: list[int] = []
        while True:
            tokens = [*entry.prompt, *completion]
            drawn = next_token(tokens, entry.params.seed or 0, alphabet)
            completion.append(entry.forced.get(len(completion), drawn))
            if reason := self.ending(entry, completion):
                return completion, reason
