"""The page that tells what was measured of the suite's power."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from pathlib import Path
from statistics import median
from typing import Any

from nanovllm.conformance.faults import FAULTS, Fault
from nanovllm.conformance.power import SITUATIONS, needed, without_fault
from nanovllm.conformance.runner import PROFILES
from nanovllm.conformance.variants import VARIANTS

Measured = Mapping[tuple[str, str, int], Any]
"""Result of each piece of work: (part, name of a fault or an engine, first seed)."""

STARVES = "prompts-always-go-first"
"""Its story is as long as somebody may have to wait (SCH-6)."""

BEGIN, END = "<!-- power: begin -->", "<!-- power: end -->"
EXAMPLES = PROFILES["ci"].examples


class Power:
    """What was measured, put together."""

    def __init__(self, measured: Measured) -> None:
        self.measured = measured
        self.trials = [
            trial for fault in FAULTS.values() for trial in self._results("faults", fault.name)
        ]

    def _results(self, part: str, name: str) -> Iterator[Any]:
        for (its_part, its_name, _), result in sorted(self.measured.items(), key=lambda i: i[0]):
            if (its_part, its_name) == (part, name):
                yield result

    def drawn(self, fault: str) -> list[bool]:
        """For each seed, whether the state machine's own examples convict it."""
        return list(chain.from_iterable(self._results("chance", fault)))

    def p(self, trial: Mapping[str, Any]) -> float:
        """Share of seeds whose whole run convicts a fault; scenarios are the same in each."""
        if {"scenarios", "unit tests"} & set(trial["by"]):
            return 1.0
        drawn = self.drawn(trial["fault"])
        return sum(drawn) / len(drawn) if drawn else float(bool(trial["own"]))

    def others(self, fault: str) -> list[str] | None:
        """Other requirements that convict it; None if nobody has looked."""
        return next(self._results("others", fault), None)

    def hidden(self) -> list[str]:
        """Faults that also fail what their own requirement needs, so that it is `blocked`."""
        return [
            fault.name
            for fault in FAULTS.values()
            if needed(fault.convicts).intersection(self.others(fault.name) or ())
        ]

    def alarms(self, engine: str) -> list[str]:
        results = self._results("alarms", engine)
        return [finding["spec_id"] for result in results for finding in result["found"]]

    def num_examples(self, engine: str) -> int:
        return sum(result["examples"] for result in self._results("alarms", engine))

    def reach(self) -> dict[str, list[bool]]:
        """For each situation and seed, whether an example came to it."""
        counts = list(chain.from_iterable(self._results("reach", "reference")))
        return {s: [bool(count.get(s)) for count in counts] for s in SITUATIONS if counts}

    @property
    def seconds(self) -> list[float]:
        return list(self._results("runtime", "reference"))


def failures(measured: Measured) -> list[str]:
    """What falls short of a goal."""
    power = Power(measured)
    missed = (f"{t['fault']} is missed" for t in power.trials if power.p(t) < 0.99)
    hidden = (f"{fault} is hidden by what its requirement needs" for fault in power.hidden())
    alarmed = (f"{e} is convicted: {ids}" for e in _engines() if (ids := power.alarms(e)))
    return [*missed, *hidden, *alarmed]


def put(path: Path, text: str) -> None:
    """Replace what stands between the markers of a page.

    Raises:
        ValueError: it lacks them.
    """
    page = path.read_text(encoding="utf-8")
    before, begin, rest = page.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"{path} has no lines {BEGIN} and {END}")
    path.write_text(f"{before}{BEGIN}\n\n{text}\n{END}{after}", encoding="utf-8")


def page(measured: Measured) -> str:
    """The goals and what was measured, then every fault, then every legal engine."""
    power = Power(measured)
    parts = (_goals(power), _faults(power), _alarms(power), _reach(power))
    return "\n".join(line for part in parts for line in (*part, ""))


def _engines() -> Sequence[str]:
    return ("reference", *VARIANTS)


def _goals(power: Power) -> Iterator[str]:
    yield "| goal | target | measured |"
    yield "|---|---|---|"
    trials = power.trials
    missing = ", ".join(without_fault()) or "none"
    yield f"| musts of SEQ, BLK, PFX, SCH, FRK, KV, SMP, STP without a fault | none | {missing} |"
    if trials:
        convicted = sum(t["own"] is not None for t in trials)
        yield f"| faults convicted on their own requirement | all | {convicted} of {len(trials)} |"
        told = ", ".join(power.hidden()) or "none"
        told += f" of {sum(power.others(name) is not None for name in FAULTS)} looked at"
        yield f"| of these, blocked because something else fails as well | none | {told} |"
        yield from _goals_of_seeds(power)
        stories = [t["own"]["operations"] for t in trials if t["own"] and _has_story(t)] or [0]
        told = f"median {median(stories):g}, at most {max(stories)} (`{STARVES}` aside)"
        yield f"| operations of the smallest story | median <= 6, at most 12 | {told} |"
        at_doors = [t for t in trials if _door(t) != "unit"]
        slowest = max(at_doors, key=lambda t: float(t["seconds"]))
        told = f"at most {slowest['seconds']:.1f} s ({slowest['convicts']})"
        yield f"| time to it, looking for the requirement alone | <= 5 s | {told} |"
    if examples := min(map(power.num_examples, _engines())):
        count = sum(len(power.alarms(engine)) for engine in _engines())
        told = f"{count} in {examples:,} examples each of {len(_engines())} engines"
        yield f"| false alarms | 0 in 100,000 examples each | {told} |"
    if reach := power.reach():
        least = min(reach, key=lambda situation: sum(reach[situation]))
        told = f"{sum(reach[least])} of {len(reach[least])} for the rarest, {least}"
        yield f"| seeds of {EXAMPLES} examples that reach each situation | >= 90 of 100 | {told} |"
    for seconds in power.seconds:
        yield f"| the reference's core door, one core | <= 60 s | {seconds:.1f} s |"


def _goals_of_seeds(power: Power) -> Iterator[str]:
    p = [power.p(trial) for trial in power.trials]
    seeds = [len(power.drawn(trial["fault"])) for trial in power.trials if _door(trial) == "core"]
    told = f"at least {min(p):.2f} over {min(seeds, default=0)} seeds"
    yield f"| P(convict) in one run of the profile `ci`, each fault | >= 0.99 | {told} |"


def _door(trial: Mapping[str, Any]) -> str:
    return FAULTS[trial["fault"]].door


def _has_story(trial: Mapping[str, Any]) -> bool:
    return _door(trial) != "unit" and trial["fault"] != STARVES


def _faults(power: Power) -> Iterator[str]:
    if not power.trials:
        return
    yield "| requirement | fault | door | P | drawn | story | found by | also convicts |"
    yield "|---|---|---|---|---|---|---|---|"
    for t in sorted(power.trials, key=lambda t: list(FAULTS).index(t["fault"])):
        fault, drawn = FAULTS[t["fault"]], power.drawn(t["fault"])
        alone = f"{sum(drawn) / len(drawn):.2f}" if drawn else ""
        story = t["own"]["operations"] if t["own"] and _has_story(t) else ""
        cells = f"{fault.door} | {power.p(t):.2f} | {alone} | {story}"
        by, also = ", ".join(t["by"]) or "nobody", _also(power, fault)
        yield f"| {fault.convicts} | {fault.name}: {fault.text} | {cells} | {by} | {also} |"


def _also(power: Power, fault: Fault) -> str:
    others = power.others(fault.name)
    if others is None:
        return "" if fault.door == "unit" else "not measured"
    return ", ".join(others)


def _alarms(power: Power) -> Iterator[str]:
    yield "| legal engine | examples | false alarms |"
    yield "|---|---|---|"
    for name in _engines():
        text = VARIANTS[name].text if name in VARIANTS else "The engine of this package."
        found = ", ".join(sorted(set(power.alarms(name)))) or "none"
        yield f"| {name}: {text} | {power.num_examples(name):,} | {found} |"


def _reach(power: Power) -> Iterator[str]:
    yield f"| situation | seeds of {EXAMPLES} examples that reach it |"
    yield "|---|---|"
    for situation, seeds in power.reach().items():
        yield f"| {situation} | {sum(seeds)} of {len(seeds)} |"
