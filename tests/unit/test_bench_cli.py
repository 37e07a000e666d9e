"""`nanovllm bench`: tables, files, peers, and what it says when something is missing."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from cli_door import invoke

from nanovllm.bench.peers import Peer
from nanovllm.bench.plot import draw_run, write_plots
from nanovllm.bench.recorder import StepRecord
from nanovllm.bench.runner import Plan
from nanovllm.bench.workload import Workload

SMALL = ("--num-requests", "3", "--max-len", "8", "--latency-steps", "3", "--batch", "2")

STUB = """
import json, os
class SamplingParams:
    def __init__(self, temperature, ignore_eos, max_tokens):
        assert ignore_eos
        self.max_tokens = max_tokens
class LLM:
    def __init__(self, model, max_model_len, **options):
        self.model, self.log = model, []
        assert os.path.isfile(os.path.join(model, "config.json"))
    def generate(self, prompts, sampling_params, use_tqdm):
        assert not use_tqdm
        self.log.append([prompts, [p.max_tokens for p in sampling_params]])
        with open(os.environ["STUB_LOG"], "w") as file:
            json.dump(self.log, file)
"""


@pytest.fixture
def stubs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory with modules that look like the peers, and note in log.json what they run."""
    for name in ("vllm", "nanovllm"):
        (tmp_path / f"{name}.py").write_text(STUB)
    monkeypatch.setenv("STUB_LOG", str(tmp_path / "log.json"))
    return tmp_path


@pytest.fixture
def bench_args(checkpoint: Path) -> tuple[str, ...]:
    return ("--model", str(checkpoint), "--num-blocks", "64", "--max-model-len", "256", *SMALL)


def test_all_profiles_in_tables_json_and_a_page(bench_args, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    figures, page = tmp_path / "out.json", tmp_path / "out.html"
    result = invoke(
        *("bench", "throughput", "latency", "online", *bench_args),
        *("--rate", "500", "--json", str(figures), "--plot", str(page)),
        *("--seed", "0", "--seed", "1"),
    )
    assert result.exit_code == 0, result.stderr
    for title in ("Throughput", "Latency", "Online", "roofline from"):
        assert title in result.stdout
    report = json.loads(figures.read_text())
    assert {"gpu", "torch", "triton", "commit", "date"} <= report["machine"].keys()
    assert [run["seed"] for run in report["throughput"]] == [0, 1]
    for run in report["throughput"]:
        assert run["tokens_per_second"] == run["num_output_tokens"] / run["seconds"]
        assert run["roofline_share"] > 0
    assert len(report["latency"][0]["step_ms"]) == 3
    assert report["latency"][0]["roofline_share"] > 0
    online = [(run["policy"], run["seed"]) for run in report["online"]]
    assert online == [(policy, seed) for policy in ("prefill_first", "mixed") for seed in (0, 1)]
    assert all(run["ttft_p99"] >= run["ttft_p50"] > 0 for run in report["online"])
    drawn = page.read_text()
    assert drawn.count("<svg") == 6, "one per run that has steps over time"
    assert "<script" not in drawn
    assert "<link" not in drawn
    assert str(report["machine"]["torch"]) in drawn


def test_a_picture(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    picture = tmp_path / "out.png"
    write_plots(picture, [("same", [DECODE]), ("same", [DECODE]), ("none", [])], {})
    header = picture.read_bytes()[:24]
    assert header.startswith(b"\x89PNG")
    width, height = (int.from_bytes(header[i : i + 4], "big") for i in (16, 20))
    assert (width, height) == (1100, 2 * 700)


@pytest.mark.parametrize("num_steps", [1, 12])
def test_all_steps_are_seen_in_every_panel(num_steps: int) -> None:
    """And the area below the tokens a second is the tokens."""
    pytest.importorskip("matplotlib")
    steps = [replace(DECODE, end=0.5 * (i + 1)) for i in range(num_steps)]
    axes = draw_run("a run", steps).axes
    drawn = [panel.patches for panel in axes]
    assert [len(patches) for patches in drawn] == [1, 2, 3, 2, 1]  # the last: prefilled
    for patch in (patch for patches in drawn for patch in patches):
        values, edges, _ = patch.get_data()
        assert (edges[0], edges[-1]) == (0, 0.5 * num_steps)
    values, edges, _ = drawn[0][0].get_data()
    assert sum(values * (edges[1:] - edges[:-1])) == pytest.approx(2 * num_steps)


def test_kernels_of_a_step(bench_args, tmp_path: Path) -> None:
    figures = tmp_path / "out.json"
    result = invoke("bench", "kernels", *bench_args, "--json", str(figures))
    assert result.exit_code == 0, result.stderr
    assert "A decode step of 2 x 24 tokens" in result.stdout
    (run,) = json.loads(figures.read_text())["kernels"]
    times = [kernel["us"] for kernel in run["kernels"]]
    assert times == sorted(times, reverse=True)
    counts = {kernel["name"]: kernel["count"] for kernel in run["kernels"]}
    # Products of a layer: qkv, o, gate and up, down; two layers and the head.
    assert counts["aten::mm"] == 4 * 2 + 1


def test_a_prefill(bench_args, tmp_path: Path) -> None:
    figures = tmp_path / "out.json"
    result = invoke("bench", "prefill", *bench_args, "--json", str(figures))
    assert result.exit_code == 0, result.stderr
    assert "A prefill of 16 x 8 tokens" in result.stdout
    run = json.loads(figures.read_text())["prefill"]
    assert run["matmul_share"] > run["matmul_share_without_attention"] > 0


@pytest.mark.parametrize("name", ["vllm", "nano-vllm"])
def test_a_peer_runs_the_same_work(name: str, bench_args, stubs: Path) -> None:
    peer = ("--peer", name, "--peer-path", str(stubs))
    result = invoke("bench", "throughput", "latency", *bench_args, *peer, "--prompt-len", "5")
    assert result.exit_code == 0, result.stderr
    assert result.stdout.count(f"│ {name} ") == 2, "a row in each table"
    warm_up, throughput, short, long = json.loads((stubs / "log.json").read_text())
    work = Plan(num_requests=3, max_len=8).workload(0, vocab_size=300)
    prompts = list(work.prompts)
    if name == "vllm":
        prompts = [{"prompt_token_ids": prompt} for prompt in prompts]
    assert throughput == [prompts, list(work.max_tokens)]
    assert len(warm_up[0]) == 3
    assert [b - a for a, b in zip(short[1], long[1], strict=True)] == [3, 3]
    assert short[0] == long[0]
    lengths = [len(p["prompt_token_ids"] if name == "vllm" else p) for p in short[0]]
    assert lengths == [5, 5]


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (("bench", "speed"), "throughput, latency, online, kernels, prefill, got 'speed'"),
        (("bench", "--num-requests", "0"), "num_requests must be >= 1"),
        (("bench", "online", "--rate", "-1"), "rates must be positive"),
        (("bench", "online", "--rate", "inf"), "rates must be positive and finite"),
        (("bench", "--seed", "-1"), "seeds must be >= 0, got (-1,)"),
        (("bench", "--batch", "0"), "batch_sizes must be >= 1"),
        (("bench", "latency", "--plot", "out.png"), "neither of which is asked for"),
        (("bench", "--plot", "nowhere/out.PNG"), "there is no directory 'nowhere'"),
        (("bench", "--json", "nowhere/out.json"), "there is no directory 'nowhere'"),
        (("bench", "latency", "--prompt-len", "0"), "prompt_len must be >= 1"),
        (("bench", "--peer", "llama"), "nano-vllm, vllm, hf, got 'llama'"),
        (("bench", "--plot", "out.pdf"), ".png or .html"),
        (("bench", "--model", "synthetic:gpt"), "synthetic:qwen3-0.6b"),
        (("bench", "online", "--trace", "out.jsonl"), "a trace is of one"),
        (("bench", "kernels", *SMALL, "--max-num-seqs", "1"), "max_num_seqs=1"),
        (("bench", "latency", *SMALL, "--max-num-seqs", "1"), "max_num_seqs=1"),
    ],
)
def test_bad_usage(args: tuple[str, ...], words: str) -> None:
    result = invoke(*args)
    assert result.exit_code == 2
    assert words in result.stderr


DECODE = StepRecord(0.5, 0.1, 0.08, "decode", 2, 0, 2, 40, 1, 3, 2, 8, 10, 40, 16)
WORK = [Workload(([1, 2],), (3,))]


def test_a_peer_that_is_not_there_says_so(checkpoint: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"(?s)peer vllm ended .*No module named 'vllm'"):
        Peer("vllm", path=tmp_path).times(checkpoint, 64, WORK)
    with pytest.raises(ValueError, match="no-python does not start"):
        Peer("vllm", python=str(tmp_path / "no-python")).times(checkpoint, 64, WORK)


def test_this_package_is_not_its_own_peer(checkpoint: Path) -> None:
    """nano-vllm's package has the same name."""
    with pytest.raises(ValueError, match="give --peer-path"):
        Peer("nano-vllm").times(checkpoint, 64, WORK)
