"""Steps on their way: planned, launched, and landed in order."""

from collections import deque

from nanovllm.engine.interrupts import interrupts_held
from nanovllm.engine.model_runner import ModelRunner, PendingStep
from nanovllm.engine.request_table import RequestTable
from nanovllm.engine.scheduler import Scheduler
from nanovllm.engine.step import ScheduledStep


class StepPipeline:
    """Launches as many steps as may be in flight, and lands them one by one.

    A step that raises, when it is launched or when it lands, ends its sequences with reason
    `error`, and the others go on (SCH-15); if the runner can run none after it, all end (TP-4).
    """

    def __init__(
        self, scheduler: Scheduler, model_runner: ModelRunner, requests: RequestTable
    ) -> None:
        self.scheduler = scheduler
        self.model_runner = model_runner
        self.requests = requests
        self.device_seconds = 0.0  # of the step that landed last
        self._flights: deque[tuple[ScheduledStep, PendingStep]] = deque()

    @interrupts_held()
    def advance(self) -> ScheduledStep:
        """Launch what may be in flight, and land one step, the first; an empty one if none is."""
        self._fail_left_behind()
        landed = None
        while landed is None and len(self._flights) < self.scheduler.config.max_steps_in_flight:
            step = self.scheduler.schedule()
            self.model_runner.forget(step.preempted)
            if not step.rows:
                break
            landed = self._launch(step)
        if landed is None and self._flights:
            landed = self._land()
        return step if landed is None else landed

    @interrupts_held()
    def land_all(self) -> ScheduledStep | None:
        """Wait for all steps in flight; the last of them."""
        landed = None
        while self._flights:
            landed = self._land()
        return landed

    def clear(self) -> None:
        """Forget all steps in flight."""
        self._flights.clear()

    def _fail_left_behind(self) -> None:
        """Steps that were planned and not launched: an interrupt came at the wrong moment."""
        launched = {step.step_id for step, _ in self._flights}
        left_behind = [s for s in self.scheduler.in_flight if s.step_id not in launched]
        if left_behind:
            self.land_all()  # steps end in their order
        for step in left_behind:
            self._fail(step, "interrupted")

    def _launch(self, step: ScheduledStep) -> ScheduledStep | None:
        """The step that had to land first, if one had to."""
        landed = None
        if self._flights and self.model_runner.needs_last_tokens(step):
            landed = self.land_all()
        try:
            pending = self.model_runner.launch(step)
        except BaseException as error:
            self.land_all()
            self._fail_for(step, error)
        else:
            self._flights.append((step, pending))
        return landed

    def _land(self) -> ScheduledStep:
        step, pending = self._flights[0]
        try:
            result = pending.result()
            self.device_seconds = result.device_seconds
            ended = self.requests.commit(step, result)
        except BaseException as error:
            self._flights.popleft()
            self._fail_for(step, error)
        else:
            self._flights.popleft()
            self.requests.collect(ended)
        return step

    def _fail_for(self, step: ScheduledStep, error: BaseException) -> None:
        self.model_runner.examine()
        if self.model_runner.fault is not None:
            self._flights.clear()
            self.scheduler.fail_all(self.model_runner.fault)
            self.requests.collect_ended()
        else:
            self._fail(step, f"{type(error).__name__}: {error}".rstrip(": "))
        if not isinstance(error, Exception):
            raise error

    def _fail(self, step: ScheduledStep, cause: str) -> None:
        self.scheduler.fail_step(step, cause)
        self.requests.collect_ended()
