"""My engine, behind the core door of the conformance suite.

    nanovllm conformance doctor --engine FILE:adapter      # does it answer, is what it says right?
    nanovllm conformance run    --engine FILE:adapter

This file runs in your engine's own interpreter (`--engine-python`), with your engine's folder on
the path (`--engine-path`; by default the folder of this file). It needs nothing but your engine.

The suite plays the model. It asks `schedule` what to compute, checks it, and hands to `commit` one
token for each request whose last known token was computed. Change the lines marked with `<-` to
what your engine calls things. Raise ValueError for a request that your engine refuses, and
NotImplementedError for something that it does not offer.
"""

from typing import Any

from my_engine import Scheduler  # <- your engine


class Adapter:
    def hello(self) -> dict[str, Any]:
        return {
            "engine": "my engine",  # <- its name and version, for the report
            "version": "0.1",
            "doors": ["core"],
            # <- What your engine has; each is tested only if it is named here, and some need a
            # method of their own, see the end of this file:
            # chunked_prefill min_tokens n prefix_cache salt stop cow
            # abort fail_step hash hash_override pool stats wire
            "capabilities": [],
        }

    def reset(self, world: Any) -> None:
        """Make a new engine, and forget the old one. Worlds are tiny: a few blocks of 1-4 tokens.

        With the capability prefix_cache, `world.prefix_cache` may be False, and nothing is found
        then; with hash_override, `world.hash` may be "constant" or "1bit".
        """
        self.scheduler = Scheduler(  # <-
            block_size=world.block_size,
            num_blocks=world.num_blocks,
            max_num_seqs=world.max_num_seqs,
            max_num_batched_tokens=world.max_num_batched_tokens,
            max_model_len=world.max_model_len,
            eos_token_ids=world.eos_token_ids,  # none, one or several
        )
        self.numbers: dict[int, int] = {}  # id() of your object -> the suite's number
        self.alive: list[Any] = []  # your objects, so that no id() is given twice
        self.planned: list[Any] = []  # those with a row in the plan in flight
        self.step = 0

    def add(self, request: int, prompt: list[int], max_tokens: int, options: Any) -> None:
        """Queue a request. `options` also has ignore_eos, always asked for."""
        if options.n > 1 or options.salt or options.min_tokens or options.stop_token_ids:
            raise NotImplementedError("only plain requests")  # <-
        mine = self.scheduler.add(prompt, max_tokens, options.ignore_eos)  # <-
        self.numbers[id(mine)] = request
        self.alive.append(mine)

    def schedule(self) -> dict[str, Any]:
        """Plan a step; no rows if there is nothing to do."""
        self.planned = self.scheduler.schedule()  # <-
        self.step += 1
        return {
            "step": self.step,
            "rows": [self.row(mine) for mine in self.planned],
            # <- those who lost their blocks in this call
            "preempted": [self.numbers[id(mine)] for mine in self.scheduler.preempted],
        }

    def row(self, mine: Any) -> dict[str, Any]:
        """Compute the positions [start, start + count): all that is known and not computed, or a
        chunk of it. Position i has its KV in block_table[i // block_size]."""
        return {
            "id": self.numbers[id(mine)],
            "start": mine.num_computed,  # <-
            "count": mine.num_scheduled,  # <-
            "block_table": list(mine.block_table),  # <-
        }

    def commit(self, step: int, tokens: dict[tuple[int, int], int]) -> list[tuple[int, str]]:
        """The plan was computed. `tokens` maps (request, sample) to the next token; sample is 0."""
        # One that is cut short by its chunk has no token yet.
        new = [tokens.get((self.numbers[id(mine)], 0)) for mine in self.planned]
        self.scheduler.commit(self.planned, new)  # <-
        # <- who ended, and why: "stop" (an eos), "length", "abort" or "error"
        ended = [mine for mine in self.planned if mine.finish_reason]
        return [(self.numbers[id(mine)], mine.finish_reason) for mine in ended]

    # ---- each with the capability of its name ----------------------------------------------------
    #
    # def abort(self, request):    True if it lived. One in a plan ends when that is committed.
    # def fail_step(self, step):   The plan raised, nothing was computed; returns as `commit`.
    # def pool(self):              {"free": [block, ...], "ref_counts": {block: count >= 1, ...},
    #                               "published": [(block, tokens in it), ...]}  <- if prefix_cache
    # def hash(self, token_ids, parent):    Hash of a full block as text; parent is one or None.
    # def stats(self):             {"num_lookup_tokens": ..., "num_cached_tokens": ...}
    # def wire(self, id):          Bytes sent to a worker for the row of id, a (request, sample).


def adapter(**options: Any) -> Adapter:
    """Called once, with what `--engine-option key=value` gave."""
    return Adapter()
