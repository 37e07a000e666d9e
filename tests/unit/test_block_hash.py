"""The hash chain of full blocks."""

import pytest
from core_door import Door

from nanovllm.engine.block_manager import encode_tokens, hash_block


@pytest.mark.spec("PFX-1")
def test_hashes_are_the_same_on_every_platform_and_in_every_run() -> None:
    first = hash_block(encode_tokens([1, 2, 3, 4]), b"")
    assert encode_tokens([1, 258]).hex() == "0100000002010000"
    assert first.hex() == "903ce79ac359c3eb2de5421794dd19f0"
    child = hash_block(encode_tokens([5, 6, 7, 8]), first)
    assert child.hex() == "b51e0214fc0b8c66b0445f16c5d1509d"


@pytest.mark.spec("PFX-1")
def test_different_tokens_or_parents_give_different_hashes() -> None:
    contents = [[1, 2, 3, 4], [1, 2, 4, 3], [256, 0, 0, 0], [0, 1, 0, 0], [0, 0, 0, 0]]
    hashes = {hash_block(encode_tokens(tokens), b"") for tokens in contents}
    hashes |= {
        hash_block(encode_tokens(tokens), parent) for tokens in contents for parent in hashes
    }
    assert len(hashes) == 5 + 25


@pytest.mark.spec("PFX-1")
def test_a_sequence_hashes_each_block_once_behind_its_parent() -> None:
    calls: list[tuple[bytes, bytes]] = []

    def spy(tokens: bytes, parent: bytes) -> bytes:
        calls.append((tokens, parent))
        return hash_block(tokens, parent)

    door = Door(hash_function=spy)
    door.run([11] * 4 + [12] * 4 + [13] * 4, max_tokens=6)
    first = hash_block(encode_tokens([11] * 4), b"")
    assert calls[:2] == [(encode_tokens([11] * 4), b""), (encode_tokens([12] * 4), first)]
    assert len(calls) == 4
