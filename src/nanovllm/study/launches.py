"""How many operations a step launches on the embedded model; the host needs time for each."""

from __future__ import annotations

from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode

from nanovllm.llm import LLM
from nanovllm.sampling_params import SamplingParams


class Launches(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the operations that compute something: no views, no allocations."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        returns = func._schema.returns
        is_view = any(r.alias_info is not None and not r.alias_info.is_write for r in returns)
        if not is_view and "empty" not in func.__name__:
            self.count += 1
        return func(*args, **(kwargs or {}))


def launches_by_tokens(lengths: tuple[int, ...] = (2, 32, 512)) -> dict[int, int]:
    """Tokens -> operations of a step that computes so many of one prompt; 1 is a decode."""
    counts: dict[int, int] = {}
    with LLM(device="cpu", skip_tokenizer=True, enable_prefix_caching=False) as llm:
        for length in lengths:
            params = SamplingParams(temperature=0, max_tokens=2, ignore_eos=True)
            llm.add_request([7] * length, params)
            for num_tokens in (length, 1):
                with Launches() as launches:
                    llm.step()
                counts[num_tokens] = launches.count
            assert llm.is_finished()
    return counts
