"""Any package with the tutorial's classes, at a path: `Sequence`, `BlockManager`, `Scheduler`.

Runs in the engine's interpreter, hence nothing but the standard library, and needs neither CUDA nor
flash-attn nor transformers (see `bare_import`). Two generations of nano-vllm's calls are known (see
`tutorial_calls`); `preset=auto` tells them apart by their signatures, and a mixture of both too.
"""

from __future__ import annotations

import copy
import pickle
import sys
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from types import MappingProxyType, SimpleNamespace
from typing import Any

from .bare_import import HEAVY, import_engine
from .tutorial_calls import PRESETS, Calls, accepted, config_defaults, detect, hashes


class Blocks:
    """The blocks door: the engine's block manager."""

    doors: tuple[str, ...] = ("blocks",)
    min_block_size = 1
    collides = True

    def __init__(self, modules: SimpleNamespace, calls: Calls, version: str) -> None:
        self.modules, self.calls, self.version = modules, calls, version
        # A method in later revisions, a function of the module in earlier ones.
        manager = modules.block_manager
        self.hash_is_method = hasattr(manager.BlockManager, "compute_hash")
        owner = manager.BlockManager if self.hash_is_method else manager
        self.real_hash = getattr(owner, "compute_hash", None)
        self.caching = True
        self.holders: dict[int, Any] = {}

    def hello(self) -> dict[str, Any]:
        capabilities = ["pool"]
        if self.real_hash is not None:
            capabilities += ["prefix_cache", "hash", *["hash_override"] * self.collides]
        return {
            "engine": self.modules.name,
            "version": self.version,
            "doors": self.doors,
            "capabilities": capabilities,
        }

    def reset(self, world: Any) -> None:
        if world.block_size < self.min_block_size:
            raise NotImplementedError(f"block_size={world.block_size} is not to be tested")
        sequence = self.modules.sequence.Sequence
        if hasattr(sequence, "set_block_size"):
            sequence.set_block_size(world.block_size)
        else:
            sequence.block_size = world.block_size
        self.block_size, self.caching, self.holders = world.block_size, world.prefix_cache, {}
        self.blocks = self.make(world)
        # What `hash` tells; with the cache turned off, the engine itself is given another.
        self.hash_function = hashes().get(world.hash, self.real_hash)
        self.set_hash(hashes()["none"] if not world.prefix_cache else self.hash_function)

    def make(self, world: Any) -> Any:
        """A block manager of this world."""
        return self.modules.block_manager.BlockManager(world.num_blocks, world.block_size)

    def set_hash(self, function: Callable[..., int] | None) -> None:
        if self.real_hash is not None:
            holder = self.blocks if self.hash_is_method else self.modules.block_manager
            holder.compute_hash = function
        elif function is not None:
            raise NotImplementedError("this engine has no compute_hash to replace")

    def sequence(self, token_ids: list[int], max_tokens: int = 1, ignore_eos: bool = False) -> Any:
        module = self.modules.sequence
        options = {"temperature": 1.0, "max_tokens": max_tokens, "ignore_eos": ignore_eos}
        if hasattr(module, "SamplingParams"):
            params = module.SamplingParams(**accepted(module.SamplingParams, **options))
        else:
            params = SimpleNamespace(**options)
        extra = accepted(module.Sequence, block_size=self.block_size)
        return module.Sequence(token_ids, params, **extra)

    def lookup(self, token_ids: list[int]) -> int:
        # Some revisions look up while they allocate: so allocate, in a copy with room to spare, and
        # a token more than asked for, since some leave the last one to compute.
        blocks = copy.deepcopy(self.blocks)
        for i in range(len(token_ids) + 1):
            blocks.blocks.append(type(blocks.blocks[0])(len(self.blocks.blocks) + i))
            blocks.free_block_ids.append(len(self.blocks.blocks) + i)
        seq = self.sequence([*token_ids, 0])
        self.allocate_in(blocks, seq)
        return int(seq.num_cached_tokens)

    def allocate_in(self, blocks: Any, seq: Any) -> bool:
        cached = blocks.can_allocate(seq)
        fits = cached >= 0 if self.calls.counts else bool(cached)
        if fits:
            blocks.allocate(seq, *([cached] if self.calls.counts else []))
        return fits

    def allocate(self, request: int, token_ids: list[int]) -> tuple[list[int], int] | None:
        seq = self.sequence(token_ids)
        if not self.allocate_in(self.blocks, seq):
            return None
        cached = seq.num_cached_tokens
        self.computed(seq, len(token_ids) - cached)
        self.holders[request] = seq
        return list(seq.block_table), cached

    def append(self, request: int, token_id: int) -> list[int] | None:
        seq = self.holders[request]
        before, tokens = dict(vars(seq)), list(seq.token_ids)
        seq.append_token(token_id)
        if not self.blocks.can_append(seq):
            vars(seq).update(before, token_ids=tokens)
            return None
        self.blocks.may_append(seq)
        self.computed(seq, 1)
        return list(seq.block_table)

    def computed(self, seq: Any, count: int) -> None:
        """Later revisions publish a block once it is computed, earlier ones when it fills up."""
        if hasattr(self.blocks, "hash_blocks"):
            seq.num_scheduled_tokens = count
            self.blocks.hash_blocks(seq)
            seq.num_cached_tokens += count

    def release(self, request: int) -> None:
        self.blocks.deallocate(self.holders.pop(request))

    def hash(self, token_ids: list[int], parent: str | None) -> str:
        if self.hash_function is None:
            raise NotImplementedError("this engine has no compute_hash")
        return str(self.hash_function(token_ids, -1 if parent is None else int(parent)))

    def pool(self) -> dict[str, Any]:
        blocks = self.blocks.blocks
        published = self.blocks.hash_to_block_id.values() if self.caching else ()
        return {
            "free": list(self.blocks.free_block_ids),
            "ref_counts": {b.block_id: b.ref_count for b in blocks if b.ref_count},
            "published": [(block_id, list(blocks[block_id].token_ids)) for block_id in published],
        }


class Core(Blocks):
    """The core door: the engine's scheduler, and its block manager alone as before."""

    doors = ("blocks", "core")
    asks_when_idle = True
    config: Mapping[str, Any] = MappingProxyType({})

    def hello(self) -> dict[str, Any]:
        hello = super().hello()
        hello["capabilities"] += ["wire", "chunked_prefill"] if self.calls.chunks else ["wire"]
        return hello

    def make(self, world: Any) -> Any:
        if len(world.eos_token_ids) > 1:
            raise NotImplementedError("this engine knows one eos id")
        config = SimpleNamespace(**{**config_defaults(self.modules.scheduler), **self.config})
        vars(config).update(
            max_num_seqs=world.max_num_seqs,
            max_num_batched_tokens=world.max_num_batched_tokens,
            max_model_len=world.max_model_len,
            kvcache_block_size=world.block_size,
            num_kvcache_blocks=world.num_blocks,
            eos=world.eos_token_ids[0] if world.eos_token_ids else -1,
            **world.options,
        )
        self.eos = config.eos
        self.scheduler = self.modules.scheduler.Scheduler(config)
        self.requests: dict[int, int] = {}  # by seq_id
        self.planned: tuple[list[Any], bool] = [], False
        self.preempted: list[int] = []
        self.step = 0
        preempt = self.scheduler.preempt

        def preempt_and_tell(seq: Any) -> None:
            self.preempted.append(self.requests[seq.seq_id])
            preempt(seq)

        self.scheduler.preempt = preempt_and_tell
        return self.scheduler.block_manager

    def add(self, request: int, prompt: list[int], max_tokens: int, options: Any) -> None:
        if options.n > 1 or options.salt or options.min_tokens or options.stop_token_ids:
            raise NotImplementedError("this engine has neither n, salts, min_tokens nor stop ids")
        seq = self.sequence(prompt, max_tokens, options.ignore_eos)
        self.requests[seq.seq_id] = request
        self.scheduler.add(seq)

    def schedule(self) -> dict[str, Any]:
        self.preempted = []
        skipped = not self.asks_when_idle and self.scheduler.is_finished()
        # An early revision returns None when there is nothing to do.
        seqs, is_prefill = (None if skipped else self.scheduler.schedule()) or ([], False)
        self.planned = list(seqs), bool(is_prefill)
        self.step += 1
        return {
            "step": self.step,
            "rows": [self.row(seq, bool(is_prefill)) for seq in seqs],
            "preempted": self.preempted,
        }

    def row(self, seq: Any, is_prefill: bool) -> dict[str, Any]:
        start, count = len(seq) - 1, 1
        if is_prefill:
            start = seq.num_cached_tokens
            count = seq.num_scheduled_tokens if self.calls.chunks else len(seq) - start
        return {
            "id": self.requests[seq.seq_id],
            "start": start,
            "count": count,
            "block_table": list(seq.block_table),
            "phase": "prefill" if is_prefill else "decode",
        }

    def commit(self, step: int, tokens: dict[tuple[int, int], int]) -> list[tuple[int, str]]:
        seqs, is_prefill = self.planned
        # The engine's model returns a token for a chunk too, which means nothing.
        token_ids = [tokens.get((self.requests[seq.seq_id], 0), 0) for seq in seqs]
        extra = (is_prefill,) if self.calls.told_prefill else ()
        self.scheduler.postprocess(seqs, token_ids, *extra)
        return [
            (self.requests[seq.seq_id], self.reason(seq))
            for seq in seqs
            if seq.status.name == "FINISHED"
        ]

    def reason(self, seq: Any) -> str:
        """The engine does not say; only an eos ends a request before `max_tokens`."""
        return "stop" if seq.token_ids[-1] == self.eos and not seq.ignore_eos else "length"

    def wire(self, id: tuple[int, int]) -> int:
        seqs, _ = self.planned
        return len(pickle.dumps(next(s for s in seqs if self.requests[s.seq_id] == id[0])))


def adapter(
    preset: str | int = "auto",
    asks_when_idle: bool = True,
    min_block_size: int = 1,
    hash_override: bool = True,
    stand_ins: Iterable[str] = HEAVY,
    version: str | None = None,
    **config: Any,
) -> Blocks:
    """The engine in or under the first entry of `sys.path`.

    Args:
        config: what the scheduler of a fork finds in its config, besides the tutorial's fields.
        asks_when_idle: call `schedule` also when `is_finished` says that there is nothing to do,
            which an engine must bear (SCH-5). Without it what comes after shows, too.
        min_block_size: leave out worlds of smaller blocks, for what shows beside them.
        hash_override: declare that the hash can be exchanged for one that collides.
        stand_ins: libraries to import nothing of.
    """
    if str(preset) not in ("auto", *PRESETS):
        raise ValueError(f"preset={preset}: expected auto, {', '.join(PRESETS)}")
    modules = import_engine(Path(sys.path[0]).resolve(), stand_ins)
    calls = detect(modules) if preset == "auto" else PRESETS[str(preset)]
    known = version or next((f"as of {p}" for p in PRESETS if PRESETS[p] == calls), "in between")
    door = Blocks if modules.scheduler is None else Core
    engine = door(modules, calls, known)
    engine.min_block_size, engine.collides = min_block_size, hash_override
    if isinstance(engine, Core):
        engine.asks_when_idle, engine.config = asks_when_idle, config
    return engine
