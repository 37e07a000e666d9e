"""Models shared by the whole session.

`NANOVLLM_PROFILE=deep` runs every combination of conditions instead of all pairs.
"""

import pytest
import torch
from subjects import Subjects


@pytest.fixture(scope="session")
def subjects(tmp_path_factory: pytest.TempPathFactory) -> Subjects:
    return Subjects(tmp_path_factory.mktemp("models"))


@pytest.fixture(autouse=True)
def one_thread():
    """The models are tiny: more threads would only wait for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
