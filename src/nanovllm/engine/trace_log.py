"""A log of plans and tokens, from which `nanovllm conformance check` judges a run afterwards.

One JSON object a line: who speaks and its limits, then every request, plan and outcome. What is
told is token ids, block tables and reasons; never text.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

from nanovllm.config import SchedulerConfig
from nanovllm.engine.scheduler import Scheduler
from nanovllm.engine.sequence import Sequence
from nanovllm.engine.step import ScheduledStep
from nanovllm.sampling_params import SamplingParams

CAPABILITIES = ("abort", "chunked_prefill", "fail_step", "min_tokens", "n", "salt", "stop")


class TraceLog:
    """A file that grows by a line a call; what is there is complete even if the process dies.

    Raises OSError if it cannot be written. An existing file is replaced.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.path.write_text("", encoding="utf-8")

    def write(self, **line: Any) -> None:
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line, separators=(",", ":")) + "\n")


class TracedScheduler(Scheduler):
    """A scheduler that tells a log what it is asked and what it answers.

    A sequence is `[request, sample]` in the log; a request has the id of its first sequence.
    """

    def __init__(self, config: SchedulerConfig, log: TraceLog) -> None:
        super().__init__(config)
        self.log = log
        self._ids: dict[int, tuple[int, int]] = {}  # of live sequences, by seq_id
        self._aborted: set[int] = set()  # live requests
        log.write(hello=_hello(config), world=_world(config))

    def add(
        self, prompt_token_ids: list[int], params: SamplingParams, *, salt: str | None = None
    ) -> tuple[Sequence, ...]:
        seqs = super().add(prompt_token_ids, params, salt=salt)
        request = seqs[0].seq_id
        self._ids.update((seq.seq_id, (request, i)) for i, seq in enumerate(seqs))
        self.log.write(
            op="add",
            request=request,
            prompt=prompt_token_ids,
            max_tokens=seqs[0].max_tokens,
            options={
                "n": params.n,
                "salt": salt,
                "min_tokens": params.min_tokens,
                "stop_token_ids": list(params.stop_token_ids),
                "ignore_eos": params.ignore_eos,
            },
            open_end=bool(params.stop),
        )
        return seqs

    def abort(self, seq_id: int) -> bool:
        """One line for all samples of a request, whose sequences are aborted one by one."""
        took = super().abort(seq_id)
        if took:
            request, _ = self._ids[seq_id]
            if request not in self._aborted:
                self._aborted.add(request)
                self.log.write(op="abort", request=request, took=True)
            if seq_id not in self._live:
                self._forget(seq_id)
        return took

    def schedule(self) -> ScheduledStep:
        step = super().schedule()
        if step.rows or step.preempted:
            rows = [
                {
                    "id": self._ids[row.seq.seq_id],
                    "start": row.start,
                    "count": row.count,
                    "block_table": list(row.block_table),
                }
                for row in step.rows
            ]
            preempted = [self._ids[seq.seq_id] for seq in step.preempted]
            plan = {"step": step.step_id, "rows": rows, "preempted": preempted}
            self.log.write(op="schedule", plan=plan)
        return step

    def commit(
        self,
        step: ScheduledStep,
        token_ids: Mapping[int, int],
        *,
        failed: Mapping[int, str] | None = None,
        stopped: Collection[int] = (),
    ) -> list[Sequence]:
        tokens = [[self._ids[seq_id], token] for seq_id, token in token_ids.items()]
        ended = super().commit(step, token_ids, failed=failed, stopped=stopped)
        finished = self._finished(ended)
        self.log.write(op="commit", step=step.step_id, tokens=tokens, finished=finished)
        return ended

    def fail_step(self, step: ScheduledStep, cause: str) -> list[Sequence]:
        ended = super().fail_step(step, cause)
        finished = self._finished(ended)
        self.log.write(op="fail_step", step=step.step_id, finished=finished)
        return ended

    def reset_prefix_cache(self) -> None:
        super().reset_prefix_cache()
        self.log.write(op="reset_prefix_cache")

    def _finished(self, ended: Iterable[Sequence]) -> list[dict[str, Any]]:
        return [{"id": self._forget(seq.seq_id), "reason": str(seq.finish_reason)} for seq in ended]

    def _forget(self, seq_id: int) -> tuple[int, int]:
        """Its id in the log; nothing is kept of who has ended."""
        id = self._ids.pop(seq_id)
        if id[0] in self._aborted and all(request != id[0] for request, _ in self._ids.values()):
            self._aborted.remove(id[0])
        return id


def _hello(config: SchedulerConfig) -> dict[str, Any]:
    caches = ("prefix_cache",) if config.enable_prefix_caching else ()
    return {
        "engine": "nanovllm",
        "version": version("nanovllm"),
        "doors": ["core"],
        "capabilities": [*CAPABILITIES, *caches],
        "ahead": config.max_steps_in_flight - 1,
    }


def _world(config: SchedulerConfig) -> dict[str, Any]:
    return {
        "block_size": config.kvcache_block_size,
        "num_blocks": config.num_kvcache_blocks,
        "max_num_seqs": config.max_num_seqs,
        "max_num_batched_tokens": config.max_num_batched_tokens,
        "max_model_len": config.max_model_len,
        "eos_token_ids": sorted(config.eos_token_ids),
        "prefix_cache": config.enable_prefix_caching,
    }
