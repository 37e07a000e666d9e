"""The doctor says what an engine does not keep, and what it has and does not say."""

from __future__ import annotations

import random
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from nanovllm.conformance.adapters.reference import Reference, ReferenceCore
from nanovllm.conformance.doctor import DoctorReport, examine
from nanovllm.conformance.engine_probes import ENGINE_PROBES
from nanovllm.conformance.probes import CORE_PROBES
from nanovllm.conformance.protocol import (
    CORE_CAPABILITIES,
    ENGINE_CAPABILITIES,
    EngineRequest,
    EngineResult,
    Hello,
    Plan,
    PoolView,
    RequestOptions,
    Row,
    World,
)
from nanovllm.conformance.transport import local_door, open_door

SMALL = {"num_kvcache_blocks": 64}
ENGINES = Path(__file__).parents[1] / "conformance_engines"


def names(report: DoctorReport, kind: str) -> list[tuple[str, str | None]]:
    return [(finding.door, finding.capability) for finding in getattr(report, kind)]


def test_the_reference_is_what_it_declares() -> None:
    report = examine(local_door(Reference()), options=SMALL)
    assert [str(finding) for finding in report.problems] == []
    assert [str(finding) for finding in report.hints] == []
    probed = {finding.capability for finding in report.findings if finding.works}
    assert probed >= (CORE_CAPABILITIES | ENGINE_CAPABILITIES) - {"cow", "graphs", "tp"}
    assert next(report.lines()).startswith("reference ")


class Modest(ReferenceCore):
    capabilities = frozenset({"pool"})


def test_what_works_and_is_not_declared_is_a_hint() -> None:
    report = examine(local_door(Modest()))
    assert report.problems == ()
    # Without a hash to look at, nobody can tell whether it was replaced.
    expected = {("core", name) for name in ReferenceCore.capabilities - {"pool", "hash_override"}}
    assert set(names(report, "hints")) == {*expected, ("blocks", "prefix_cache")}
    assert "core: abort: works; declare it to have it tested" in report.lines()


class Boastful(ReferenceCore):
    """Declares everything, and keeps nothing that goes beyond plain requests."""

    capabilities = CORE_CAPABILITIES

    def reset(self, world: World) -> None:
        wide = max(world.max_num_batched_tokens, 16)
        super().reset(replace(world, hash="real", prefix_cache=False, max_num_batched_tokens=wide))

    def add(self, request: int, prompt: Any, max_tokens: int, options: RequestOptions) -> None:
        super().add(request, prompt, max_tokens, RequestOptions(salt="everybody's"))

    def abort(self, request: int) -> bool:
        return True

    def fail_step(self, step: int) -> list[Any]:
        raise AssertionError("never thought of that")

    def hash(self, token_ids: Any, parent: str | None) -> str:
        return str(token_ids)

    def pool(self) -> PoolView:
        return replace(super().pool(), free=())

    def wire(self, id: Any) -> int:
        return 0

    def stats(self) -> Any:
        raise NotImplementedError


def test_what_is_declared_and_does_not_work_is_a_problem() -> None:
    report = examine(local_door(Boastful()))
    problems = dict(zip(names(report, "problems"), map(str, report.problems), strict=True))
    missing = CORE_CAPABILITIES - {"salt"}
    assert {name for door, name in problems if door == "core"} == missing
    told = {
        "abort": "the second abort of a request said yes",
        "chunked_prefill": "with 2 tokens a step, rows have [5, 1, 1]",
        "fail_step": "EngineFault: AssertionError: never thought of that",
        "hash": "three prefixes have the hashes",
        "min_tokens": "nothing but eos: 1 outputs, not 3",
        "pool": "not the 8 blocks",
        "prefix_cache": "was computed from its first token",
        "stats": "Unsupported: NotImplementedError",
        "wire": "a row of 3 tokens takes 0 bytes",
    }
    for name, text in told.items():
        assert text in problems["core", name]
        assert problems["core", name].startswith(f"core: {name}: declared, but ")


class Salted(ReferenceCore):
    """Ignores salts."""

    def add(self, request: int, prompt: Any, max_tokens: int, options: RequestOptions) -> None:
        super().add(request, prompt, max_tokens, replace(options, salt=None))


@pytest.mark.spec("PFX-14")
def test_a_salt_that_is_ignored_is_a_problem() -> None:
    assert names(examine(local_door(Salted())), "problems") == [("core", "salt")]


class Caching(ReferenceCore):
    """Its prefix cache is always on."""

    def reset(self, world: World) -> None:
        super().reset(replace(world, prefix_cache=True))


@pytest.mark.spec("PFX-12")
def test_a_prefix_cache_that_cannot_be_turned_off_is_a_problem() -> None:
    (problem,) = examine(local_door(Caching())).problems
    assert "with prefix_cache=False in the world, a prompt was cached" in str(problem)


class Idle(ReferenceCore):
    def schedule(self) -> Plan:
        return Plan(0)


class Confused(ReferenceCore):
    def schedule(self) -> Plan:
        plan = super().schedule()
        return replace(plan, rows=tuple(Row((9, 9), *r[1:]) for r in map(_fields, plan.rows)))


def _fields(row: Row) -> tuple[Any, ...]:
    return row.id, row.start, row.count, row.block_table


@pytest.mark.parametrize(
    ("adapter", "message"),
    [(Idle, "nothing was planned, but request 0 has not ended"), (Confused, "who are not there")],
)
def test_nothing_else_is_probed_when_the_plain_calls_fail(adapter: Any, message: str) -> None:
    report = examine(local_door(adapter()))
    assert [f for f in report.findings if f.door == "core"] == list(report.problems)
    assert message in str(report.problems[-1])


class Silent:
    def hello(self) -> Hello:
        raise OSError("no GPU")


def test_an_engine_that_does_not_answer_is_a_problem_too() -> None:
    report = examine(local_door(Silent()))
    assert report.hello is None
    assert "EngineFault: OSError: no GPU" in "\n".join(report.lines())


class AheadOfNobody(ReferenceCore):
    def hello(self) -> Hello:
        return replace(super().hello(), ahead=1)

    def schedule(self) -> Plan:
        if getattr(self, "_steps", None):
            raise AssertionError("a step is in flight")
        return super().schedule()


def test_a_step_ahead_is_probed_where_it_is_declared() -> None:
    assert ("core", "ahead") in names(examine(local_door(AheadOfNobody())), "problems")


class Deaf:
    """Draws as many tokens as it is asked for, and listens to nothing else."""

    def __init__(self) -> None:
        self.random = random.Random(0)

    def hello(self) -> Hello:
        return Hello("deaf", "1", ("engine",), ENGINE_CAPABILITIES)

    def open(self, model: str, options: Mapping[str, Any]) -> None:
        """There is no model."""

    def generate(self, requests: Sequence[EngineRequest]) -> list[list[EngineResult]]:
        return [[self.draw(request.params["max_tokens"])] for request in requests]

    def draw(self, length: int) -> EngineResult:
        token_ids = tuple(self.random.randrange(97, 123) for _ in range(length))
        return EngineResult(token_ids, bytes(token_ids).decode(), "length", 0)

    def stream(self, request: EngineRequest, abort_after: int | None = None) -> list[str]:
        return list(self.draw(request.params["max_tokens"]).text)


@pytest.mark.spec("SMP-1", "SMP-4")
def test_an_engine_that_ignores_its_parameters_is_found_out() -> None:
    report = examine(local_door(Deaf()))
    found = {name for _, name in names(report, "problems")}
    # Any two draws differ, so it does sample, and penalties do change something.
    assert found == set(ENGINE_PROBES) - {"sampling", "penalties", "min_tokens"}


def test_presets_are_told_apart(tmp_path: Path) -> None:
    for year, other in (("2025", "2026"), ("2026", "2025")):
        path = ENGINES / f"nano_{year}"
        with open_door("nanovllm_like", path=path) as door:
            assert examine(door).problems == ()
        with open_door("nanovllm_like", path=path, options={"preset": other}) as door:
            assert ("core", None) in names(examine(door), "problems")
    # On a command line `preset=1984` is a number.
    with open_door("nanovllm_like", path=path, options={"preset": 1984}) as door:
        text = "\n".join(examine(door).lines())
    assert "preset=1984: expected auto, 2025, 2026" in text


@pytest.mark.skipif(shutil.which("node") is None, reason="no node here")
def test_an_engine_in_another_language_is_what_it_declares() -> None:
    with open_door(f"cmd:node {ENGINES / 'engine.mjs'}") as door:
        report = examine(door)
    assert report.problems == ()
    assert report.hints == ()
    assert sum(finding.works for finding in report.findings) == 10


def test_every_core_capability_has_a_probe() -> None:
    assert set(CORE_PROBES) == CORE_CAPABILITIES
