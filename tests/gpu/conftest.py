"""Every test here needs the device."""

import pytest
import torch


@pytest.fixture(scope="session", autouse=True)
def needs_cuda(cuda: torch.device) -> None:
    """Before any other fixture of the session."""
