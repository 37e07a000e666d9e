"""From what the parts of a run found to one verdict for each requirement.

Corpus, scenarios and state machine each judge for themselves. Here their verdicts are merged, what
nobody could judge is named, and a failure that only follows from another is told apart from it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace

from nanovllm.conformance.protocol import Hello
from nanovllm.conformance.registry import Requirement
from nanovllm.conformance.verdicts import Outcome, Verdict

# The later one wins. A failure says more than an error of the harness, and either more than a pass.
_PRECEDENCE = (
    Outcome.UNSUPPORTED,
    Outcome.NOT_EXERCISED,
    Outcome.BLOCKED,
    Outcome.PASS,
    Outcome.UNEXPECTED_PASS,
    Outcome.KNOWN_FAIL,
    Outcome.ERROR,
    Outcome.FAIL,
)

Verdicts = dict[str, Verdict]


def merge(parts: Iterable[Verdict]) -> Verdicts:
    """One verdict for each requirement: the gravest, with the shortest story that shows it."""
    merged: Verdicts = {}
    for verdict in parts:
        spec_id = verdict.spec_id
        merged[spec_id] = _both(merged[spec_id], verdict) if spec_id in merged else verdict
    return merged


def _both(first: Verdict, second: Verdict) -> Verdict:
    graver = max(first, second, key=_gravity)
    return replace(
        graver,
        evaluations=first.evaluations + second.evaluations,
        tests=tuple(dict.fromkeys(first.tests + second.tests)),
    )


def _gravity(verdict: Verdict) -> tuple[int, bool, int]:
    rank = _PRECEDENCE.index(verdict.outcome)
    return rank, verdict.trace is not None, -len(verdict.story)


def complete(
    selected: Mapping[str, Requirement], found: Mapping[str, Verdict], hello: Hello
) -> Verdicts:
    """A verdict for every selected requirement, in the registry's order.

    What the engine does not declare is `unsupported`; a pass without an evaluation, or no verdict
    at all, is `not_exercised`.
    """
    return {
        spec_id: _judge(requirement, found.get(spec_id), hello)
        for spec_id, requirement in selected.items()
    }


def _judge(requirement: Requirement, found: Verdict | None, hello: Hello) -> Verdict:
    if missing := requirement.missing(hello.capabilities):
        names = ", ".join(missing)
        return Verdict(requirement.id, Outcome.UNSUPPORTED, message=f"does not declare {names}")
    if not set(requirement.doors) & set(hello.doors):
        names = " or ".join(requirement.doors)
        return Verdict(requirement.id, Outcome.UNSUPPORTED, message=f"has no door {names}")
    if found is None:
        return Verdict(requirement.id, Outcome.NOT_EXERCISED)
    if found.outcome is Outcome.PASS and not found.evaluations:
        return replace(found, outcome=Outcome.NOT_EXERCISED, message="")
    return found


def block(selected: Mapping[str, Requirement], verdicts: Mapping[str, Verdict]) -> Verdicts:
    """Those that need a requirement which fails are `blocked`, and say by which.

    A pass was seen and stays. A failure that is known blocks only what was not exercised, lest it
    excuse new failures.
    """
    return {
        spec_id: _blocked(verdict, _causes(spec_id, selected, verdicts))
        for spec_id, verdict in verdicts.items()
    }


def _causes(
    spec_id: str, selected: Mapping[str, Requirement], verdicts: Mapping[str, Verdict]
) -> dict[str, Outcome]:
    """The failed ones among all that it needs, directly or not."""
    causes: dict[str, Outcome] = {}
    seen = {spec_id}
    queue = [spec_id]
    while queue:
        requirement = selected.get(queue.pop())
        for need in requirement.needs if requirement else ():
            if need in seen:
                continue
            seen.add(need)
            queue.append(need)
            if need in verdicts and verdicts[need].outcome in (Outcome.FAIL, Outcome.KNOWN_FAIL):
                causes[need] = verdicts[need].outcome
    return causes


def _blocked(verdict: Verdict, causes: Mapping[str, Outcome]) -> Verdict:
    new = [spec_id for spec_id, outcome in causes.items() if outcome is Outcome.FAIL]
    if verdict.outcome is Outcome.FAIL and new:
        names, own = ", ".join(new), f"; by itself: {verdict.message}"
    elif verdict.outcome is Outcome.NOT_EXERCISED and causes:
        names, own = ", ".join(causes), ""
    else:
        return verdict
    verb = "fail" if "," in names else "fails"
    return replace(verdict, outcome=Outcome.BLOCKED, message=f"needs {names}, which {verb}{own}")
