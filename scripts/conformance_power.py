"""Measures what the conformance suite sees: planted faults, false alarms, reach.

    python scripts/conformance_power.py --results build/power.jsonl --write docs/conformance.md

Each planted fault is tried by everything once, and by the state machine with every seed. Legal
engines are tried likewise; what convicts them of breaking a must is a false alarm. Every finished
piece of this work is a line of the results, and is not done again, so that it can go on another
day or on another machine. `--jobs 0` measures nothing more.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, NamedTuple

from nanovllm.conformance import power
from nanovllm.conformance.faults import FAULTS
from nanovllm.conformance.power_page import failures, page, put
from nanovllm.conformance.runner import PROFILES
from nanovllm.conformance.variants import VARIANTS

TESTS = Path(__file__).resolve().parents[1] / "tests"
ENGINES = {"reference": power.REFERENCE, **VARIANTS}
PARTS = ("faults", "others", "chance", "alarms", "reach", "runtime")
PROFILE = "ci"
PIECE = 10
"""Seeds of one piece of work."""

Results = dict[tuple[str, str, int], Any]


class Piece(NamedTuple):
    """Work that is done in one go; `name` of a fault or an engine, seeds from `first` on."""

    part: str
    name: str
    first: int


def pieces(options: argparse.Namespace) -> Iterator[Piece]:
    """All that is asked for; what takes longest comes first."""
    runs = -(-options.examples // PROFILES[PROFILE].examples)
    faults = sorted(FAULTS.values(), key=lambda fault: fault.door != "engine")
    drawn = [fault.name for fault in faults if fault.door == "core"]
    yield Piece("runtime", "reference", 0)
    yield from (Piece("faults", fault.name, 0) for fault in faults)
    yield from (Piece("others", fault.name, 0) for fault in faults if fault.door != "unit")
    yield from (Piece("reach", "reference", i) for i in range(0, options.seeds, PIECE))
    yield from (Piece("chance", f, i) for i in range(0, options.seeds, PIECE) for f in drawn)
    yield from (Piece("alarms", e, i) for i in range(0, runs, PIECE) for e in ENGINES)


def do(piece: Piece) -> Any:
    """The piece's result, as JSON can tell it."""
    seeds = range(piece.first, piece.first + PIECE)
    match piece.part:
        case "faults":
            trial = power.try_fault(FAULTS[piece.name], profile=PROFILE, seed=0, tests=TESTS)
            return asdict(trial)
        case "others":
            return sorted(power.also_convicted(FAULTS[piece.name], PROFILE, 0))
        case "chance":
            return [power.is_drawn(FAULTS[piece.name], PROFILE, seed) for seed in seeds]
        case "alarms":
            return _alarms(piece.name, seeds)
        case "reach":
            return [power.reach(PROFILE, seed) for seed in seeds]
        case _:
            return power.seconds_of_the_core_door(PROFILE)


def _alarms(name: str, seeds: range) -> dict[str, Any]:
    engine = ENGINES[name]
    found = power.scenario_findings(engine) if seeds.start == 0 else []
    for seed in seeds:
        found += power.machine_findings(engine, PROFILE, seed)
    examples = len(seeds) * PROFILES[PROFILE].examples
    return {"examples": examples, "found": [asdict(finding) for finding in found]}


def measure(options: argparse.Namespace, done: Results) -> None:
    """Do what is not done yet, and write down each piece when it is."""
    wanted = [
        piece
        for piece in pieces(options)
        if piece not in done
        and piece.part in (options.part or PARTS)
        and fnmatchcase(piece.name, options.only)
    ]
    options.results.parent.mkdir(parents=True, exist_ok=True)
    with (
        options.results.open("a", encoding="utf-8") as file,
        ProcessPoolExecutor(options.jobs) as pool,
    ):
        running = {pool.submit(do, piece): piece for piece in wanted}
        for i, future in enumerate(as_completed(running), 1):
            piece = running[future]
            done[piece] = result = future.result()
            file.write(json.dumps([*piece, result]) + "\n")
            file.flush()
            print(f"{i} of {len(wanted)}:", *piece, file=sys.stderr, flush=True)


def read(results: Path) -> Results:
    """What was measured before."""
    if not results.exists():
        return {}
    lines = map(json.loads, results.read_text(encoding="utf-8").splitlines())
    return {Piece(*piece): result for *piece, result in lines}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=100, help="of each fault, and of reach")
    parser.add_argument("--examples", type=int, default=100_000, help="of each legal engine")
    parser.add_argument("--only", default="*", help="pattern of names of faults and engines")
    parser.add_argument("--part", action="append", choices=PARTS)
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="processes")
    parser.add_argument("--results", type=Path, required=True, help="JSON lines, continued")
    parser.add_argument("--write", type=Path, metavar="PAGE", help="put the tables into this page")
    options = parser.parse_args()
    done = read(options.results)
    if options.jobs:
        measure(options, done)
    text = page(done)
    if options.write:
        put(options.write, text)
    else:
        print(text)
    wrong = failures(done)
    print(*wrong, sep="\n", file=sys.stderr)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
