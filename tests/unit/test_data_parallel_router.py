"""Which replica gets a request: prefixes first, then load."""

from nanovllm.data_parallel.router import FIRST_BLOCKS, Router


def make_router(size: int = 2, capacity: int = 100, max_lead: int = 1000) -> Router:
    return Router(size, block_size=4, capacity=capacity, max_lead=max_lead)


def prompt(prefix: int, rest: int, num_blocks: int = 2) -> list[int]:
    return [prefix] * 4 * num_blocks + [rest]


def test_strangers_go_where_there_is_least_to_do() -> None:
    router = make_router(size=3)
    costs = [50, 10, 20, 5, 5, 30]
    chosen = [router.route(prompt(i, 0), cost) for i, cost in enumerate(costs)]
    assert chosen == [0, 1, 2, 1, 1, 1]  # loads 50, 10, 20; then 15, 20 and the first of equals
    assert [router.load(i) for i in range(3)] == [50, 50, 20]


def test_a_prefix_stays_where_it_was_sent_whatever_the_load() -> None:
    router = make_router()
    homes = {prefix: router.route(prompt(prefix, 0), 10) for prefix in (1, 2)}
    assert set(homes.values()) == {0, 1}
    for rest in range(1, 20):
        assert router.route(prompt(1, rest), 10) == homes[1]
    assert router.route(prompt(2, 1), 10) == homes[2]


def test_the_longer_prefix_wins() -> None:
    router = make_router()
    assert router.route([1] * 4 + [2] * 4 + [0], 10) == 0
    assert router.route([9] * 4 + [0], 10) == 1
    assert router.route([1] * 4 + [3] * 4 + [0], 10) == 0
    router.lose(0)
    assert router.route([1] * 4 + [2] * 4 + [0], 10) == 1


def test_equal_prefixes_are_decided_by_load() -> None:
    router = make_router(max_lead=0)
    assert [router.route(prompt(1, i), 10) for i in range(4)] == [0, 1, 0, 1]
    router.max_lead = 1000  # by now both have the prefix
    router.release(1, 10)
    assert router.route(prompt(1, 4), 10) == 1


def test_a_replica_too_far_ahead_is_passed_over() -> None:
    router = make_router(max_lead=100)
    chosen = [router.route(prompt(1, i), 60) for i in range(4)]
    assert chosen == [0, 0, 1, 1]  # 120 ahead is too far; from then on both have the prefix
    router.release(0, 60)
    assert router.route(prompt(1, 4), 60) == 0


def test_only_full_blocks_before_the_last_token_count() -> None:
    router = make_router(max_lead=1000)
    assert router.route([1] * 8, 10) == 0  # the second block cannot be a hit
    assert router.route([1] * 3, 5) == 1
    assert router.route([1] * 3 + [2], 5) == 1  # no full block, so the load decides
    assert router.route([1] * 5, 10) == 0


def test_salts_keep_equal_prompts_apart() -> None:
    router = make_router()
    assert router.route(prompt(1, 0), 10, salt="a") == 0
    assert router.route(prompt(1, 0), 5, salt="b") == 1
    assert router.route(prompt(1, 1), 5, salt="b") == 1
    assert router.route(prompt(1, 2), 1, salt="a") == 0


def test_what_was_sent_long_ago_is_forgotten_from_its_tail() -> None:
    router = make_router(capacity=3)
    assert router.route([1] * 4 + [2] * 4 + [0], 10) == 0
    assert router.route([7] * 4 + [0], 20) == 1
    assert router.route([1] * 4 + [3] * 4 + [0], 0) == 0
    assert router.route([1] * 4 + [4] * 4 + [0], 0) == 0  # forgets the block of 2s, not the 1s
    assert router.route([1] * 4 + [0], 0) == 0
    assert router._num_seen(0, router._hashes([1] * 4 + [2] * 4 + [0], None)) == 1


def test_without_a_cache_or_after_a_reset_load_alone_decides() -> None:
    router = make_router(capacity=0)
    assert [router.route(prompt(1, i), 10) for i in range(4)] == [0, 1, 0, 1]
    router = make_router()
    router.route(prompt(1, 0), 10)
    router.forget()
    assert router.route(prompt(1, 1), 10) == 1


def test_long_prompts_are_told_apart_by_their_beginning() -> None:
    router = make_router()
    assert len(router._hashes([1] * 4 * 1000, None)) == FIRST_BLOCKS


def test_a_lost_replica_is_chosen_no_more() -> None:
    router = make_router(size=3)
    router.route(prompt(1, 0), 10)
    router.lose(0)
    assert router.replicas == [1, 2]
    assert [router.route(prompt(1, i), 10) for i in range(3)] == [1, 1, 1]
