"""Memory of a GPU that other processes of the host can map, by handles of CUDA's driver.

Torch shares tensors between processes, too, but maps them through the other GPU's context, where a
kernel of this one cannot use them.
"""

from __future__ import annotations

import ctypes
from functools import cache
from typing import Final

_LAZY_ENABLE_PEER_ACCESS: Final = 1


class _Handle(ctypes.Structure):
    """CUipcMemHandle."""

    _fields_ = (("reserved", ctypes.c_byte * 64),)


@cache
def _driver() -> ctypes.CDLL:
    try:
        return ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        raise RuntimeError(str(error)) from error


def _call(function: str, *arguments: object) -> None:
    """A function of the driver API, in the context of the thread's current device."""
    code = getattr(_driver(), function)(*arguments)
    if code != 0:
        raise RuntimeError(f"{function} returned CUDA error {code}")


class SharedMemory:
    """Zeros on the current device, which others may map as long as this is not freed.

    Raises RuntimeError if there is no room for it, or where processes cannot share memory.
    """

    def __init__(self, num_bytes: int) -> None:
        address, handle = ctypes.c_uint64(), _Handle()
        _call("cuMemAlloc_v2", ctypes.byref(address), ctypes.c_size_t(num_bytes))
        self.address = address.value
        try:
            _call("cuMemsetD8_v2", address, ctypes.c_ubyte(0), ctypes.c_size_t(num_bytes))
            _call("cuIpcGetMemHandle", ctypes.byref(handle), address)
        except RuntimeError:
            self.free()
            raise
        self.handle = bytes(handle)

    def free(self) -> None:
        _call("cuMemFree_v2", ctypes.c_uint64(self.address))


class MappedMemory:
    """Another process's `SharedMemory`, by its handle; the two GPUs have to reach each other.

    Raises RuntimeError if they do not.
    """

    def __init__(self, handle: bytes) -> None:
        address = ctypes.c_uint64()
        _call(
            "cuIpcOpenMemHandle_v2",
            ctypes.byref(address),
            _Handle.from_buffer_copy(handle),
            ctypes.c_uint(_LAZY_ENABLE_PEER_ACCESS),
        )
        self.address = address.value

    def free(self) -> None:
        _call("cuIpcCloseMemHandle", ctypes.c_uint64(self.address))
