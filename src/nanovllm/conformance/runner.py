"""Judges an engine at the core door: the corpus, then what the state machine draws."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from random import Random, SystemRandom
from types import MappingProxyType
from typing import Any

from nanovllm.conformance.checks import CHECKS
from nanovllm.conformance.examination import Example, Failure, again, examine
from nanovllm.conformance.machine import perform, wander
from nanovllm.conformance.operations import Operation
from nanovllm.conformance.panel import applicable
from nanovllm.conformance.protocol import CoreDoor, Hello, World
from nanovllm.conformance.shrink import shrink, size
from nanovllm.conformance.strategies import draw_world
from nanovllm.conformance.trace import corpus, example_of, verdict_of
from nanovllm.conformance.verdicts import Outcome, Verdict

CORE_REQUIREMENTS = tuple(dict.fromkeys(check.spec_id for check in CHECKS))
"""What the state machine can judge."""


@dataclass(frozen=True, slots=True)
class Profile:
    """How many examples; `derandomised` means the same ones every time, unless a seed is given."""

    examples: int
    derandomised: bool = False
    shrinks: bool = True


SHRUNK = 3
"""Stories of a failure that are shrunk, of which the smallest is told."""

PROFILES: Mapping[str, Profile] = MappingProxyType(
    {
        "dev": Profile(30),
        "ci": Profile(100, derandomised=True),
        "deep": Profile(5_000),
        "mutation": Profile(30, derandomised=True, shrinks=False),
    }
)


def run_core(
    open_door: Callable[[], CoreDoor],
    *,
    profile: str = "ci",
    seed: int | None = None,
    requirements: Collection[str] | None = None,
    options: Mapping[str, Any] | None = None,
) -> list[Verdict]:
    """A verdict for each of `CORE_REQUIREMENTS` that is selected (all if None).

    Args:
        open_door: to the engine; called once.
        profile: one of `PROFILES`.
        seed: of the examples; by default 0 or another one every time, as the profile says.
        options: the engine's own, for every world.

    Raises:
        ValueError: there is no such profile.
    """
    if profile not in PROFILES:
        raise ValueError(f"no profile {profile!r}; there are {', '.join(PROFILES)}")
    chosen = PROFILES[profile]
    if seed is None:
        seed = 0 if chosen.derandomised else SystemRandom().randrange(2**32)
    door = open_door()
    hello = door.hello()
    examples = [*recorded(options), *all_drawn(hello, profile, seed, options)]
    examination = examine(door, hello, examples, requirements)

    def verdict(spec_id: str) -> Verdict:
        failures = examination.sightings.get(spec_id)
        if not applicable(hello.capabilities, {spec_id}):
            return Verdict(spec_id, Outcome.UNSUPPORTED, message=_missing(spec_id, hello))
        if not failures and spec_id in examination.errors:
            return Verdict(spec_id, Outcome.ERROR, message=examination.errors[spec_id])
        failure = failures[0] if failures else None
        if failures and chosen.shrinks:
            failure = smallest(door, hello, failures[:SHRUNK])
        return verdict_of(spec_id, failure, examination.counts[spec_id])

    return [verdict(i) for i in CORE_REQUIREMENTS if requirements is None or i in requirements]


def recorded(options: Mapping[str, Any] | None = None) -> list[Example]:
    """The corpus."""
    return [example_of(trace, options) for trace in corpus().values()]


def all_drawn(
    hello: Hello, profile: str, seed: int, options: Mapping[str, Any] | None = None
) -> list[Example]:
    """A profile's examples of a seed."""
    return [drawn(hello, seed, i, options or {}) for i in range(PROFILES[profile].examples)]


def drawn(hello: Hello, seed: int, index: int, options: Mapping[str, Any]) -> Example:
    """The `index`-th example of a seed, the same wherever it is drawn."""
    rng = Random(f"{seed}/{index}")
    world = draw_world(rng, hello, options)
    state = rng.getstate()

    def play_it(session: Any) -> None:
        rng.setstate(state)
        wander(session, rng)

    return Example(world, play_it)


def smallest(door: CoreDoor, hello: Hello, failures: Sequence[Failure]) -> Failure:
    """The requirement's failure alone, all other checks off, by the smallest story.

    Different stories shrink to different smallest ones, so the best of several is taken.
    """
    spec_id = failures[0][1].spec_id

    def trial(world: World, operations: list[Operation]) -> Failure | None:
        example = Example(world, partial(perform, operations=operations))
        return again(door, hello, example, spec_id)

    alone = [trial(session.world, session.asked) for session, _ in failures]
    shrunk = [shrink(failure, trial) for failure in alone if failure is not None]
    # An engine that does not do the same twice is convicted by what it did once.
    return min(shrunk or failures, key=lambda failure: size(failure[0]))


def _missing(spec_id: str, hello: Hello) -> str:
    needs = (check.needs for check in CHECKS if check.spec_id == spec_id)
    missing = [sorted(names - hello.capabilities) for names in needs]
    fewest = min(len(names) for names in missing)
    return "does not declare " + next(", ".join(n) for n in missing if len(n) == fewest)
