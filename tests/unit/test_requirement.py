"""What a file of requirements may hold, and what is refused."""

from __future__ import annotations

import pytest

from nanovllm.conformance.requirement import Requirement, parse_spec

HEAD = """
version = "0.2"
[repositories]
vllm = "vllm-project/vllm"
[groups.ABC]
title = "three letters"
doors = ["core"]
capabilities = ["prefix_cache"]
since = "0.1"
"""
PROSE = 'title = "One"\ntext = "It holds."\nwhy = "It matters."\n'
FIRST = HEAD + "[requirements.ABC-1]\n" + PROSE


def parse_one(extra: str = "") -> Requirement:
    return parse_spec(FIRST + extra).requirements["ABC-1"]


def test_defaults_come_from_the_group_and_capabilities_add_up() -> None:
    plain = parse_one()
    assert (plain.level, plain.doors, plain.since) == ("must", ("core",), "0.1")
    assert plain.capabilities == ("prefix_cache",)
    other = parse_one(
        'level = "may"\ndoors = ["engine", "core"]\ncapabilities = ["pool"]\nsince = "0.2"\n'
        'should = """a\n   b"""\nexamples = ["vllm#12"]\nfaults = ["one", "two"]\nref_only = true'
    )
    assert (other.level, other.door, other.since) == ("may", "engine", "0.2")
    assert other.capabilities == ("prefix_cache", "pool")
    assert (other.should, other.examples, other.faults) == ("a b", ("vllm#12",), ("one", "two"))
    assert other.ref_only


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        ('level = "shall"', "ABC-1: unknown level shall; there are may, must, should"),
        ('doors = ["window"]', "ABC-1: unknown door window"),
        ("doors = []", "ABC-1: doors is empty"),
        ('capabilities = ["speed"]', "ABC-1: unknown capability speed"),
        ('capabilities = ["prefix_cache"]', "ABC-1: capabilities has one twice"),
        ('needs = ["ABC-9"]', "ABC-1: unknown need ABC-9"),
        ('needs = ["ABC-1"]', "ABC-1: needs itself, by ABC-1 -> ABC-1"),
        ('faults = ["x", "x"]', "ABC-1: faults has one twice"),
        ('since = "soon"', "ABC-1: since 'soon' is not of the form"),
        ('since = "0.10"', "ABC-1: since 0.10, after 0.2"),
        ('examples = ["vllm 12"]', "ABC-1: example 'vllm 12' is not of the form"),
        ('examples = ["sglang#12"]', "ABC-1: unknown repository sglang"),
        ('colour = "red"', "ABC-1: unknown key colour"),
        ('ref_only = "yes"', "ABC-1: ref_only must be a bool, got 'yes'"),
        ('needs = "ABC-1"', "ABC-1: needs must be a tuple"),
        ("[requirements.ABC-2]\n" + PROSE.replace("why", "#"), "ABC-2: .* missing .*'why'"),
        ("[requirements.ABC-2]\n" + PROSE.replace("One", " "), "ABC-2: title is empty"),
        ("[requirements.abc-2]\n" + PROSE, "abc-2: unknown group abc"),
        ("[requirements.ABC-0]\n" + PROSE, "ABC-0: id 'ABC-0' is not of the form"),
        ("[requirements.ABC-1]\n" + PROSE, "Cannot declare .* twice"),
        ('[groups.XYZ]\nabout = "x"', "XYZ: title is empty"),
        ('[groups.XYZ]\ntitle = "x"\nlevel = "may"', "XYZ: unknown default level"),
        ("[other]", "there are version, repositories, groups, requirements, other"),
    ],
)
def test_an_entry_that_makes_no_sense_is_refused_by_name(extra: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse_one(extra)


def test_needs_may_not_go_in_circles() -> None:
    circle = FIRST + 'needs = ["ABC-2"]\n[requirements.ABC-2]\n' + PROSE + 'needs = ["ABC-1"]'
    with pytest.raises(ValueError, match="ABC-1: needs itself, by ABC-1 -> ABC-2 -> ABC-1"):
        parse_spec(circle)
