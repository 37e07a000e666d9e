"""Triton, if it is there.

A kernel stands beside its torch reference, and the torch backend needs the references also where
Triton is not installed. There the kernels' files can still be imported, and a kernel says what it
misses when it is launched.
"""

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache
from typing import Any, NoReturn

import torch

try:
    import triton
    import triton.language as tl
except ImportError:
    triton = tl = None

__all__ = ["INTERPRETED", "LOG2_E", "cdiv", "compiling", "jit", "next_power_of_2", "tl"]

INTERPRETED = triton is None or triton.knobs.runtime.interpret
"""Whether kernels run without a GPU, step by step, and hence without its own instructions."""

LOG2_E = 1.4426950408889634
"""exp(x) = exp2(x * LOG2_E), and there is an instruction for powers of two."""

_VARYING = ("batch", "num_rows", "table_stride")
"""Arguments that change from step to step: no kernel is compiled anew for some of their values."""


class _Absent:
    """Stands for a kernel on a machine without Triton."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __getitem__(self, grid: tuple[int, ...]) -> NoReturn:
        raise ImportError(
            f"{self.name} needs Triton: install nanovllm[cuda], or choose the backend 'torch'"
        )


def jit(kernel: Callable[..., Any]) -> Any:
    """`triton.jit`, which interprets the kernel under `TRITON_INTERPRET=1`."""
    if triton is None:
        return _Absent(kernel.__name__)
    if INTERPRETED:
        return triton.jit(kernel)
    return _Kernel(kernel, do_not_specialize=_VARYING)


_only_compiling: ContextVar[bool] = ContextVar("only_compiling", default=False)

if triton is not None:

    class _Kernel(triton.JITFunction):  # type: ignore[misc]
        """A kernel that heeds `compiling`, and asks of a GPU only what it can."""

        def run(self, *args: Any, warmup: bool, launch_pdl: bool = False, **options: Any) -> Any:
            return super().run(
                *args,
                warmup=warmup or _only_compiling.get(),
                launch_pdl=launch_pdl and _can_launch_early(),
                **options,
            )

    @cache
    def _can_launch_early() -> bool:
        target = triton.runtime.driver.active.get_current_target()
        return bool(target.backend == "cuda" and target.arch >= 90)


@contextmanager
def compiling() -> Iterator[None]:
    """In the block kernels that are launched do not run: they are compiled, all side by side.

    So is what launches each, by a C compiler; else that is done at its first launch, one by one.
    The interpreter compiles nothing: there they run.
    """
    if INTERPRETED:
        yield
        return
    device = torch.cuda.current_device()
    with ThreadPoolExecutor(initializer=torch.cuda.set_device, initargs=(device,)) as executor:
        mode = triton.AsyncCompileMode(executor)
        with mode:
            token = _only_compiling.set(True)
            try:
                yield
            finally:
                _only_compiling.reset(token)
            kernels = [*mode.future_kernels.values()]  # which its end may forget
        list(executor.map(lambda kernel: kernel.result().run, kernels))


def cdiv(a: int, b: int) -> int:
    """`ceil(a / b)`."""
    return -(-a // b)


def next_power_of_2(n: int) -> int:
    """The smallest power of two that is at least n >= 1: the lengths that a tile can have."""
    return 1 << (n - 1).bit_length()
