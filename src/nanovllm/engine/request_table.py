"""All requests of an engine: who is live, whose outputs wait to be handed over."""

from collections.abc import Iterable

from nanovllm.engine.model_runner import StepResult
from nanovllm.engine.request import Request, Sample
from nanovllm.engine.scheduler import Scheduler
from nanovllm.engine.sequence import Sequence
from nanovllm.engine.step import ScheduledStep
from nanovllm.outputs import RequestOutput


class RequestTable:
    """Takes what the steps bring: tokens become text, and ended sequences finished requests.

    Attributes:
        live: by seq_id, one entry a sample.
        finished: by request_id, not handed over yet.
        begun: ids of requests that have their first token, which is not told yet.
    """

    def __init__(self, scheduler: Scheduler) -> None:
        self.scheduler = scheduler
        self.live: dict[int, Request] = {}
        self.finished: dict[int, Request] = {}
        self.begun: list[int] = []

    @property
    def is_empty(self) -> bool:
        return not self.live and not self.finished

    def add(self, request: Request) -> None:
        self.live.update((sample.seq.seq_id, request) for sample in request.samples)

    def sample(self, seq_id: int) -> Sample:
        return self.live[seq_id].sample(seq_id)

    def abort(self, request_id: int) -> bool:
        """End all samples of a request; False if it is unknown or has ended."""
        live = [s for s, request in self.live.items() if request.request_id == request_id]
        seqs = [self.sample(seq_id).seq for seq_id in live]
        for seq_id in live:
            self.scheduler.abort(seq_id)
        self.collect(seq for seq in seqs if seq.is_finished)
        return bool(live)

    def commit(self, step: ScheduledStep, result: StepResult) -> list[Sequence]:
        """Apply the tokens of a step; the sequences that ended, for `collect`."""
        # A row that was planned ahead of its request's end has no use for its token.
        tokens = {s: token for s, token in result.token_ids.items() if s in self.live}
        for seq_id in tokens.keys() & result.logprobs.keys():
            self.sample(seq_id).logprobs.append(result.logprobs[seq_id])
        # Text comes before the commit: a stop string is a reason to end, and wins over `length`.
        stopped = [seq_id for seq_id, token in tokens.items() if self.sample(seq_id).push(token)]
        ended = self.scheduler.commit(step, tokens, failed=result.failed, stopped=stopped)
        for row in step.rows:
            if row.samples and row.end == row.seq.num_prompt_tokens:
                self._begin(row.seq)
        return ended

    def _begin(self, seq: Sequence) -> None:
        """Its prompt is computed; the first of a request's samples brings the first token."""
        request = self.live.get(seq.seq_id)
        if request and seq.num_completion_tokens and not request.begun:
            request.begun = True
            if not request.claimed:
                self.begun.append(request.request_id)

    def collect(self, ended: Iterable[Sequence]) -> None:
        """Finish the text of sequences that ended, and the requests that ended with them."""
        for seq in ended:
            self.sample(seq.seq_id).finish()
            request = self.live.pop(seq.seq_id)
            if request.is_finished:
                self.finished[request.request_id] = request

    def collect_ended(self) -> None:
        """After a step that failed; those that a commit had ended before it raised are not lost."""
        seqs = [self.sample(seq_id).seq for seq_id in self.live]
        self.collect([seq for seq in seqs if seq.is_finished])

    def ready(self) -> tuple[RequestOutput, ...]:
        """Outputs of finished requests that no other call waits for (API-4)."""
        return tuple(r.output() for r in self.finished.values() if not r.claimed)

    def told(self) -> None:
        """Those that were ready, and who has begun, are known now."""
        claimed = {request_id: r for request_id, r in self.finished.items() if r.claimed}
        self.finished, self.begun = claimed, []
