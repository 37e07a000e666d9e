"""What tests on a GPU share: the device, the model, and a required suite that may not skip."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from nanovllm.bench.synthetic import model_directory

REAL_WEIGHTS = "NANOVLLM_QWEN3"


@pytest.fixture(scope="session")
def cuda() -> torch.device:
    """The device; without one the test is skipped."""
    if not torch.cuda.is_available():
        pytest.skip("torch finds no CUDA device here")
    return torch.device("cuda")


@pytest.fixture(scope="session")
def qwen3(cuda: torch.device) -> Iterator[Path]:
    """Qwen3-0.6B: the weights that `NANOVLLM_QWEN3` names, else synthetic ones of its shape."""
    with model_directory(os.environ.get(REAL_WEIGHTS) or "synthetic:qwen3-0.6b") as directory:
        yield directory


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--require", metavar="MARKER", help="a test of this marker that skips is a failure"
    )


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Iterator[None]:
    report = yield
    required = item.config.getoption("require")
    expected_to_fail = hasattr(report, "wasxfail")
    if report.skipped and not expected_to_fail and required and item.get_closest_marker(required):
        reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else report.longrepr
        report.outcome = "failed"
        report.longrepr = f"--require {required}: {reason}"
    return report
