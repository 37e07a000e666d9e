"""The command line: what is printed where, and the exit code."""

import json
import re
import subprocess
import sys
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
from cli_door import GREEDY, GREEDY_ARGS, POOL, POOL_ARGS, interrupt_after, invoke

from nanovllm import LLM, SamplingParams, StreamChunk
from nanovllm.cli.generate import SamplePrinter
from nanovllm.cli.options import EngineOptions, JobOptions, SampleOptions, SamplingOptions
from nanovllm.config import Config


@pytest.fixture(scope="module")
def llm(checkpoint: Path):
    with LLM(checkpoint, **POOL) as engine:
        yield engine


@pytest.fixture
def engine_args(checkpoint: Path) -> list[str]:
    return ["--model", str(checkpoint), *POOL_ARGS]


def texts(llm: LLM, prompt: str, params: SamplingParams) -> list[str]:
    return [sample.text for sample in llm.generate(prompt, params, use_tqdm=False)[0].samples]


# ---- one prompt ------------------------------------------------------------------------------


@pytest.mark.spec("STP-4")
def test_generate_prints_the_text_and_nothing_else(llm: LLM, engine_args: list[str]) -> None:
    result = invoke("generate", "hello", *GREEDY_ARGS, *engine_args)
    assert result.exit_code == 0
    assert result.stdout == texts(llm, "hello", GREEDY)[0] + "\n"
    assert result.stderr == ""


def test_a_dash_reads_the_prompt_from_stdin(llm: LLM, engine_args: list[str]) -> None:
    result = invoke("generate", "-", *GREEDY_ARGS, *engine_args, stdin="two\nlines\n")
    assert result.stdout == texts(llm, "two\nlines", GREEDY)[0] + "\n"


@pytest.mark.spec("FRK-3")
def test_samples_are_labelled_and_in_order(llm: LLM, engine_args: list[str]) -> None:
    result = invoke(
        "generate", "hello", "-n", "3", "--seed", "5", "--max-tokens", "9", *engine_args
    )
    params = SamplingParams(n=3, seed=5, max_tokens=9)
    labelled = [
        f"--- sample {i} of 3 ---\n{text}\n"
        for i, text in enumerate(texts(llm, "hello", params), start=1)
    ]
    assert result.stdout == "".join(labelled)


def test_a_sample_waits_until_those_before_it_have_ended(
    capsys: pytest.CaptureFixture[str],
) -> None:
    printer = SamplePrinter(2)
    steps = [
        (StreamChunk(0, 1, "B1 ", [1]), "--- sample 1 of 2 ---\n"),
        (StreamChunk(0, 0, "A1 ", [1]), "A1 "),
        (StreamChunk(0, 1, "B2", [1], "stop"), ""),
        (StreamChunk(0, 0, "A2", [1, 2], "length"), "A2\n--- sample 2 of 2 ---\nB1 B2\n"),
    ]
    for chunk, printed in steps:
        printer.take(chunk)
        assert capsys.readouterr().out == printed
    assert (printer.num_tokens, printer.finish_reasons) == (5, "length, stop")
    assert not printer.failed


def test_json_is_one_object_with_all_samples(llm: LLM, engine_args: list[str]) -> None:
    flags = ["-n", "2", "--seed", "5", "--logprobs", "0", "--max-tokens", "9", "--json"]
    result = invoke("generate", "hello", *flags, *engine_args)
    assert result.exit_code == 0
    assert result.stderr == ""
    report = json.loads(result.stdout)
    output = llm.generate("hello", SamplingParams(n=2, seed=5, max_tokens=9), use_tqdm=False)[0]
    assert (report["prompt"], report["num_prompt_tokens"]) == ("hello", 5)
    assert [sample["token_ids"] for sample in report["samples"]] == [
        sample.token_ids for sample in output.samples
    ]
    assert all(len(s["logprobs"]) == len(s["token_ids"]) for s in report["samples"])


@pytest.mark.parametrize("as_json", [False, True], ids=["text", "json"])
def test_a_request_that_fails_exits_1(
    engine_args: list[str], monkeypatch: pytest.MonkeyPatch, as_json: bool
) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("out of luck")

    monkeypatch.setattr("nanovllm.engine.model_runner.ModelRunner.run", fail)
    result = invoke("generate", "hello", *GREEDY_ARGS, *engine_args, *["--json"] * as_json)
    assert result.exit_code == 1
    assert "out of luck" in (result.stdout if as_json else result.stderr)


def test_ctrl_c_ends_a_stream_with_130(
    engine_args: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    printed = interrupt_after(monkeypatch, [3])
    result = invoke("generate", "hello", *GREEDY_ARGS, *engine_args)
    assert result.exit_code == 130
    assert len(printed) == 3
    assert "Traceback" not in result.stderr


# ---- options ---------------------------------------------------------------------------------


def defaults(group: Any) -> dict[str, Any]:
    return {f.name: f.default for f in fields(group)}


def test_every_option_of_the_library_is_there_with_its_default() -> None:
    engine = defaults(Config)
    del engine["seed"]
    of_jobs_only = {"data_parallel_size": engine.pop("data_parallel_size")}
    assert defaults(EngineOptions) == engine
    assert defaults(JobOptions).items() >= of_jobs_only.items()
    sampling = SamplingOptions().as_params() | defaults(SampleOptions)
    assert SamplingParams(**sampling | {"max_tokens": 64}) == SamplingParams()
    assert sampling.keys() | {"seed", "stop", "stop_token_ids"} == defaults(SamplingParams).keys()


def test_options_arrive_as_given(monkeypatch: pytest.MonkeyPatch) -> None:
    engines: list[dict[str, Any]] = []
    requests: list[tuple[str, SamplingParams]] = []

    class Recorder:
        def __init__(self, **options: Any) -> None:
            engines.append(options)

        def __enter__(self) -> "Recorder":
            return self

        def __exit__(self, *_: object) -> None: ...

        def validate(self, prompt: str, params: SamplingParams) -> None:
            requests.append((prompt, params))
            raise ValueError("seen enough")

    monkeypatch.setattr("nanovllm.llm.LLM", Recorder)
    sampling = {
        "temperature": 0.5, "top_k": 4, "top_p": 0.9, "min_p": 0.1, "seed": 3,
        "repetition_penalty": 1.1, "presence_penalty": 0.2, "frequency_penalty": -0.3,
        "max_tokens": 0, "min_tokens": 2, "logprobs": 1,
    }  # fmt: skip
    flags = [word for name, value in sampling.items() for word in (dashed(name), str(value))]
    others = "-n 2 --stop a --stop b --stop-token-id 7 --include-stop --ignore-eos"
    engine = "--model m --device cpu --dtype float16 --max-model-len 99 --max-num-seqs 3 \
        --max-num-batched-tokens 44 --policy mixed --max-consecutive-prefills 2 \
        --tensor-parallel-size 2 --backend torch --enforce-eager --no-async-scheduling \
        --kv-cache-dtype fp8 \
        --skip-tokenizer --block-size 8 --num-blocks 5 \
        --kv-memory-gb 0.5 --gpu-memory-utilization 0.7 --no-prefix-cache --trace t.jsonl"
    result = invoke("generate", "hello", *flags, *others.split(), *engine.split())

    assert result.exit_code == 2
    assert "seen enough" in result.stderr
    given = sampling | {"max_tokens": None, "n": 2, "stop": ["a", "b"], "stop_token_ids": [7]}
    params = SamplingParams(**given, include_stop=True, ignore_eos=True)
    assert requests == [("hello", params)]
    assert engines == [
        {
            "model": Path("m"), "device": "cpu", "dtype": "float16", "max_model_len": 99,
            "max_num_seqs": 3, "max_num_batched_tokens": 44, "scheduling_policy": "mixed",
            "max_consecutive_prefills": 2, "tensor_parallel_size": 2, "enforce_eager": True,
            "skip_tokenizer": True, "kvcache_block_size": 8, "num_kvcache_blocks": 5,
            "attention_backend": "torch", "async_scheduling": False, "kv_cache_dtype": "fp8",
            "kvcache_memory_gb": 0.5, "gpu_memory_utilization": 0.7,
            "enable_prefix_caching": False, "trace": Path("t.jsonl"),
        }
    ]  # fmt: skip
    assert engines[0].keys() == defaults(EngineOptions).keys()


def dashed(name: str) -> str:
    return "--" + name.replace("_", "-")


@pytest.mark.spec("CFG-1", "SCH-7a", "SCH-7b")
@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["generate"], "give either a PROMPT, or both --input and --output"),
        (["generate", "x", "-i", __file__, "-o", "y"], "give either a PROMPT"),
        (["generate", "-i", __file__], "--input and --output go together"),
        (["generate", "x", "--overwrite"], "--input and --output go together"),
        (["generate", "x", "--data-parallel-size", "2"], "goes with --input and --output"),
        (["generate", "-i", "no-such-file", "-o", "y"], "does not exist"),
        (["generate", "x", "--top-p", "3"], "top_p must be in (0.0, 1.0], got 3.0"),
        (["generate", "x", "--top-p", "three"], "--top-p"),
        (["generate", "x", "--max-tokens", "-1"], "max_tokens must be None or an integer"),
        (["generate", "x", "--policy", "fair"], "must be one of prefill_first, mixed, got 'fair'"),
        (["generate", "x", "--model", "no-such-model"], "no-such-model is not a directory"),
        (["generate", ""], "the prompt is empty"),
        (["generate", "x" * 600], "the prompt has 600 tokens"),
        (["chat", "--top-k", "-2"], "top_k must be in"),
        (["info", "--num-blocks", "0"], "num_kvcache_blocks must be >= 1, got 0"),
    ],
)
def test_bad_usage_exits_2_with_a_message(checkpoint: Path, args: list[str], message: str) -> None:
    model = [] if "--model" in args else ["--model", str(checkpoint)]
    result = invoke(*args, *model)
    assert result.exit_code == 2
    assert message in result.stderr
    assert "Traceback" not in result.stderr
    assert result.stdout == ""


# ---- info, help ------------------------------------------------------------------------------


def test_info_tells_sizes_and_capabilities(engine_args: list[str]) -> None:
    report = json.loads(invoke("info", "--json", *engine_args).stdout)
    token = 2 * 2 * 2 * 16 * 4  # K and V, layers, KV heads, head_dim, bytes of a float32
    assert report["kv_cache"] == {
        "block_size": 4, "bytes_per_token": token, "bytes_per_block": 4 * token,
        "blocks": 64, "bytes": 64 * 4 * token,
    }  # fmt: skip
    model = report["model"]
    assert (model["architecture"], model["vocab_size"]) == ("Qwen3ForCausalLM", 300)
    assert (model["layers"], model["heads"], model["kv_heads"]) == (2, 4, 2)
    assert (report["engine"]["device"], report["engine"]["max_model_len"]) == ("cpu", 512)
    assert {"prefix_cache", "chunked_prefill", "n", "stream"} <= {*report["engine"]["capabilities"]}

    cold = invoke("info", "--no-prefix-cache", *engine_args)
    assert cold.exit_code == 0
    assert re.search(r"^  bytes_per_block +2,048$", cold.stdout, re.MULTILINE)
    assert "prefix_cache" not in cold.stdout


def test_info_counts_every_parameter_once(engine_args: list[str], llm: LLM) -> None:
    report = json.loads(invoke("info", "--json", *engine_args).stdout)
    layer = 64 * (64 + 2 * 32) + 64 * 64 + 3 * 64 * 128 + 2 * 64 + 2 * 16
    assert report["model"]["parameters"] == 300 * 64 + 2 * layer + 64


def test_the_command_helps_without_waiting_for_torch() -> None:
    program = (
        "import atexit, sys; from nanovllm.cli import main\n"
        "atexit.register(lambda: print({'torch', 'transformers'} & {*sys.modules} or 'neither'))\n"
        "sys.argv[1:] = ['generate', '--help']; main()"
    )
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, check=True)
    assert b"nanovllm generate --input" in result.stdout
    assert result.stdout.endswith(b"neither\n")
    assert b"\x1b" not in result.stdout


def test_version_and_help() -> None:
    assert re.fullmatch(r"nanovllm \d+\.\d+\.\d+\S*\n", invoke("--version").stdout)
    overview = invoke("--help")
    assert overview.exit_code == 0
    for name in ("generate", "chat", "info"):
        assert f"nanovllm {name}" in overview.stdout
        page = invoke(name, "-h")
        assert page.exit_code == 0
        assert f"nanovllm {name}" in page.stdout
        assert "Engine" in page.stdout
