"""The paged cache: what is written where, and attention over it against dense attention (KV)."""

import pytest
import torch

from nanovllm.kernels.paged_attention import attend_row
from nanovllm.kernels.store_kvcache import store_kvcache_reference
from nanovllm.layers.backend import AttentionInput
from nanovllm.layers.torch_attention import TorchContext

HEAD_DIM = 8
NAN = float("nan")


def dense_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """q [C, H, D], the last C of the positions of k, v [L, KV, D]; float64, no cache, no SDPA."""
    count, length = len(q), len(k)
    group = q.shape[1] // k.shape[1]
    q, k, v = (x.double().transpose(0, 1) for x in (q, k, v))
    k, v = k.repeat_interleave(group, 0), v.repeat_interleave(group, 0)
    scores = q @ k.transpose(1, 2) * q.shape[-1] ** -0.5
    hidden = torch.arange(length) > torch.arange(length - count, length)[:, None]
    return (scores.masked_fill(hidden, -torch.inf).softmax(-1) @ v).transpose(0, 1)


class Request:
    """Keys and values of a whole request, and a table of random blocks for them."""

    def __init__(self, length: int, kv_heads: int, blocks: list[int]) -> None:
        self.k = torch.randn(length, kv_heads, HEAD_DIM)
        self.v = torch.randn(length, kv_heads, HEAD_DIM)
        self.table = blocks

    def slots(self, start: int, end: int, block_size: int) -> list[int]:
        return [
            self.table[i // block_size] * block_size + i % block_size for i in range(start, end)
        ]


def context_of(
    cache: torch.Tensor, requests: list[Request], rows: list[tuple[int, int]]
) -> TorchContext:
    """The step that computes `[start, end)` of each request."""
    block_size = cache.shape[3]
    width = max(len(request.table) for request in requests)
    tables = [request.table + [-1] * (width - len(request.table)) for request in requests]
    slots = [s for r, (a, b) in zip(requests, rows, strict=True) for s in r.slots(a, b, block_size)]
    counts = torch.tensor([b - a for a, b in rows])
    lengths = torch.tensor([b for _, b in rows], dtype=torch.int32)
    inputs = AttentionInput(
        slot_mapping=torch.tensor(slots),
        block_tables=torch.tensor(tables, dtype=torch.int32),
        table_rows=torch.arange(len(rows), dtype=torch.int32),
        context_lens=lengths,
        cu_seqlens_q=torch.cat([torch.zeros(1, dtype=torch.long), counts.cumsum(0)]).int(),
        max_query_len=int(counts.max()),
        max_context_len=int(lengths.max()),
    )
    return TorchContext(cache, inputs)


@pytest.mark.spec("KV-1", "KV-3", "KV-4", "KV-5")
@pytest.mark.parametrize("kv_heads", [1, 2, 4])
@pytest.mark.parametrize("block_size", [1, 3, 4, 16])
def test_paged_is_dense_under_any_placement_and_chunking(block_size: int, kv_heads: int) -> None:
    torch.manual_seed(block_size * 10 + kv_heads)
    lengths = [1, block_size, block_size + 1, 2 * block_size - 1, 23]
    free = torch.randperm(sum(-(-n // block_size) for n in lengths) + 5).tolist()
    cache = torch.full((2, 2, len(free), block_size, kv_heads, HEAD_DIM), NAN)
    requests = [
        Request(n, kv_heads, [free.pop() for _ in range(-(-n // block_size))]) for n in lengths
    ]
    done = [0] * len(requests)
    while any(d < len(r.k) for d, r in zip(done, requests, strict=True)):
        picked = [i for i, r in enumerate(requests) if done[i] < len(r.k)]
        rows = []
        for i in picked:
            left = len(requests[i].k) - done[i]
            rows.append((done[i], done[i] + int(torch.randint(1, left + 1, ()))))
        step = [requests[i] for i in picked]
        k = torch.cat([r.k[a:b] for r, (a, b) in zip(step, rows, strict=True)])
        v = torch.cat([r.v[a:b] for r, (a, b) in zip(step, rows, strict=True)])
        q = torch.randn(len(k), 4, HEAD_DIM)
        out = context_of(cache, step, rows).attend_heads(1, q, k, v, HEAD_DIM**-0.5)
        offset = 0
        for i, r, (a, b) in zip(picked, step, rows, strict=True):
            here = slice(offset, offset + b - a)
            expected = dense_attention(q[here], r.k[:b], r.v[:b])
            torch.testing.assert_close(out[here].double(), expected, atol=1e-5, rtol=1e-5)
            offset, done[i] = offset + b - a, b
    assert cache[:, 0].isnan().all(), "another layer's cache was touched"


@pytest.mark.spec("KV-2")
def test_b50_slot_minus_one_writes_nothing() -> None:
    k_cache, v_cache = torch.full((2, 4, 2, 1, 3), 7.0)
    k = torch.tensor([1.0, 2.0, 3.0]).view(3, 1, 1).expand(3, 1, 3)
    for slots in ([5, -1, -1], [5]):
        k_cache.fill_(7)
        store_kvcache_reference(k, -k, k_cache, v_cache, torch.tensor(slots))
        changed = (k_cache.view(8, 3) != 7).any(-1).nonzero().flatten().tolist()
        assert changed == [5]
        assert k_cache.view(8, 3)[5].tolist() == [1, 1, 1]
        assert v_cache.view(8, 3)[5].tolist() == [-1, -1, -1]


@pytest.mark.spec("KV-2")
def test_rows_of_padding_only_write_nothing() -> None:
    k_cache, v_cache = torch.full((2, 4, 2, 1, 3), 7.0)
    row = torch.ones(2, 1, 3)
    store_kvcache_reference(row, row, k_cache, v_cache, torch.tensor([-1, -1]))
    assert (k_cache == 7).all()
    assert (v_cache == 7).all()


@pytest.mark.spec("KV-3")
@pytest.mark.parametrize("garbage", [NAN, torch.inf, 1e30])
def test_what_lies_behind_the_context_is_never_seen(garbage: float) -> None:
    torch.manual_seed(0)
    cache = torch.full((2, 6, 4, 2, HEAD_DIM), garbage)
    request = Request(6, 2, [4, 1])
    slots = torch.tensor(request.slots(0, 6, 4))
    store_kvcache_reference(request.k, request.v, cache[0], cache[1], slots)
    for count in (1, 3):
        q = torch.randn(count, 4, HEAD_DIM)
        out = attend_row(q, cache[0], cache[1], torch.tensor([4, 1]), 6, HEAD_DIM**-0.5)
        expected = dense_attention(q, request.k, request.v)
        torch.testing.assert_close(out.double(), expected, atol=1e-5, rtol=1e-5)


@pytest.mark.spec("KV-6")
def test_offsets_beyond_two_to_the_31() -> None:
    """Only the pages that are touched are ever there."""
    block_size, kv_heads, dim = 16, 8, 128
    num_blocks = 2**31 // (block_size * kv_heads * dim) + 8
    k_cache, v_cache = (
        torch.empty(num_blocks, block_size, kv_heads, dim, dtype=torch.float16) for _ in range(2)
    )
    assert k_cache.numel() > 2**31
    last, torch_table = num_blocks - 1, torch.tensor([num_blocks - 1])
    k = torch.randn(1, kv_heads, dim, dtype=torch.float16)
    store_kvcache_reference(k, k, k_cache, v_cache, torch.tensor([last * block_size]))
    out = attend_row(k, k_cache, v_cache, torch_table, 1, 1.0)
    torch.testing.assert_close(out, k)


@pytest.mark.spec("MOD-3")
def test_inputs_are_left_alone() -> None:
    cache = torch.zeros(2, 1, 4, 4, 2, HEAD_DIM)
    request = Request(6, 2, [0, 3])
    q, k, v = torch.randn(6, 4, HEAD_DIM), request.k.clone(), request.v.clone()
    before = q.clone()
    context_of(cache, [request], [(0, 6)]).attend_heads(0, q, k, v, 1.0)
    assert torch.equal(q, before)
    assert torch.equal(k, request.k)
    assert torch.equal(v, request.v)
