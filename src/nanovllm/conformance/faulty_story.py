"""What goes wrong without a requirement: the smallest story of an engine with a planted fault."""

from __future__ import annotations

from nanovllm.conformance.faults import FAULTS, Fault
from nanovllm.conformance.reports.text_picture import text_picture
from nanovllm.conformance.runner import CORE_REQUIREMENTS, run_core
from nanovllm.conformance.verdicts import Outcome, Verdict


def faulty_story(spec_id: str) -> str:
    """As Markdown: the fault, the story, who held which block; empty if no fault shows it so.

    Only the core door shows stories: blocks and schedules, without a model.
    """
    if spec_id not in CORE_REQUIREMENTS:
        return ""
    for fault in FAULTS.values():
        if fault.convicts == spec_id and fault.door == "core":
            verdict = _convict(fault)
            if verdict is not None:
                return _tell(fault, verdict)
    return ""


def _convict(fault: Fault) -> Verdict | None:
    with fault.make() as door:
        verdicts = run_core(lambda: door, requirements={fault.convicts})
    return next((v for v in verdicts if v.outcome is Outcome.FAIL), None)


def _tell(fault: Fault, verdict: Verdict) -> str:
    blocks = text_picture(verdict.trace) if verdict.trace else []
    return "\n".join(
        [
            "\n## An engine that gets it wrong\n",
            f"{fault.text}\n",
            *(["```", *verdict.story, "```", ""]),
            f"{verdict.message}\n",
            *(["```", *blocks, "```", ""] if blocks else []),
        ]
    )
