"""A device that fails for good: CUDA repeats such an error until the process ends."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from tiny_models import make_checkpoint

PROGRAM = """
import json, sys
import torch
from nanovllm import LLM, SamplingParams

params = SamplingParams(temperature=0, max_tokens=50, ignore_eos=True)
llm = LLM(sys.argv[1], skip_tokenizer=True, enforce_eager=sys.argv[2] == "eager", max_num_seqs=2)
requests = [llm.add_request([i, 7], params) for i in range(4)]
llm.step()
index = torch.tensor([2**40], device="cuda")
llm.model_runner.state.last_tokens.index_copy_(0, index, index)
outputs = []
while len(outputs) < 4:
    outputs += llm.step().outputs
try:
    llm.add_request([1], params)
except RuntimeError as error:
    refusal = str(error)
print(json.dumps([[o.samples[0].error for o in outputs], refusal]))
"""


@pytest.mark.spec("TP-4")
@pytest.mark.parametrize("way", ["graphs", "eager"])
def test_it_ends_all_requests_and_the_engine(tmp_path: Path, way: str) -> None:
    """In a process of its own, which is lost."""
    checkpoint = make_checkpoint(tmp_path, head_dim=64)
    command = [sys.executable, "-c", PROGRAM, str(checkpoint), way]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.stdout, done.stderr
    errors, refusal = json.loads(done.stdout.splitlines()[-1])
    assert len(set(errors)) == 1
    assert "CUDA error" in errors[0]
    assert refusal == f"this engine has failed: {errors[0]}"
