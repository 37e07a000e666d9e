"""Programmatic dependent launch: a kernel gets ready while the one before it still runs.

A step has hundreds of kernels of a few microseconds, of which getting started is a good part. A
kernel that is launched with `launch_pdl=True` may start before its predecessor ends, and must call
`wait_for_inputs` before it touches anything that another kernel writes or reads. Hopper and later;
on other GPUs, and in the interpreter, such a kernel is launched and runs like any other.
"""

from __future__ import annotations

# The interpreter wants to see `tl` beside a kernel.
from nanovllm.kernels._triton import INTERPRETED, jit, tl  # noqa: F401

if INTERPRETED:

    @jit
    def wait_for_inputs():
        """Return when the kernel before this one has ended."""

else:
    from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait
    from triton.language.target_info import cuda_capability_geq

    @jit
    def wait_for_inputs():
        """Return when the kernel before this one has ended."""
        if cuda_capability_geq(9, 0):
            gdc_wait()
            # Only now may the next kernel start, which therefore knows of all before this one that
            # they have ended.
            gdc_launch_dependents()
