"""Tries tiles, warps, stages and splits of the attention kernels, for `bench_kernels.py`."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import islice

import torch
from kernel_timing import (
    DECODE_ROWS,
    PREFILL_ROWS,
    Attention,
    Call,
    attention_tflop,
    microseconds,
)

from nanovllm.kernels.paged_decode import DecodeConfig
from nanovllm.kernels.paged_prefill import PrefillConfig

DECODE_CONFIGS = [
    DecodeConfig(*sizes)
    for sizes in (
        (32, 2, 3), (32, 2, 4), (64, 2, 2), (64, 2, 3), (64, 2, 4), (64, 4, 2), (64, 4, 3),
        (64, 4, 4), (128, 2, 2), (128, 4, 2), (128, 4, 3), (128, 4, 4), (128, 8, 3), (256, 8, 2),
    )
]  # fmt: skip
PREFILL_CONFIGS = [
    PrefillConfig(*sizes)
    for sizes in (
        (64, 64, 4, 2), (64, 64, 4, 3), (64, 128, 4, 2), (128, 32, 4, 3), (128, 64, 4, 3),
        (128, 64, 8, 2), (128, 64, 8, 3), (128, 64, 8, 4), (128, 128, 8, 2), (128, 128, 8, 3),
    )
]  # fmt: skip


def try_out(calls: Callable[[], list[Call]]) -> float | None:
    """Microseconds, or None where the tiles do not fit into a multiprocessor."""
    try:
        return microseconds(calls())
    except Exception as error:
        if type(error).__name__ != "OutOfResources":
            raise
        return None


def cell(value: float | None, width: int = 16) -> str:
    return f"{'-' if value is None else f'{value:.2f}':>{width}}"


def sweep_decode(pool: torch.Tensor) -> None:
    print("\ndecode, TB/s" + "".join(f"{name:>16}" for name in islice(DECODE_ROWS, 4)))
    for page in (16, 32, 256):
        for config in DECODE_CONFIGS:
            print(f"{page:>4} {'/'.join(map(str, config)):<8}", end="")
            for lengths in islice(DECODE_ROWS.values(), 4):
                case = Attention(pool, page, lengths)
                us = try_out(partial(case.decode, 1, config))
                print(cell(us and case.num_bytes / us / 1e6), end="", flush=True)
            print()


def sweep_splits(pool: torch.Tensor) -> None:
    counts = (1, 2, 4, 8, 16, 32)
    print("\nsplits, us" + " " * 19 + "".join(f"{n:>8}" for n in counts))
    for page, config in ((16, None), (16, DecodeConfig(32, 2, 3)), (256, None)):
        for name in islice(DECODE_ROWS, 2, None):
            case = Attention(pool, page, DECODE_ROWS[name])
            times = (try_out(partial(case.decode, n, config)) for n in counts)
            tiles = "/".join(map(str, config)) if config else "default"
            print(f"{page:>4} {tiles:<8}{name:>16}" + "".join(cell(t, 8) for t in times))


def sweep_prefill(pool: torch.Tensor) -> None:
    names = list(PREFILL_ROWS)[:3]
    print("\nprefill, TFLOP/s  " + "".join(f"{name:>16}" for name in names))
    for page in (16, 256):
        for config in PREFILL_CONFIGS:
            print(f"{page:>4} {'/'.join(map(str, config)):<13}", end="")
            for name in names:
                rows = PREFILL_ROWS[name]
                counts, lengths = zip(*rows, strict=True)
                case = Attention(pool, page, lengths)
                us = try_out(partial(case.prefill, counts, config))
                print(cell(us and attention_tflop(rows) / us * 1e6), end="", flush=True)
            print()
