"""Compiling ahead, for a GPU that is not there: a real compiler, a made-up driver."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = """
import json, threading
import torch, triton
from triton.backends.compiler import GPUTarget

thread = threading.local()
thread.device = 1
torch.cuda.current_device = lambda: thread.device
torch.cuda.set_device = lambda device: setattr(thread, "device", device)
done = []

class Launcher:
    def __init__(self, source, metadata):
        done.append("launcher")

    def __call__(self, *arguments):
        done.append("launch")

class Utils:
    def load_binary(self, *arguments):
        done.append(f"binary on device {thread.device}")
        return object(), 0, 0, 0, 1024

    def get_device_properties(self, device):
        return {"max_shared_mem": 1 << 17}

class Driver:
    launcher_cls, utils = Launcher, Utils()
    get_current_target = staticmethod(lambda: GPUTarget("cuda", 90, 32))
    get_current_device = staticmethod(lambda: thread.device)
    get_current_stream = staticmethod(lambda device: 0)

triton.runtime.driver.set_active(Driver())
from nanovllm.kernels._triton import compiling
from nanovllm.kernels.silu_and_mul import silu_and_mul

x = torch.zeros(3, 128, dtype=torch.bfloat16)
with compiling():
    silu_and_mul(x)
    silu_and_mul(x)
    done.append("end of the block")
ahead, done[:] = sorted(done), []
silu_and_mul(x)
print(json.dumps([ahead, done]))
"""


@pytest.mark.spec("PRF-1")
def test_all_but_the_launch_is_done_ahead(tmp_path: Path) -> None:
    """Once, and where the caller's device is: a rank's is not the first."""
    pytest.importorskip("triton")
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(tmp_path)
    command = [sys.executable, "-c", SCRIPT]
    ran = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    ahead, later = json.loads(ran.stdout.splitlines()[-1])
    assert ahead == ["binary on device 1", "end of the block", "launcher"]
    assert later == ["launch"]
