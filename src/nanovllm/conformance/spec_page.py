"""The specification as Markdown: the page `docs/spec.md`, and one requirement for `explain`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from nanovllm.conformance.requirement import Requirement, Spec

INTRO = """\
<!-- Generated from src/nanovllm/conformance/spec.toml by `python -m nanovllm.conformance.registry
--write docs/spec.md`; edit that file. -->

# Specification {version}

What an inference engine with a paged KV cache promises: {total} requirements in {groups} groups.
Each has an id that is never reused, and tests name the id they show
(`@pytest.mark.spec("PFX-6")`). [conformance.md](conformance.md) is how to test an engine.

**How to read one.** A deviation from a *must* is a failure; a deviation from a *should*, or from
the line **Should** of a must, is policy: reported, never a failure. A requirement with a
*capability* counts for engines that declare it: one without top-k is smaller, not wrong. The
*door* is where it can be judged: `blocks` (a block manager alone), `core` (with a scheduler, the
suite playing the model), `engine` (prompts in, tokens out), `gpu`, `perf`. *Reference only* means
that no door shows it; unit tests of our own engine do. **Reference** is what our engine promises
beyond the requirement. *Pending* says what has to be built before this project can test it.
**Blocked by**: if one of those fails, this one cannot be judged.

**Words.** A *block* has `bs` slots, one per token position; the engine is offered `N` blocks. A
request has `p` prompt tokens and has produced `k`; `n = p + k` tokens are known. `R` requests are
in the system. A *row* of a plan is "compute positions `[start, start + count)` of one request". A
block is *free* when no table holds it, and *published* when the prefix cache can find it; a free
block may be published. With one step *ahead*, a plan may be made before the previous one is
committed: it is judged by the commits made so far, being one step late is right, and an
end-of-sequence may cost one row that is thrown away.
"""


def spec_page(spec: Spec) -> str:
    """`docs/spec.md`, whole."""
    return "\n".join(_page(spec)).rstrip() + "\n"


def requirement_page(spec: Spec, requirement: Requirement, tests: Sequence[str] = ()) -> str:
    """One requirement as a page of its own; `tests` are the names of those that show it."""
    lines = [f"# {requirement.id}: {requirement.title}", ""]
    lines += _body(spec, requirement, ", ".join(requirement.needs))
    lines += _labelled("Tests", ", ".join(f"`{test}`" for test in tests))
    return "\n".join(lines).rstrip() + "\n"


def _page(spec: Spec) -> Iterator[str]:
    requirements = spec.requirements.values()
    yield INTRO.format(version=spec.version, total=len(spec.requirements), groups=len(spec.groups))
    yield "| group | about | requirements | musts | shoulds |"
    yield "|---|---|---:|---:|---:|"
    members = {name: [r for r in requirements if r.group == name] for name in spec.groups}
    for name, group in spec.groups.items():
        musts, shoulds = (sum(r.level == x for r in members[name]) for x in ("must", "should"))
        total = len(members[name])
        yield f"| [{name}](#{name.lower()}) | {group.title} | {total} | {musts} | {shoulds} |"
    for name, group in spec.groups.items():
        yield f'\n<a id="{name.lower()}"></a>\n\n## {name}: {group.title}\n'
        if group.about:
            yield group.about.strip() + "\n"
        for requirement in members[name]:
            yield f'<a id="{requirement.id.lower()}"></a>\n'
            yield f"### {requirement.id} {requirement.title}\n"
            links = [f"[{need}](#{need.lower()})" for need in requirement.needs]
            yield from _body(spec, requirement, ", ".join(links))


def _body(spec: Spec, requirement: Requirement, needs: str) -> Iterator[str]:
    yield f"*{'; '.join(_properties(requirement))}*"
    yield ""
    yield requirement.text
    yield ""
    reports = [_report_link(spec, example) for example in requirement.examples]
    faults = [f"`{fault}`" for fault in requirement.faults]
    for label, value in (
        ("Should", requirement.should),
        ("Reference", requirement.reference),
        ("Why", requirement.why),
        ("Blocked by", needs),
        ("Reports", ", ".join(reports)),
        ("Planted faults", ", ".join(faults)),
        ("Pending", requirement.pending),
    ):
        yield from _labelled(label, value)


def _properties(requirement: Requirement) -> Iterator[str]:
    yield requirement.level
    if requirement.ref_only:
        yield "reference only"
    else:
        doors = " and ".join(requirement.doors)
        yield f"{doors} {'doors' if len(requirement.doors) > 1 else 'door'}"
    if requirement.capabilities:
        names = ", ".join(f"`{name}`" for name in requirement.capabilities)
        yield f"{'capabilities' if len(requirement.capabilities) > 1 else 'capability'} {names}"
    yield f"since {requirement.since}"


def _report_link(spec: Spec, example: str) -> str:
    name, _, number = example.partition("#")
    # GitHub leads from an issue's address to the pull request of that number, if it is one.
    return f"[{example}](https://github.com/{spec.repositories[name]}/issues/{number})"


def _labelled(label: str, value: str) -> Iterator[str]:
    if value:
        yield f"**{label}**: {value}"
        yield ""
