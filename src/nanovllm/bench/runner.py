"""One whole benchmark: engines opened, profiles run, peers asked, figures gathered."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any, get_args

from nanovllm.bench.kernels import run_kernels
from nanovllm.bench.machine import machine_info
from nanovllm.bench.peers import Peer, PeerRun
from nanovllm.bench.prefill import PROMPT_LEN, run_prefill
from nanovllm.bench.profiles import (
    LATENCY_PROMPT_LEN,
    LATENCY_STEPS,
    WARM_UP_STEPS,
    run_latency,
    run_online,
    run_throughput,
    warm_up,
)
from nanovllm.bench.report import Report
from nanovllm.bench.roofline import measure_rates
from nanovllm.bench.synthetic import model_directory
from nanovllm.bench.workload import (
    MAX_LEN,
    NUM_REQUESTS,
    Workload,
    batch_workload,
    offline_workload,
)
from nanovllm.config import Policy
from nanovllm.llm import LLM
from nanovllm.models.model_config import ModelConfig

PROFILES = ("throughput", "latency", "online", "kernels", "prefill")
MIN_MODEL_LEN = 4096
DEFAULT_LOAD = 0.8

Say = Callable[[str], None]


@dataclass(frozen=True)
class Plan:
    """What to run.

    Args:
        profiles: some of `PROFILES`.
        seeds: of the workloads of throughput and online.
        num_requests, max_len: of the workload; its own numbers are the defaults. Prompts of prefill
            are 16 of 1,024 tokens, or of `max_len` if that is less.
        batch_sizes: of latency and kernels.
        prompt_len: of the same; None is 512, but no more than `max_len`.
        latency_steps: that are timed.
        rates: requests a second of the online profile; none: 80 % of what the engine finishes a
            second when all requests of the first seed are there at once.
        peers: who else runs throughput and latency.
    """

    profiles: tuple[str, ...] = ("throughput",)
    seeds: tuple[int, ...] = (0,)
    num_requests: int = NUM_REQUESTS
    max_len: int = MAX_LEN
    batch_sizes: tuple[int, ...] = (1, 8, 32)
    prompt_len: int | None = None
    latency_steps: int = LATENCY_STEPS
    rates: tuple[float, ...] = ()
    peers: tuple[Peer, ...] = ()

    def __post_init__(self) -> None:
        for profile in self.profiles:
            if profile not in PROFILES:
                raise ValueError(f"a profile is one of {', '.join(PROFILES)}, got {profile!r}")
        for name in ("num_requests", "max_len", "latency_steps"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be >= 1, got {getattr(self, name)}")
        if self.prompt_len is not None and self.prompt_len < 1:
            raise ValueError(f"prompt_len must be >= 1, got {self.prompt_len}")
        for name, valid, what in (
            ("seeds", lambda seed: seed >= 0, ">= 0"),
            ("batch_sizes", lambda size: size >= 1, ">= 1"),
            ("rates", lambda rate: 0 < rate < math.inf, "positive and finite"),
        ):
            if not all(map(valid, getattr(self, name))):
                raise ValueError(f"{name} must be {what}, got {getattr(self, name)}")

    def workload(self, seed: int, vocab_size: int) -> Workload:
        return offline_workload(seed, self.num_requests, self.max_len, vocab_size)

    @property
    def latency_prompt_len(self) -> int:
        return self.prompt_len or min(LATENCY_PROMPT_LEN, self.max_len)

    @property
    def model_len(self) -> int:
        """That every request fits in."""
        latency = self.latency_prompt_len + WARM_UP_STEPS + self.latency_steps + 1
        return max(MIN_MODEL_LEN, 2 * self.max_len, latency)


def run_bench(options: Mapping[str, Any], plan: Plan, say: Say = lambda text: None) -> Report:
    """Run a plan with engines of these options of `LLM`; `say` hears what begins.

    Token ids go in and come out: no tokenizer is loaded. Raises ValueError for a batch that the
    engine has no room for, and for options that do not go together.
    """
    policies = _policies(options, plan)
    if options.get("trace") and len(policies) > 1:
        raise ValueError("online compares two engines, and a trace is of one")
    engine = dict(options) | {"skip_tokenizer": True}
    engine["max_model_len"] = engine.get("max_model_len") or plan.model_len
    shown = {name: str(value) for name, value in engine.items() if value is not None}
    report = Report(machine_info(), {"engine": shown, "plan": _plain(plan)})
    with model_directory(engine.pop("model")) as model:
        for policy in policies:
            say(f"nanovllm, {policy}: loading")
            with LLM(model, **engine | {"scheduling_policy": policy}) as llm:
                warm_up(llm, plan.max_len)
                if policy == policies[0]:
                    _run_offline(llm, plan, report, say)
                if "online" in plan.profiles:
                    _run_online(llm, plan, report, say)
        config = ModelConfig.from_pretrained(model)
        model_len = min(engine["max_model_len"], config.max_position_embeddings)
        for peer in plan.peers:
            say(f"{peer.name}: running")
            work = list(_peer_work(plan, config.vocab_size))
            version, seconds = peer.times(model, model_len, work)
            report.peers.append(_peer_run(PeerRun(peer.name, version), plan, work, seconds))
    return report


def _plain(plan: Plan) -> dict[str, Any]:
    return asdict(replace(plan, peers=())) | {"peers": [peer.name for peer in plan.peers]}


def _policies(engine: Mapping[str, Any], plan: Plan) -> list[str]:
    """The one that was asked for comes first; online compares it with the other."""
    chosen = engine.get("scheduling_policy", "prefill_first")
    if "online" not in plan.profiles:
        return [chosen]
    return [chosen, *(policy for policy in get_args(Policy) if policy != chosen)]


def _run_offline(llm: LLM, plan: Plan, report: Report, say: Say) -> None:
    vocab_size = llm.model_config.vocab_size
    if {"throughput", "prefill"} & set(plan.profiles):
        report.rates = measure_rates(llm.model_runner.device, llm.model_runner.dtype)
    if "throughput" in plan.profiles:
        for seed in plan.seeds:
            say(f"nanovllm: throughput, seed {seed}")
            work = plan.workload(seed, vocab_size)
            report.throughput.append(run_throughput(llm, work, seed, report.rates))
    if "latency" in plan.profiles:
        for batch_size in plan.batch_sizes:
            say(f"nanovllm: latency, batch {batch_size}")
            lengths = plan.latency_prompt_len, plan.latency_steps
            report.latency.append(run_latency(llm, batch_size, *lengths, report.rates))
    if "kernels" in plan.profiles:
        for batch_size in plan.batch_sizes:
            say(f"nanovllm: kernels, batch {batch_size}")
            report.kernels.append(run_kernels(llm, batch_size, plan.latency_prompt_len))
    if "prefill" in plan.profiles:
        say("nanovllm: prefill")
        report.prefill = run_prefill(llm, prompt_len=min(PROMPT_LEN, plan.max_len))


def _run_online(llm: LLM, plan: Plan, report: Report, say: Say) -> None:
    policy = llm.config.scheduling_policy
    for rate in plan.rates or [_default_rate(llm, plan, report)]:
        for seed in plan.seeds:
            say(f"nanovllm, {policy}: online, seed {seed}, {rate:.3g} requests a second")
            work = plan.workload(seed, llm.model_config.vocab_size)
            report.online.append(run_online(llm, work, seed, rate))


def _default_rate(llm: LLM, plan: Plan, report: Report) -> float:
    """Of the first policy for both, so that they can be compared."""
    if report.online:
        return report.online[0].rate
    work = plan.workload(plan.seeds[0], llm.model_config.vocab_size)
    return DEFAULT_LOAD * len(work.prompts) / run_throughput(llm, work, 0).seconds


def _peer_work(plan: Plan, vocab_size: int) -> Iterator[Workload]:
    """All of throughput, then per batch size one run without and one with the steps to time."""
    if "throughput" in plan.profiles:
        for seed in plan.seeds:
            yield plan.workload(seed, vocab_size)
    if "latency" in plan.profiles:
        for batch_size in plan.batch_sizes:
            for steps in (WARM_UP_STEPS, WARM_UP_STEPS + plan.latency_steps):
                yield batch_workload(0, batch_size, plan.latency_prompt_len, steps, vocab_size)


def _peer_run(run: PeerRun, plan: Plan, work: list[Workload], seconds: list[float]) -> PeerRun:
    """Fills in what a peer took for `_peer_work`, in its order."""
    taken = zip(work, seconds, strict=True)
    if "throughput" in plan.profiles:
        for seed in plan.seeds:
            workload, took = next(taken)
            run.throughput[seed] = (took, workload.num_output_tokens / took)
    if "latency" in plan.profiles:
        for batch_size in plan.batch_sizes:
            (_, short), (_, long) = next(taken), next(taken)
            run.latency_ms[batch_size] = 1e3 * (long - short) / plan.latency_steps
    return run
