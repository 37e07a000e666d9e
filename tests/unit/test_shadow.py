"""The shadow KV: what is read is what was computed there, token by token."""

from __future__ import annotations

from collections.abc import Sequence

from nanovllm.conformance.shadow import History, ShadowKV, Span, next_token

ROOT = History.root(None)


def path(tokens: Sequence[int], root: History = ROOT) -> list[History]:
    nodes = [root]
    for token in tokens:
        nodes.append(nodes[-1].then(token))
    return nodes[1:]


def span(tokens: Sequence[int], start: int, table: Sequence[int], root: History = ROOT) -> Span:
    return Span(path(tokens, root), start, len(tokens), table)


def test_equal_histories_are_one_object_and_salts_are_apart() -> None:
    assert path([1, 2, 3])[-1] is path([1, 2, 3])[-1]
    red = path([1, 2, 3], History.root("red"))[-1]
    assert red is not path([1, 2, 3])[-1]
    assert red.tokens == path([1, 2, 3])[-1].tokens == (1, 2, 3)
    assert red.digest == path([1, 2, 3])[-1].digest


def test_digests_depend_on_every_token_and_its_place() -> None:
    histories = ([1, 2], [2, 1], [12], [1, 2, 1], [1], [1, 3])
    assert len({path(tokens)[-1].digest for tokens in histories}) == len(histories)


def test_begins_with() -> None:
    long = path([1, 2, 3, 4])
    assert long[3].begins_with(long[1])
    assert long[3].begins_with(long[3])
    assert not long[1].begins_with(long[3])
    assert not path([1, 3, 3])[-1].begins_with(long[1])


def test_a_row_reads_its_own_history() -> None:
    shadow = ShadowKV(2)
    (first,) = shadow.execute((), [span([1, 2, 3], 0, (5, 0))])
    assert first.misreads == ()
    assert first.digest == path([1, 2, 3])[-1].digest
    (second,) = shadow.execute((), [span([1, 2, 3, 4], 3, (5, 0))])
    assert second.misreads == ()


def test_writes_of_a_plan_come_before_its_reads() -> None:
    """A twin may hit what the other one computes in the same plan, whatever the order of rows."""
    shadow = ShadowKV(2)
    twin, writer = span([1, 2, 9], 2, (0, 1)), span([1, 2, 3], 0, (0, 2))
    assert [reading.misreads for reading in shadow.execute((), [twin, writer])] == [(), ()]


def test_two_rows_that_write_one_slot_clash() -> None:
    shadow = ShadowKV(2)
    one, other = shadow.execute((), [span([1, 2], 0, (0,)), span([3, 4], 0, (0,))])
    assert [misread.position for misread in one.misreads] == [0, 1]
    assert one.misreads[0].found is path([3])[0]
    assert one.misreads[0].before is None
    assert other.misreads == ()


def test_a_stale_block_shows_what_it_holds_and_changes_the_digest() -> None:
    shadow = ShadowKV(2)
    shadow.execute((), [span([7, 8], 0, (0,))])
    (reading,) = shadow.execute((), [span([1, 8, 3], 2, (0, 1))])
    assert [(m.position, m.block) for m in reading.misreads] == [(0, 0), (1, 0)]
    assert reading.digest != path([1, 8, 3])[-1].digest
    assert str(reading.misreads[0]) == "position 0 reads [7] from block 0 instead of [1]"


def test_a_slot_that_was_never_computed_and_a_table_that_ends_early() -> None:
    shadow = ShadowKV(2)
    (reading,) = shadow.execute((), [span([1, 2, 3], 2, (0,))])
    assert [(m.position, m.block, m.found) for m in reading.misreads] == [
        (0, 0, None),
        (1, 0, None),
        (2, None, None),
    ]


def test_copies_come_first() -> None:
    shadow = ShadowKV(2)
    shadow.execute((), [span([1], 0, (0,))])
    (reading,) = shadow.execute([(0, 1)], [span([1, 2], 1, (1,))])
    assert reading.misreads == ()
    assert shadow.block(0) == [path([1])[0], None]


def test_a_failed_step_spoils_what_was_not_there_already() -> None:
    shadow = ShadowKV(2)
    shadow.execute((), [span([1, 2], 0, (0,))])
    shadow.spoil([(0, 3)], [span([1, 2, 3], 1, (0, 1))])
    assert shadow.block(0) == path([1, 2])
    assert shadow.block(1) == [None, None]
    assert shadow.block(3) == [None, None]
    shadow.erase(span([1, 2], 1, (0,)))
    assert shadow.block(0) == [path([1])[0], None]


def test_content_is_one_whole_block_of_one_history() -> None:
    shadow = ShadowKV(2)
    shadow.execute((), [span([1, 2, 3], 0, (0, 1))])
    assert shadow.content(0) is path([1, 2])[-1]
    assert shadow.content(1) is None
    shadow.execute((), [span([5], 0, (0,))])
    assert shadow.content(0) is None
    assert shadow.content(9) is None


def test_the_model_draws_all_of_its_alphabet() -> None:
    drawn = {next_token(digest, 0, 0, (4, 5, 6)) for digest in range(50)}
    assert drawn == {4, 5, 6}
    samples = {tuple(next_token(d, 0, sample, (4, 5, 6)) for d in range(9)) for sample in range(4)}
    assert len(samples) == 4
