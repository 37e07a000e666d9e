"""The kernels compiled for a GPU, over all shapes and dtypes that the engine takes."""

import pytest
import torch
from kernel_checks import (
    check_decode_inputs,
    check_keep_tokens,
    check_linear_of_any_number_of_rows,
    check_padding_is_greedy,
    check_post_tokens,
    check_rms_norm,
    check_sample,
    check_silu_and_mul,
    check_small_linear,
    check_store,
    draw,
    random_rows,
)
from paged_rows import (
    DEVICE,
    PagedRows,
    Shape,
    assert_heads_close,
    check_decode,
    check_prefill,
)
from peer_buffers import check_peer_add_rms_norm, check_peer_all_reduce
from threshold_checks import (
    check_sampling_threshold,
    check_threshold_of_few_values,
    check_threshold_of_hard_rows,
)

from nanovllm.kernels._triton import compiling
from nanovllm.kernels.keep_tokens import _keep_tokens_kernel, keep_tokens
from nanovllm.kernels.paged_decode import paged_decode
from nanovllm.kernels.paged_prefill import paged_prefill
from nanovllm.kernels.small_linear import HEAD
from nanovllm.kernels.store_kvcache import store_kvcache, store_kvcache_reference

FP32, FP16, BF16 = torch.float32, torch.float16, torch.bfloat16
DTYPES = [BF16, FP16, FP32]
SHAPES = [
    # Every dtype with every head dimension, GQA ratio and kind of block size, not all of them with
    # each other; Qwen3's first.
    Shape(16, 8, 128, 16, BF16),
    Shape(16, 8, 128, 256, BF16),
    Shape(16, 8, 128, 32, FP16),
    Shape(16, 8, 128, 16, FP32),
    Shape(4, 4, 64, 16, BF16),
    Shape(3, 3, 64, 48, FP16),
    Shape(8, 2, 64, 256, FP32),
    Shape(8, 1, 96, 64, BF16),
    Shape(12, 3, 96, 17, FP16),
    Shape(6, 3, 96, 16, FP32),
    Shape(24, 3, 128, 100, BF16),
    Shape(5, 1, 128, 1, FP16),
    Shape(8, 8, 128, 128, FP32),
    Shape(8, 4, 256, 16, BF16),
    Shape(8, 1, 256, 80, FP16),
    Shape(4, 1, 256, 33, FP32),
]
FP8_SHAPES = [
    Shape(16, 8, 128, 16, BF16, torch.float8_e4m3fn),
    Shape(12, 3, 64, 100, FP16, torch.float8_e4m3fn),
]
LENGTHS = [1, 2, 15, 16, 17, 63, 64, 65, 127, 128, 129, 255, 256, 257, 843, 1900, 4097]
ROWS = [(1, 1), (1, 257), (5, 5), (16, 300), (128, 128), (1, 1000), (200, 777), (33, 2049)]
LONG = 40_960


@pytest.mark.spec("KV-1", "KV-2", "KV-3", "KV-4", "KV-8")
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_decode(shape: Shape) -> None:
    check_decode(shape, LENGTHS, num_splits=1)


@pytest.mark.spec("KV-2", "KV-3", "KV-4")
@pytest.mark.parametrize("num_splits", [2, 5, 16])
@pytest.mark.parametrize("shape", [SHAPES[0], SHAPES[7]], ids=str)
def test_decode_in_splits(shape: Shape, num_splits: int) -> None:
    check_decode(shape, [1, 40, 64, 65, 1900], num_splits)


@pytest.mark.spec("KV-1", "KV-3", "KV-4", "KV-5", "KV-7", "KV-8")
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_prefill(shape: Shape) -> None:
    check_prefill(shape, ROWS)


@pytest.mark.spec("KV-4", "KV-5")
@pytest.mark.parametrize("shape", SHAPES[:4], ids=str)
def test_the_longest_contexts(shape: Shape) -> None:
    check_decode(shape, [LONG, 1, LONG - 1], num_splits=1)
    check_decode(shape, [LONG], num_splits=16)
    check_prefill(shape, [(1, LONG), (100, LONG), (1, 7)])


@pytest.mark.spec("KV-4", "KV-8")
@pytest.mark.parametrize("shape", [SHAPES[0], SHAPES[12]], ids=str)
def test_rows_of_one_token(shape: Shape) -> None:
    check_prefill(shape, [(1, n) for n in LENGTHS])


@pytest.mark.spec("KV-4")
def test_a_prefix_hit_is_the_rest_of_a_prefill() -> None:
    """What a chunk computes depends on its positions, not on how the prompt was cut."""
    shape = SHAPES[0]
    rows = PagedRows(shape, [700])
    q = shape.randn(700, shape.num_heads)
    length = torch.tensor([700], dtype=torch.int32, device=DEVICE)

    def last(count: int) -> torch.Tensor:
        bounds = torch.tensor([0, count], dtype=torch.int32, device=DEVICE)
        cache = rows.k_cache, rows.v_cache, rows.block_tables, rows.table_rows
        return paged_prefill(q[-count:], *cache, bounds, length, shape.scale)

    whole = last(700)
    for count in (1, 64, 300):
        assert_heads_close(last(count), whole[-count:].double())


@pytest.mark.spec("KV-2", "KV-4", "GRF-2")
def test_a_captured_decode_follows_its_inputs() -> None:
    """Same graph, other sequences: tables, lengths and padding are read on the device."""
    shape = SHAPES[0]
    rows = PagedRows(shape, [500, 70, 1])
    q = shape.randn(4, shape.num_heads)
    table_rows = torch.full((4,), -1, dtype=torch.int32, device=DEVICE)
    lengths = torch.zeros(4, dtype=torch.int32, device=DEVICE)

    def decode() -> torch.Tensor:
        cache = rows.k_cache, rows.v_cache, rows.block_tables
        return paged_decode(q, *cache, table_rows, lengths, shape.scale, num_splits=4)

    decode()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = decode()
    for live in ([0, 1, 2], [2], [1, 0]):
        table_rows.fill_(-1)
        lengths.zero_()
        table_rows[: len(live)] = rows.table_rows[live]
        lengths[: len(live)] = torch.tensor([rows.lengths[i] for i in live], device=DEVICE)
        graph.replay()
        assert (out[len(live) :] == 0).all()
        expected = [rows.expected(s, q[i : i + 1]) for i, s in enumerate(live)]
        assert_heads_close(out[: len(live)], torch.cat(expected))


@pytest.mark.spec("KV-6")
def test_offsets_beyond_two_to_the_31() -> None:
    shape = SHAPES[0]
    rows = PagedRows(shape, [100])
    num_blocks = 2**31 // (16 * 8 * 128) + 64
    k_cache, v_cache = torch.full((2, num_blocks, 16, 8, 128), torch.nan, dtype=BF16, device=DEVICE)
    assert k_cache.numel() > 2**31
    blocks = torch.arange(num_blocks - 7, num_blocks, dtype=torch.int32, device=DEVICE)
    positions = torch.arange(100, device=DEVICE)
    slots = blocks.long()[positions // 16] * 16 + positions % 16
    store_kvcache(rows.keys[0], rows.values[0], k_cache, v_cache, slots)
    first, length, bounds = torch.tensor(
        [[0, 0], [100, 0], [0, 9]], dtype=torch.int32, device=DEVICE
    )
    q = shape.randn(9, 16)
    cache = k_cache, v_cache, blocks[None], first[:1]
    out = paged_decode(q[-1:], *cache, length[:1], shape.scale)
    assert_heads_close(out, rows.expected(0, q[-1:]))
    out = paged_prefill(q, *cache, bounds, length[:1], shape.scale)
    assert_heads_close(out, rows.expected(0, q))


@pytest.mark.spec("KV-1", "KV-3", "KV-4", "KV-5")
@pytest.mark.parametrize("shape", FP8_SHAPES, ids=str)
def test_a_cache_in_float8(shape: Shape) -> None:
    check_decode(shape, LENGTHS, num_splits=1)
    check_decode(shape, [1900], num_splits=8)
    check_prefill(shape, ROWS)
    key, value = 3 * shape.randn(2, 50, shape.kv_heads)
    key[0], key[1] = 1e4, -1e4
    slots = torch.randperm(4 * shape.block_size)[:50].to(DEVICE)
    caches, expected = shape.caches(4), [cache.contiguous() for cache in shape.caches(4)]
    store_kvcache(key, value, *caches, slots)
    store_kvcache_reference(key, value, *expected, slots)
    for cache, right in zip(caches, expected, strict=True):
        assert torch.equal(cache.float().nan_to_num(7e4), right.float().nan_to_num(7e4))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "sizes",
    [(4096, 1024), (1025, 3072), (2048, 1000), (4099, 1000), (HEAD + 3, 1024), (HEAD + 1, 2300)],
    ids=str,
)
def test_small_linear(sizes: tuple[int, int], dtype: torch.dtype) -> None:
    check_small_linear(*sizes, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_linear_of_any_number_of_rows(dtype: torch.dtype) -> None:
    check_linear_of_any_number_of_rows(dtype)


@pytest.mark.spec("KV-1", "KV-2", "MOD-3", "MOD-4", "MOD-7")
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_store(shape: Shape) -> None:
    check_store(shape, 1000)


@pytest.mark.spec("MOD-3", "MOD-4")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("n", [48, 1000, 1024, 2048, 4096, 8192])
def test_rms_norm(n: int, dtype: torch.dtype) -> None:
    check_rms_norm(300, n, dtype)


@pytest.mark.spec("MOD-3")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("n", [48, 3072, 12_289])
def test_silu_and_mul(n: int, dtype: torch.dtype) -> None:
    check_silu_and_mul(300, n, dtype)


@pytest.mark.spec("KV-1", "KV-2")
@pytest.mark.parametrize("batch", [1, 17, 128, 1000])
@pytest.mark.parametrize("block_size", [1, 16, 256])
def test_decode_inputs(batch: int, block_size: int) -> None:
    check_decode_inputs(batch, block_size)


@pytest.mark.spec("SMP-5")
@pytest.mark.parametrize("batch", [1, 17, 128, 1000])
def test_keep_tokens(batch: int) -> None:
    check_keep_tokens(batch)


@pytest.mark.spec("SMP-5")
@pytest.mark.parametrize("batch", [2, 130])
def test_post_tokens(batch: int) -> None:
    check_post_tokens(batch, pinned=True)


@pytest.mark.spec("SMP-3a", "SMP-3b", "SMP-3c")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("vocab", "step"), [(1, 1.0), (300, 0.001), (32_000, 0.125)])
def test_sampling_threshold(vocab: int, step: float, dtype: torch.dtype) -> None:
    check_sampling_threshold(vocab, dtype, step)


@pytest.mark.spec("SMP-3a", "SMP-3b", "SMP-3c")
@pytest.mark.parametrize("dtype", DTYPES)
def test_thresholds_of_rows_that_are_hard_to_search(dtype: torch.dtype) -> None:
    check_threshold_of_hard_rows(dtype)
    check_threshold_of_few_values(dtype, num_rows=100, vocab=20_000)


@pytest.mark.spec("SMP-1")
def test_padding_is_greedy() -> None:
    check_padding_is_greedy(BF16)


@pytest.mark.spec("SMP-1", "SMP-2", "SMP-4")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("vocab", "stride"), [(1, 1), (300, 333), (32_000, 32_000)])
def test_sample(vocab: int, stride: int, dtype: torch.dtype) -> None:
    temperatures = [0.0, 0.6, 1.0, 1e30, 1e-44, 1.2e-38, 1e-5, 0.3]
    check_sample(vocab, temperatures, dtype, stride)


@pytest.mark.spec("SMP-2", "SMP-4")
@pytest.mark.parametrize("batch", [1, 64])
def test_sample_of_a_large_vocabulary(batch: int) -> None:
    check_sample(151_936, [0.6] * batch, BF16)


@pytest.mark.spec("SMP-2")
def test_draws_follow_the_softmax() -> None:
    """20,000 draws among 8 tokens: chi-square at alpha 1e-3 with 7 degrees of freedom."""
    count = 20_000
    logits = torch.tensor([1.0, 0.0, -1.5, 0.5, 2.0, 0.0, -1.0, 1.5], device=DEVICE)
    drawn = draw(
        logits.expand(count, -1), torch.full((count,), 0.8, device=DEVICE), *random_rows(count)
    )
    expected = (logits.double() / 0.8).softmax(-1) * count
    statistic = ((drawn.bincount(minlength=8) - expected) ** 2 / expected).sum().item()
    assert statistic < 24.32


@pytest.mark.spec("SMP-4")
def test_a_row_draws_the_same_in_any_batch() -> None:
    logits = 3 * torch.randn(40, 5000, device=DEVICE)
    temperatures = torch.rand(40, device=DEVICE)
    streams, positions = random_rows(40)
    together = draw(logits, temperatures, streams, positions)
    for part in (slice(3, 4), slice(10, 37)):
        alone = draw(logits[part], temperatures[part], streams[part], positions[part])
        assert torch.equal(alone, together[part])


@pytest.mark.spec("TP-1")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [2, 3, 8])
def test_peer_all_reduce(size: int, dtype: torch.dtype) -> None:
    check_peer_all_reduce(size, dtype)


@pytest.mark.spec("TP-1", "MOD-3", "MOD-4")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("size", "width"), [(2, 1024), (3, 96), (2, 130)])
def test_peer_add_rms_norm(size: int, width: int, dtype: torch.dtype) -> None:
    check_peer_add_rms_norm(size, dtype, width)


@pytest.mark.spec("PRF-1")
def test_what_is_compiled_ahead_does_not_run() -> None:
    last_tokens = torch.full((3,), 7, device=DEVICE)
    seats = torch.tensor([2, -1], dtype=torch.int32, device=DEVICE)
    token_ids = torch.tensor([5, 6], device=DEVICE)
    with compiling():
        keep_tokens(last_tokens, seats, token_ids)
    assert last_tokens.tolist() == [7, 7, 7]
    compiled = _keep_tokens_kernel.device_caches[torch.cuda.current_device()][0].values()
    assert all(kernel.module is not None for kernel in compiled), "loaded at its first launch"
    keep_tokens(last_tokens, seats, token_ids)
    assert last_tokens.tolist() == [7, 7, 5]
