"""Positive, exact examples at each door: `SCENARIOS`, and `run_scenarios` to run them.

`core`, `pool`, `prefix`, `ends`: what a scheduler must achieve. `boundary`: lengths around a block.
`cases`, `tutorial`: public reports and the tutorial's defects. `blocks`: the blocks door.
`engine`, `speech`, `text`, `sampling`, `poison`: the engine door; `against_hf`: what needs an
oracle there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from nanovllm.conformance.protocol import EngineFault, Refused, Unsupported
from nanovllm.conformance.scenarios import (
    against_hf,
    blocks,
    boundary,
    cases,
    core,
    ends,
    engine,
    poison,
    pool,
    prefix,
    sampling,
    speech,
    text,
    tutorial,
)
from nanovllm.conformance.scenarios.scenario import Scenario
from nanovllm.conformance.scenarios.story import Storyteller
from nanovllm.conformance.verdicts import Evaluations, Outcome, Verdict, Violation, summary_of

__all__ = ["SCENARIOS", "Result", "Scenario", "run_scenario", "run_scenarios"]

SCENARIOS: tuple[Scenario, ...] = tuple(
    scenario
    for module in (
        *(cases, tutorial, boundary, prefix, pool, core, ends),
        blocks,
        *(engine, speech, text, sampling, poison, against_hf),
    )
    for scenario in module.SCENARIOS
)


@dataclass(frozen=True, slots=True)
class Result:
    """What one scenario found.

    Attributes:
        evaluations: what it put to the test before it ended.
        violation: what did not hold.
        error: what kept it from judging, if that was not the engine.
        unsupported: the capabilities that the engine does not declare, or what else its adapter
            does not offer.
        story: the calls that it made, one a line.
    """

    scenario: Scenario
    evaluations: Evaluations
    violation: Violation | None = None
    error: str = ""
    unsupported: tuple[str, ...] = ()
    story: tuple[str, ...] = ()

    def verdicts(self) -> list[Verdict]:
        """One for each requirement that it says something of.

        A deviation in a scenario of level `should` is a remark: its message is kept, and the
        requirement passes as far as this scenario is concerned.
        """
        tests = (self.scenario.name,)
        if self.unsupported:
            return []
        if self.error:
            ids = self.scenario.spec_ids
            return [Verdict(i, Outcome.ERROR, message=self.error, tests=tests) for i in ids]
        counts = self.evaluations.counts
        found = {i: Verdict(i, Outcome.PASS, counts[i], tests=tests) for i in sorted(counts)}
        if self.violation:
            spec_id, message = self.violation.spec_id, self.violation.message
            must = self.scenario.level == "must"
            found[spec_id] = Verdict(
                spec_id,
                Outcome.FAIL if must else Outcome.PASS,
                max(1, counts[spec_id]) if must else 0,
                message if must else f"[should] {message}",
                self.story,
                tests=tests,
            )
        return list(found.values())


def run_scenario(scenario: Scenario, door: Any) -> Result:
    """Run one at an open door; the engine's own exceptions count against its main requirement."""
    if missing := scenario.missing(door.hello().capabilities):
        return Result(scenario, Evaluations(), unsupported=missing)
    seen, teller = Evaluations(), Storyteller(door)
    violation, error = None, ""
    unsupported: tuple[str, ...] = ()
    try:
        scenario.run(teller, seen)
    except Violation as found:
        violation = found
    except (Refused, EngineFault) as raised:
        what = "refused" if isinstance(raised, Refused) else "raised"
        violation = Violation(scenario.spec_ids[0], f"the engine {what}: {summary_of(str(raised))}")
    except Unsupported as raised:
        unsupported = (str(raised),)
    except Exception as raised:
        error = f"{type(raised).__name__}: {raised}"
    return Result(scenario, seen, violation, error, unsupported, teller.story())


def run_scenarios(
    open_door: Callable[[], Any], select: Iterable[Scenario] = SCENARIOS
) -> Iterator[Result]:
    """Run scenarios one by one, each at the door that `open_door` gives; each resets it."""
    for scenario in select:
        yield run_scenario(scenario, open_door())
