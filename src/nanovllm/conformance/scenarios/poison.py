"""A model that makes NaN of one token: how far that spreads, at the engine door."""

from __future__ import annotations

import json
import shutil
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

from nanovllm.conformance.protocol import EngineDoor
from nanovllm.conformance.scenarios.engine_driver import (
    MODEL,
    TEXTS,
    EngineBench,
    request,
    tokens_of,
)
from nanovllm.conformance.scenarios.scenario import scenario, scenarios_of
from nanovllm.conformance.scenarios.track import span
from nanovllm.conformance.verdicts import Evaluations

engine = partial(scenario, door="engine")
POISON = 4000
"""A token of the embedded model, which no text here has."""


def poisoned(folder: Path) -> Path:
    """The embedded model with NaN for the embedding of `POISON`; no output layer has it."""
    # Late, since the other scenarios and doors need no torch.
    from safetensors.torch import load_file, save_file

    model = folder / "poisoned"
    shutil.copytree(MODEL, model)
    weights = load_file(model / "model.safetensors")
    embedding = weights["model.embed_tokens.weight"]
    weights["lm_head.weight"] = embedding.clone()
    embedding[POISON] = float("nan")
    save_file(weights, model / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((model / "config.json").read_text())
    config["tie_word_embeddings"] = False
    (model / "config.json").write_text(json.dumps(config))
    return model


@engine("SMP-5", needs=("greedy", "fail_step"))
def nan_ends_its_own_request(door: EngineDoor, seen: Evaluations) -> None:
    """One of three prompts has the token. The others, and what later gets its blocks, are as ever:
    NaN that a table no longer covers must not be read, not even with weight zero."""
    texts = TEXTS[:2]
    with TemporaryDirectory() as folder:
        tight = {"block_size": 4, "num_blocks": 32, "max_model_len": 64}
        bench = EngineBench(door, seen, poisoned(Path(folder)), **tight)
        alone = tokens_of(bench.solo(texts))
        params = {"temperature": 0.0, "max_tokens": 16, "ignore_eos": True}
        sick = [*span(300, 310), POISON, *span(320, 327)]
        for attempt in ("at first", "again"):
            jobs = [request(prompt, params) for prompt in (texts[0], sick, texts[1])]
            first, middle, last = (samples[0] for samples in door.generate(jobs))
            bench.expect(middle.finish_reason == "error", "SMP-5", attempt, "NaN gave", middle)
            healthy = [first, last]
            ends = [result.finish_reason for result in healthy]
            bench.expect(ends == ["length"] * 2, "SMP-5", attempt, "others ended by", ends)
            bench.expect_equal("SMP-5", texts, healthy, alone, f"beside NaN, {attempt}")
        after = bench.ask([*texts, *texts])
        bench.expect_equal("SMP-5", [*texts, *texts], after, [*alone, *alone], "in its blocks")


SCENARIOS = scenarios_of(globals())
