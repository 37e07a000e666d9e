"""The studies' claims, as relations, at sizes that take no time."""

import re
import sys
from itertools import pairwise
from pathlib import Path
from random import Random

import pytest
from cli_door import invoke

from nanovllm.conformance.protocol import World
from nanovllm.conformance.verdicts import Violation
from nanovllm.engine.block_manager import hash_block
from nanovllm.study import (
    STUDIES,
    block_size,
    collisions,
    graph_shapes,
    prefix_index,
    temperature,
    victim,
)
from nanovllm.study.findings import Findings, Table
from nanovllm.study.indexes import INDEXES, run_index
from nanovllm.study.lab import run
from nanovllm.study.launches import launches_by_tokens
from nanovllm.study.page import update
from nanovllm.study.radix_tree import RadixTree
from nanovllm.study.workloads import Talk, Turn, assembled, chats, uneven

DOCS = Path(__file__).parents[2] / "docs"


def falls(values: list[float]) -> bool:
    return all(a > b for a, b in pairwise(values))


# ---- the lab -----------------------------------------------------------------------------------


def test_a_talk_goes_on_behind_its_answers_and_finds_them() -> None:
    talk = Talk((Turn((7,) * 8, 5), Turn((8,) * 3, 2)))
    result = run(World(4, 16), [talk])
    first, second = result.entries
    assert second.prompt == (*first.prompt, *first.completion, 8, 8, 8)
    assert second.num_cached == 12
    assert result.arrived == {0: 0, 1: 5}
    assert result.num_computed == 8 + 4 + 4 + 1
    assert result.num_recomputed == 0
    assert result.evaluations.total() > 100


def test_what_is_computed_twice_is_counted() -> None:
    """Two blocks each are too many for three: the second request starts over."""
    talks = [Talk((Turn((i,) * 3, 4),)) for i in range(2)]
    result = run(World(4, 3, max_num_seqs=2, prefix_cache=False), talks)
    assert result.num_preemptions == 1
    assert result.num_recomputed == result.num_computed - 2 * (3 + 4 - 1)
    assert result.num_recomputed == 4


# ---- block size --------------------------------------------------------------------------------


def test_larger_blocks_waste_more_find_less_and_need_shorter_tables() -> None:
    found = [block_size.measure(size, chats(4, num_turns=2), 2048) for size in (4, 16, 64)]
    assert falls([-m.waste for m in found])
    assert falls([m.entries for m in found])
    assert falls([m.hit_share for m in found])
    assert falls([m.metadata for m in found])
    assert all(abs(m.empty - (m.block_size - 1) / 2) < m.block_size / 4 for m in found)


def test_larger_blocks_leave_room_for_fewer() -> None:
    small, large = (block_size.measure(size, chats(8, num_turns=1), 1024) for size in (4, 128))
    assert small.running > large.running
    assert small.num_steps < large.num_steps


# ---- victim choice -----------------------------------------------------------------------------


@pytest.mark.spec("SCH-8", "SCH-9")
def test_the_policies_differ_in_who_waits_and_never_in_tokens() -> None:
    talks = uneven(8, every=1)
    runs = {name: victim.run_policy(name, talks, 32) for name in victim.POLICIES}
    assert all(result.num_preemptions for result in runs.values())
    outputs = [[entry.completion for entry in result.entries] for result in runs.values()]
    assert outputs[0] == outputs[1] == outputs[2]
    first = {name: result.entries[0].num_preemptions for name, result in runs.items()}
    assert first["newest"] == first["longest"] == 0 < first["oldest"]
    worst = {name: max(victim.stalls_of(result)) for name, result in runs.items()}
    assert worst["oldest"] > worst["newest"] > 0
    assert victim.overtaken(runs["newest"]) < victim.overtaken(runs["oldest"])


@pytest.mark.spec("SCH-8")
def test_the_suite_convicts_the_policy_that_preempts_the_oldest() -> None:
    world = World(victim.BLOCK_SIZE, 32, 16, 256, max_model_len=512)
    with pytest.raises(Violation, match="SCH-8"):
        run(world, uneven(8, every=1), victim.Oldest)


# ---- prefix index ------------------------------------------------------------------------------


def test_chain_and_tree_find_the_same_and_the_tree_is_smaller() -> None:
    talks = chats(5, num_turns=2, system=32)
    (chain, map_), (tree, nodes) = (run_index(make, talks, 8, 768) for make in INDEXES.values())
    assert chain.hit_share == tree.hit_share > 0
    assert [s.num_tokens for s in chain.steps] == [s.num_tokens for s in tree.steps]
    assert prefix_index.num_entries(map_) > prefix_index.num_entries(nodes)


@pytest.mark.parametrize("seed", range(4))
def test_the_tree_finds_what_a_plain_list_finds(seed: int) -> None:
    rng = Random(seed)
    tree, held = RadixTree(1), dict[int, bytes]()
    for block in range(400):
        if held and rng.random() < 0.4:
            gone = rng.choice(list(held))
            tree.remove(gone)
            tree.remove(gone)
            history = held.pop(gone)
            if history not in held.values():
                held = {b: h for b, h in held.items() if not h.startswith(history)}
        assert {b for b in range(block) if b in tree} == held.keys()
        parent = rng.choice([None, *held])
        unit = rng.choice((b"a", b"b", b"c"))
        held[block] = (held[parent] if parent is not None else b"") + unit
        tree.insert(unit, block, parent)
        key = rng.choice(list(held.values())) + bytes(rng.choices(b"abc", k=3))
        found = [set(holders) for holders in tree.match(key)]
        expected = [{b for b, h in held.items() if h == key[: i + 1]} for i in range(len(key))]
        assert found == [holders for holders in expected if holders]


def test_a_tree_of_tokens_is_found_in_less_time_than_a_chain_of_tokens() -> None:
    chain, tree = (prefix_index.cost(make, 1, 4, 256) for make in INDEXES.values())
    assert tree.find < chain.find


@pytest.mark.spec("PFX-2", "PFX-11")
def test_collisions_cost_comparisons_and_whoever_trusts_the_hash_is_convicted() -> None:
    found = [collisions.collide(bits, assembled(40), 2048) for bits in (0, 6, 128)]
    assert falls([line.num_wrong for line in found])
    assert falls([line.num_compared for line in found])
    assert len({line.hit_share for line in found}) == 1
    assert found[0].num_same_tokens > 0 == found[-1].num_wrong
    assert [line.trust for line in found] == ["breaks PFX-2", "breaks PFX-2", "nothing found"]


def test_a_truncated_hash_is_the_end_of_the_whole_one() -> None:
    whole = hash_block(b"tokens", b"parent")
    assert collisions.truncated(128)(b"tokens", b"parent") == whole
    assert collisions.truncated(12)(b"tokens", b"parent")[0] == whole[0]
    assert {collisions.truncated(2)(bytes([i]), b"")[0] for i in range(40)} == {0, 1, 2, 3}


# ---- graphs ------------------------------------------------------------------------------------


def test_shapes_of_decodes_come_again_and_those_of_prefills_do_not() -> None:
    _, (decode, prefill) = graph_shapes.measure(16, every=2)
    assert all(rows == tokens for rows, tokens in decode.shapes)
    assert len(set(decode.shapes)) <= graph_shapes.MAX_SEQS
    assert decode.seen_before > 0.5 > prefill.seen_before
    assert decode.padding < prefill.padding


def test_a_step_launches_as_much_for_many_tokens_as_for_few() -> None:
    launches = launches_by_tokens((2, 40))
    assert launches[2] == launches[40]
    assert launches[40] < 1.1 * launches[1]


# ---- temperature -------------------------------------------------------------------------------


@pytest.mark.spec("PFX-13")
def test_temperature_changes_tokens_and_not_hits() -> None:
    lines, num_checks = temperature.measure((0.0, 1.5), max_tokens=20)
    greedy, hot = lines
    assert all(line.same_tokens for line in lines)
    assert greedy.cold == hot.cold == 0 < greedy.warm == hot.warm
    assert hot.as_greedy < greedy.as_greedy == 20
    assert greedy.next_turn == hot.next_turn > greedy.warm
    assert num_checks > 100


@pytest.mark.spec("PFX-13")
def test_who_draws_what_does_not_change_a_plan() -> None:
    alike, apart = temperature.same_plans(6, 40)
    assert [step.rows for step in alike.steps] == [step.rows for step in apart.steps]
    assert len({tuple(entry.completion) for entry in alike.entries}) == 1
    assert len({tuple(entry.completion) for entry in apart.entries}) > 1


# ---- pages, plots and the command line ---------------------------------------------------------


def few_findings() -> Findings:
    table = Table("Sizes", ("size", "waste"), [("1", "0 %"), ("16", "3 %")])
    return Findings(
        (table,), ("It grows.",), lambda figure: figure.subplots().plot([1, 16], [0, 3])
    )


PRINTED = (
    "Sizes:\n\n| size | waste |\n| ---- | ----: |\n| 1    |   0 % |\n| 16   |   3 % |\n\nIt grows."
)


def test_the_page_keeps_all_but_the_part_of_the_study(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("before <!-- nanovllm study victim -->\nold\n<!-- end --> after")
    update(page, "victim", few_findings())
    inside = f"{PRINTED}\n\n![victim](study-victim.svg)"
    expected = f"before <!-- nanovllm study victim -->\n{inside}\n<!-- end --> after"
    assert page.read_text() == expected
    with pytest.raises(ValueError, match="0 parts"):
        update(page, "block-size", few_findings())


def test_a_plot_is_the_same_each_time(tmp_path: Path) -> None:
    for name in ("a.svg", "b.svg"):
        few_findings().save_plot(tmp_path / name)
    assert (tmp_path / "a.svg").read_bytes() == (tmp_path / "b.svg").read_bytes()
    few_findings().save_plot(tmp_path / "c.png")
    assert (tmp_path / "c.png").read_bytes().startswith(b"\x89PNG")
    with pytest.raises(ValueError, match="txt"):
        few_findings().save_plot(tmp_path / "d.txt")


def test_without_matplotlib_a_plot_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ValueError, match=re.escape("nanovllm[study]")):
        few_findings().save_plot(tmp_path / "a.svg")


def test_the_command_lists_runs_and_refuses(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    listed = invoke("study")
    assert [line.split()[0] for line in listed.stdout.splitlines()] == [s.name for s in STUDIES]
    monkeypatch.setattr(victim, "study", few_findings)
    plot = tmp_path / "plot.svg"
    shown = invoke("study", "victim", "--plot", str(plot))
    assert PRINTED in shown.stdout
    assert plot.exists()
    assert invoke("study", "chaos").exit_code == 2
    assert invoke("study", "all", "--plot", str(plot)).exit_code == 2


@pytest.mark.parametrize("study", STUDIES, ids=lambda study: study.name)
def test_the_page_of_questions_shows_every_study(study) -> None:
    text = (DOCS / "questions.md").read_text()
    assert text.count(f"<!-- nanovllm study {study.name} -->") == 1
    assert f"`nanovllm study {study.name}`" in text
    assert (DOCS / f"study-{study.name}.svg").stat().st_size < 200_000
