"""Measures what the conformance suite sees: planted faults, false alarms, reach.

    python scripts/conformance_power.py --seeds 100 --json power.json --markdown power.md

Each planted fault is tried by everything once, and by the state machine with every seed. P is the
share of seeds whose whole run convicts it on its own requirement: 1 if a scenario does, since these
always run the same. Legal variants and the reference are tried likewise; what convicts them on a
must is a false alarm.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict
from fnmatch import fnmatchcase
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

from nanovllm.conformance import power
from nanovllm.conformance.adapters.reference import ReferenceCore
from nanovllm.conformance.faults import FAULTS
from nanovllm.conformance.planting import Planting
from nanovllm.conformance.runner import PROFILES
from nanovllm.conformance.variants import VARIANTS

TESTS = Path(__file__).resolve().parents[1] / "tests"
REFERENCE = Planting("reference", "The reference itself.", "core", ReferenceCore, ReferenceCore)


def measure_fault(name: str, profile: str, seeds: int) -> dict[str, Any]:
    fault = FAULTS[name]
    trial = power.try_fault(fault, profile=profile, seed=0, tests=TESTS)
    by_machine = 0
    if fault.door == "core":
        found = (
            power.machine_findings(fault, profile, seed, {fault.convicts}) for seed in range(seeds)
        )
        by_machine = sum(map(bool, found))
    certain = {"scenarios", "unit tests"} & set(trial.by)
    return {
        **asdict(trial),
        "door": fault.door,
        "text": fault.text,
        "machine": by_machine / seeds,
        "p": 1.0 if certain else by_machine / seeds,
    }


def measure_variant(name: str, profile: str, seeds: int) -> dict[str, Any]:
    planting = VARIANTS.get(name, REFERENCE)
    alarms = power.scenario_findings(planting)
    for seed in range(seeds):
        alarms += power.machine_findings(planting, profile, seed)
    return {
        "name": name,
        "text": planting.text,
        "examples": seeds * PROFILES[profile].examples,
        "alarms": [asdict(alarm) for alarm in alarms],
    }


def measure_reach(profile: str, seeds: int, spread: Callable[..., Iterable[Any]]) -> dict[str, Any]:
    counts = list(spread(partial(power.reach, profile), range(seeds)))
    situations = sorted({name for count in counts for name in count})
    return {name: sum(bool(count[name]) for count in counts) / seeds for name in situations}


# ---- the table -----------------------------------------------------------------------------------


def summary(result: dict[str, Any]) -> Iterator[str]:
    faults, variants = result["faults"], result["variants"]
    stories = [f["own"]["operations"] for f in faults if f["own"] and f["door"] == "core"]
    convicted = sum(f["own"] is not None for f in faults)
    alarms = sum(len(v["alarms"]) for v in variants)
    if faults:
        yield f"* {convicted} of {len(faults)} planted faults convicted on their own requirement"
        yield f"* smallest P over {result['seeds']} seeds: {min(f['p'] for f in faults):.2f}"
    if stories:
        yield f"* operations of a story: median {median(stories):g}, at most {max(stories)}"
        slowest = max(f["seconds"] for f in faults if f["door"] == "core")
        yield f"* seconds to a conviction at the core door: at most {slowest:.1f}"
    if variants:
        examples = variants[0]["examples"]
        yield f"* {alarms} false alarms, {len(variants)} legal engines of {examples} examples each"
    for situation, share in result["reach"].items():
        yield f"* reached by {share:.0%} of the seeds: {situation}"


def fault_table(faults: list[dict[str, Any]]) -> Iterator[str]:
    yield "| requirement | fault | door | P | machine | operations | found by | also convicts |"
    yield "|---|---|---|---|---|---|---|---|"
    for f in faults:
        machine = f"{f['machine']:.2f}" if f["door"] == "core" else ""
        operations = f["own"]["operations"] if f["own"] and f["door"] != "unit" else ""
        cells = f"{f['door']} | {f['p']:.2f} | {machine} | {operations}"
        by, others = ", ".join(f["by"]) or "nobody", ", ".join(f["others"])
        yield f"| {f['convicts']} | {f['fault']}: {f['text']} | {cells} | {by} | {others} |"


def variant_table(variants: list[dict[str, Any]]) -> Iterator[str]:
    yield "| legal engine | false alarms |"
    yield "|---|---|"
    for v in variants:
        alarms = ", ".join(sorted({alarm["spec_id"] for alarm in v["alarms"]})) or "none"
        yield f"| {v['name']}: {v['text']} | {alarms} |"


def measure(options: argparse.Namespace) -> dict[str, Any]:
    parts = options.part or ["faults", "variants", "reach"]
    how = {"profile": options.profile, "seeds": options.seeds}

    def chosen(part: str, names: Iterable[str]) -> list[str]:
        return [n for n in names if part in parts and fnmatchcase(n, options.only)]

    with ProcessPoolExecutor(options.jobs) as pool:
        faults = pool.map(partial(measure_fault, **how), chosen("faults", FAULTS))
        engines = chosen("variants", ["reference", *VARIANTS])
        variants = pool.map(partial(measure_variant, **how), engines)
        return {
            **how,
            "faults": list(told(faults, "fault")),
            "variants": list(told(variants, "name")),
            "reach": measure_reach(**how, spread=pool.map) if "reach" in parts else {},
        }


def told(results: Iterable[dict[str, Any]], name: str) -> Iterator[dict[str, Any]]:
    for result in results:
        print(result[name], "done", file=sys.stderr, flush=True)
        yield result


def page(result: dict[str, Any]) -> str:
    lines = list(summary(result))
    if result["faults"]:
        lines += ["", *fault_table(result["faults"])]
    if result["variants"]:
        lines += ["", *variant_table(result["variants"])]
    return "\n".join([*lines, ""])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--profile", default="ci", choices=sorted(PROFILES))
    parser.add_argument("--seeds", type=int, default=100)
    parser.add_argument("--only", default="*", help="pattern of names of faults and variants")
    parser.add_argument("--part", action="append", choices=("faults", "variants", "reach"))
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--markdown", type=Path)
    options = parser.parse_args()
    result = measure(options)
    text = page(result)
    if options.json:
        options.json.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    if options.markdown:
        options.markdown.write_text(text, encoding="utf-8")
    print(text)
    missed = [f["fault"] for f in result["faults"] if f["p"] < 0.99]
    alarmed = [v["name"] for v in result["variants"] if v["alarms"]]
    for name in (*missed, *alarmed):
        print(name, "is missed" if name in missed else "is convicted", file=sys.stderr)
    return 1 if missed or alarmed else 0


if __name__ == "__main__":
    sys.exit(main())
