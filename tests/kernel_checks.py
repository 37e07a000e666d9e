"""Checks of the kernels beside attention against their references, on whatever device there is."""

from collections.abc import Callable

import numpy as np
import torch
from paged_rows import DEVICE, Shape

from nanovllm.kernels.decode_inputs import decode_inputs, decode_inputs_reference
from nanovllm.kernels.gumbel_noise import seed_streams
from nanovllm.kernels.keep_tokens import keep_tokens, keep_tokens_reference, post_tokens
from nanovllm.kernels.qk_norm_rope_store import qk_norm_rope_store, qk_norm_rope_store_reference
from nanovllm.kernels.rms_norm import add_rms_norm, rms_norm, rms_norm_reference
from nanovllm.kernels.sample import sample, sample_reference
from nanovllm.kernels.silu_and_mul import silu_and_mul, silu_and_mul_reference
from nanovllm.kernels.small_linear import linear, small_linear, small_linear_reference
from nanovllm.kernels.store_kvcache import store_kvcache, store_kvcache_reference

EPS = 0.1
"""Of norms: large, so that it is seen."""


def assert_close(out: torch.Tensor, expected: torch.Tensor) -> None:
    """Values around 1; a GPU's roots and quotients differ by a few units of fp32's last place.

    What is rounded to 16 bits then is nearly always rounded the same, if it is rounded as often.
    """
    tol = (64 if expected.dtype == torch.float32 else 16) * torch.finfo(expected.dtype).eps
    torch.testing.assert_close(out, expected, rtol=tol, atol=tol, equal_nan=True)
    if expected.dtype != torch.float32:
        assert ((out != expected) & ~expected.isnan()).float().mean() < 0.01


def check_rms_norm(rows: int, n: int, dtype: torch.dtype) -> None:
    torch.manual_seed(n)
    wide = torch.randn(rows, n + 3, dtype=dtype, device=DEVICE)
    x, weight = wide[:, :n], torch.randn(n, dtype=dtype, device=DEVICE)
    residual = 3 * torch.randn(rows, n, dtype=dtype, device=DEVICE)
    before = wide.clone(), residual.clone()
    assert_close(rms_norm(x, weight, EPS), rms_norm_reference(x, weight, EPS))
    y, total = add_rms_norm(x.contiguous(), residual, weight, EPS)
    assert torch.equal(total, x + residual)
    assert_close(y, rms_norm_reference(x + residual, weight, EPS))
    assert torch.equal(wide, before[0])
    assert torch.equal(residual, before[1])


def check_silu_and_mul(rows: int, n: int, dtype: torch.dtype) -> None:
    torch.manual_seed(n)
    gate_up = 4 * torch.randn(rows, 2 * n, dtype=dtype, device=DEVICE)
    gate_up[0, :4] = torch.tensor([-200.0, 200.0, 0.0, -20.0])
    before = gate_up.clone()
    assert_close(silu_and_mul(gate_up), silu_and_mul_reference(gate_up))
    assert torch.equal(gate_up, before)


def check_small_linear(out_features: int, in_features: int, dtype: torch.dtype) -> None:
    torch.manual_seed(out_features)
    x = torch.randn(1, in_features, dtype=dtype, device=DEVICE)
    weight = torch.randn(out_features, in_features, dtype=dtype, device=DEVICE) / in_features**0.5
    expected = small_linear_reference(x.double(), weight.double())
    # fp32 sums in another order; what is random in them grows with the root of their length.
    torch.testing.assert_close(
        small_linear(x, weight).double(), expected, rtol=torch.finfo(dtype).eps, atol=1e-5
    )


def check_linear_of_any_number_of_rows(dtype: torch.dtype) -> None:
    """A chunk of a prompt samples nothing: then the head has no rows."""
    weight = torch.randn(300, 64, dtype=dtype, device=DEVICE)
    bias = torch.randn(300, dtype=dtype, device=DEVICE)
    for rows in (0, 1, 2, 40):
        x = torch.randn(rows, 64, dtype=dtype, device=DEVICE)
        for b in (None, bias):
            torch.testing.assert_close(
                linear(x, weight, b).float(),
                torch.nn.functional.linear(x, weight, b).float(),
                rtol=4 * torch.finfo(dtype).eps,
                atol=4 * torch.finfo(dtype).eps * 64**0.5,
            )


def check_store(shape: Shape, num_tokens: int) -> None:
    """Both kernels that store, some tokens being padding, into caches full of NaN."""
    torch.manual_seed(num_tokens)
    dim, kv_heads = shape.head_dim, shape.kv_heads
    num_blocks = 2 * num_tokens // shape.block_size + 1
    caches = shape.caches(num_blocks)
    expected = shape.caches(num_blocks)[0].contiguous(), shape.caches(num_blocks)[1].contiguous()
    slots = torch.randperm(num_blocks * shape.block_size)[:num_tokens].to(DEVICE)
    slots[num_tokens // 3] = slots[-1] = -1
    heads = shape.randn(num_tokens, shape.num_heads + 2 * kv_heads)
    angles = 100 * torch.rand(50, 1, dim // 2, device=DEVICE)
    args = (
        heads.flatten(1),
        shape.randn(),
        shape.randn(),
        EPS,
        torch.cat((angles.cos(), angles.sin()), 1),
        torch.randint(50, (num_tokens,), device=DEVICE),
        slots,
    )
    before = heads.clone()
    q = qk_norm_rope_store(*args, *caches)
    assert_close(q, qk_norm_rope_store_reference(*args, *expected))
    assert_close(caches[0], expected[0])
    torch.testing.assert_close(caches[1], expected[1], rtol=0, atol=0, equal_nan=True)
    key, value = heads[:, 1 : 1 + kv_heads], heads[:, -kv_heads:]
    slots[:2] = slots[:2].flip(0)
    store_kvcache(key, value, *caches, slots)
    store_kvcache_reference(key, value, *expected, slots)
    for cache, right in zip(caches, expected, strict=True):
        torch.testing.assert_close(cache, right, rtol=0, atol=0, equal_nan=True)
    assert torch.equal(heads, before)


def check_decode_inputs(batch: int, block_size: int) -> None:
    torch.manual_seed(batch)
    capacity, width = batch + 3, 5
    mail = torch.empty(2, 3, batch + 2, dtype=torch.int32)
    row = torch.arange(batch + 2)
    for slot in mail:
        slot[0] = torch.randperm(capacity)[: batch + 2].int()
        slot[1] = torch.randint(1, width * block_size + 1, (batch + 2,), dtype=torch.int32)
        slot[2] = torch.where(row % 3 == 0, 2**31 - 2 - row, -1)
        slot[:, row % 4 == 3] = torch.tensor([[-1], [0], [-1]], dtype=torch.int32)
    last_tokens = torch.randint(2**40, (capacity,), device=DEVICE)
    block_tables = torch.randint(2**31 - 1, (capacity, width), dtype=torch.int32, device=DEVICE)
    for number in (0, 7):
        turn = torch.tensor([number], device=DEVICE)
        tables = block_tables.clone(), block_tables.clone()
        rows = torch.full((2, 2, batch + 1), -7, dtype=torch.int32, device=DEVICE)
        out = torch.full((2, 3, batch + 1), -7, device=DEVICE)
        for i, function in enumerate((decode_inputs, decode_inputs_reference)):
            written = *rows[i, :, :batch], *out[i, :, :batch]
            function(mail.to(DEVICE), turn, last_tokens, tables[i], block_size, *written)
        assert torch.equal(rows[0], rows[1])
        assert torch.equal(rows[0, :, :batch].cpu(), mail[number % 2, :2, :batch])
        assert torch.equal(out[0], out[1])
        assert torch.equal(*tables)
        assert (tables[0] != block_tables).any()


def check_post_tokens(batch: int, pinned: bool) -> None:
    """`pinned`: the mail is in the host's memory, as it is in an engine."""
    mail = torch.full((2, batch + 1), -7)
    mail = mail.pin_memory() if pinned else mail.to(DEVICE)
    turn = torch.tensor([4], device=DEVICE)
    for tokens in (torch.arange(batch), torch.arange(batch - 1) - 1, torch.arange(batch) + 9):
        post_tokens(tokens.to(DEVICE), mail, turn)
    if pinned:
        torch.cuda.synchronize()
    assert turn.tolist() == [7]
    assert mail[0].tolist() == [*range(9, batch + 9), -7]
    assert mail[1].tolist() == [*range(-1, batch - 2), -7, -7]


def check_keep_tokens(batch: int) -> None:
    torch.manual_seed(batch)
    seats = torch.randperm(batch + 3)[:batch].int()
    seats[torch.arange(batch) % 4 == 3] = -1
    token_ids = torch.randint(2**40, (batch,))
    token_ids[torch.arange(batch) % 5 == 4] = -1
    out = torch.full((2, batch + 4), 7, device=DEVICE)
    keep_tokens(out[0, :-1], seats.to(DEVICE), token_ids.to(DEVICE))
    keep_tokens_reference(out[1, :-1], seats.to(DEVICE), token_ids.to(DEVICE))
    assert torch.equal(out[0], out[1])


def random_rows(batch: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Streams and positions of rows of which no two draw alike."""
    seeds = np.arange(batch, dtype=np.uint64) * np.uint64(2**60 + 1)
    streams = torch.from_numpy(seed_streams(seeds)).to(DEVICE)
    return streams, torch.arange(batch, dtype=torch.int32, device=DEVICE) * 777


def draw(
    logits: torch.Tensor,
    temperatures: torch.Tensor,
    streams: torch.Tensor,
    positions: torch.Tensor,
    sampler: Callable[..., None] = sample,
    kept: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> torch.Tensor:
    """`sample` of rows with these parameters; they sit in reverse order, before a padding seat.

    `kept`: their thresholds and last ids; all tokens if None.
    """
    count = len(logits)
    seats = torch.arange(count - 1, -1, -1, dtype=torch.int32, device=DEVICE)
    padding = torch.zeros(1, device=DEVICE)
    token_ids = torch.full((count + 1,), -7, device=DEVICE)
    if kept is None:
        kept = torch.full((count,), -torch.inf, device=DEVICE), torch.zeros_like(seats)
    sampler(
        logits,
        torch.cat((temperatures.flip(0), padding)),
        torch.cat((streams.flip(0), padding.long())),
        seats,
        positions,
        *kept,
        token_ids[:-1],
    )
    assert token_ids[-1] == -7
    return token_ids[:-1]


def check_sample(
    vocab: int, temperatures: list[float], dtype: torch.dtype, stride: int | None = None
) -> None:
    torch.manual_seed(vocab)
    batch = len(temperatures)
    logits = 3 * torch.randn(batch, stride or vocab, device=DEVICE).to(dtype)[:, :vocab]
    args = (torch.tensor(temperatures, device=DEVICE), *random_rows(batch))
    before = logits.clone()
    assert draw(logits, *args).tolist() == draw(logits, *args, sample_reference).tolist()
    limit = logits.float().quantile(0.8, dim=1) if vocab < 2**16 else logits.float()[:, 5]
    kept = limit.to(dtype).float(), torch.full((batch,), vocab // 2, device=DEVICE).int()
    expected = draw(logits, *args, sample_reference, kept).tolist()
    assert draw(logits, *args, kept=kept).tolist() == expected
    assert torch.equal(logits, before)


def check_padding_is_greedy(dtype: torch.dtype) -> None:
    """A row of padding takes the last seat, whose temperature is 0."""
    logits = torch.zeros(3, 5000, dtype=dtype, device=DEVICE)
    logits[:, 4321] = 1.0
    temperatures = torch.tensor([5.0, 5.0, 0.0], device=DEVICE)
    seats = torch.tensor([-1, 1, -1], dtype=torch.int32, device=DEVICE)
    token_ids = torch.zeros(3, dtype=torch.int64, device=DEVICE)
    streams, positions = random_rows(3)
    kept = torch.full((3,), -torch.inf, device=DEVICE), torch.zeros_like(seats)
    sample(logits, temperatures, streams, seats, positions, *kept, token_ids)
    assert token_ids[0] == token_ids[2] == 4321 != token_ids[1]
