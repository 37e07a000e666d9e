"""What a report says, in each format, and what makes a run red."""

import json
import re
import xml.etree.ElementTree as ET
from dataclasses import replace
from html.parser import HTMLParser
from io import StringIO
from pathlib import Path

import pytest
from conformance_reports import STORY, TRACE, VERDICTS, plan, report, row
from rich.console import Console

from nanovllm.conformance.files import write_atomically
from nanovllm.conformance.protocol import RequestId
from nanovllm.conformance.report import Report, write_reports
from nanovllm.conformance.reports.history import Holder, columns
from nanovllm.conformance.reports.html import to_html
from nanovllm.conformance.reports.json_report import to_json
from nanovllm.conformance.reports.junit import to_junit
from nanovllm.conformance.reports.markdown import to_markdown
from nanovllm.conformance.reports.picture import picture
from nanovllm.conformance.reports.terminal import print_report
from nanovllm.conformance.reports.text_picture import text_picture
from nanovllm.conformance.verdicts import Outcome, Verdict

PASS = Verdict("BLK-1", Outcome.PASS, 5)


def on_terminal(shown: Report, width: int = 200, *, strict: bool = False) -> str:
    text = StringIO()
    print_report(shown, Console(file=text, width=width), strict=strict)
    return text.getvalue()


# ---- red or green ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("outcome", "red", "strictly_red"),
    [
        (Outcome.PASS, False, False),
        (Outcome.KNOWN_FAIL, False, False),
        (Outcome.UNSUPPORTED, False, False),
        (Outcome.BLOCKED, False, False),
        (Outcome.NOT_EXERCISED, False, True),
        (Outcome.FAIL, True, True),
        (Outcome.ERROR, True, True),
        (Outcome.UNEXPECTED_PASS, True, True),
    ],
)
def test_each_outcome_is_red_or_not(outcome: Outcome, red: bool, strictly_red: bool) -> None:
    shown = report(PASS, Verdict("SCH-2", outcome, 1))
    assert bool(shown.problems()) is red
    assert bool(shown.problems(strict=True)) is strictly_red


def test_nothing_evaluated_is_never_green() -> None:
    assert report(Verdict("SCH-2", Outcome.UNSUPPORTED)).problems() == ["nothing was evaluated"]


def test_a_run_that_was_cut_short_is_never_green() -> None:
    assert report(PASS, complete=False).problems() == ["the run is not complete"]


def test_a_deviation_from_a_policy_is_not_red() -> None:
    deviation = Verdict("PFX-9", Outcome.FAIL, 1, "evicts the newest")
    assert not report(PASS, deviation).problems(strict=True)
    assert report(PASS, replace(deviation, spec_id="PFX-8")).problems()


def test_problems_name_the_requirements() -> None:
    assert report().problems() == [
        "1 fail: BLK-8",
        "1 error: SCH-8",
        "1 unexpected pass: SCH-2",
    ]


# ---- JSON ------------------------------------------------------------------------------------


def test_json_has_the_keys_that_others_script() -> None:
    document = json.loads(to_json(report(capabilities={"pool": True, "cow": False})))
    assert document["schema"] == 1
    assert document["complete"] is True
    assert document["spec"] == "0.1"
    assert document["engine"] == {"name": "toy", "version": "0.3"}
    assert document["capabilities"] == {"pool": True, "cow": False}
    assert document["summary"]["fail"] == 2
    assert document["summary"]["evaluations"] == sum(v.evaluations for v in VERDICTS)
    assert len(document["requirements"]) == len(VERDICTS)
    failed = next(r for r in document["requirements"] if r["id"] == "BLK-8")
    assert failed["verdict"] == "fail"
    assert failed["evaluations"] == 17
    assert failed["story"] == list(STORY)
    assert failed["trace"] == TRACE
    assert {"id", "verdict", "evaluations", "tests", "message", "story", "trace"} <= set(failed)


def test_json_sums_agree_with_its_requirements() -> None:
    document = json.loads(to_json(report()))
    for outcome in Outcome:
        listed = [r for r in document["requirements"] if r["verdict"] == outcome]
        assert document["summary"][outcome] == len(listed) == 1 + (outcome == "fail")


# ---- files -----------------------------------------------------------------------------------


@pytest.mark.parametrize("suffix", [".json", ".html", ".md", ".xml", ".svg"])
def test_each_format_says_that_it_is_partial(suffix: str, tmp_path: Path) -> None:
    path = tmp_path / "sub" / f"report{suffix}"
    write_reports(report(complete=False), [path])
    text = path.read_text()
    told = {
        ".json": '"complete": false',
        ".html": "Not complete",
        ".md": "not complete",
        ".xml": 'name="complete" value="False"',
        ".svg": "incomplete",
    }
    assert told[suffix] in text
    write_reports(report(), [path])
    assert told[suffix] not in path.read_text()


def test_an_unknown_format_is_refused_and_writes_nothing(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"report\.pdf: must end in \.json"):
        write_reports(report(), [tmp_path / "report.pdf"])
    assert not list(tmp_path.iterdir())


def test_a_write_that_fails_leaves_the_old_file_and_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "report.json"
    write_atomically(path, "old")

    def fail(self: Path, target: Path) -> None:
        raise OSError("disk full")

    monkeypatch.setattr(Path, "replace", fail)
    with pytest.raises(OSError, match="disk full"):
        write_atomically(path, "new")
    assert [p.name for p in tmp_path.iterdir()] == ["report.json"]
    assert path.read_text() == "old"


# ---- JUnit and badge -------------------------------------------------------------------------


def test_junit_counts_what_fails_a_build() -> None:
    suite = ET.fromstring(to_junit(report())).find("testsuite")
    assert suite is not None
    counts = {name: suite.get(name) for name in ("tests", "failures", "errors", "skipped")}
    assert counts == {"tests": "9", "failures": "2", "errors": "1", "skipped": "5"}
    failed = next(case for case in suite.iter("testcase") if case.get("name") == "BLK-8")
    properties = {p.get("name"): p.get("value") for p in failed.iter("property")}
    assert properties["verdict"] == "fail"
    assert properties["evaluations"] == "17"


def test_junit_survives_what_xml_cannot_hold() -> None:
    bad = Verdict("SCH-2", Outcome.FAIL, 1, "bytes \x00\x1b[31m \ud800 <&>")
    message = ET.fromstring(to_junit(report(bad))).find(".//failure").get("message")
    assert message == "fail: bytes \ufffd\ufffd[31m \ufffd <&>"


@pytest.mark.parametrize(
    ("verdicts", "text", "colour"),
    [
        ((PASS,), "1 pass", "#1a7f37"),
        ((PASS, Verdict("PFX-9", Outcome.FAIL, 1)), "1 pass", "#1a7f37"),
        ((PASS, Verdict("SCH-2", Outcome.FAIL, 1)), "1 pass, 1 fail", "#c93c37"),
        ((Verdict("SCH-2", Outcome.NOT_EXERCISED),), "incomplete", "#6e7781"),
    ],
)
def test_badge(verdicts: tuple[Verdict, ...], text: str, colour: str, tmp_path: Path) -> None:
    write_reports(report(*verdicts), [tmp_path / "badge.svg"])
    badge = ET.parse(tmp_path / "badge.svg").getroot()
    texts = [element.text for element in badge.iter("{http://www.w3.org/2000/svg}text")]
    assert texts == ["conformance 0.1", text]
    assert colour in {e.get("fill") for e in badge.iter("{http://www.w3.org/2000/svg}rect")}


# ---- for people ------------------------------------------------------------------------------


def test_terminal_tells_the_whole_story_of_a_failure() -> None:
    command = "nanovllm conformance run --engine x --req BLK-8 --replay " + "long/" * 40
    text = on_terminal(report(commands={"BLK-8": command}), width=60)
    assert "BLK-8 fail: Nobody changes what another reads" in text
    assert "block 0 <b>is</b> read by request 1" in text
    assert all(line in text for line in STORY)
    assert command in text  # in one line, to be pasted
    assert text.endswith("NOT OK: 1 unexpected pass: SCH-2\n")


def test_terminal_drops_no_column_when_it_is_narrow() -> None:
    lines = on_terminal(report(), width=40).splitlines()
    total = next(line for line in lines if line.startswith(" all "))
    assert total.split() == ["all", *["1"] * 9, "1,263"]


def test_terminal_tells_a_deviation_from_a_failure() -> None:
    text = on_terminal(report(PASS, Verdict("PFX-9", Outcome.FAIL, 1, "the newest")))
    assert "PFX-9 deviation" in text
    assert "OK: 1 requirements pass" in text


def test_terminal_shows_an_engines_markup_as_text() -> None:
    text = on_terminal(report(Verdict("SCH-2", Outcome.FAIL, 1, "[red]x[/red] [/]")))
    assert "[red]x[/red] [/]" in text


def test_markdown_has_a_table_and_quotes_what_an_engine_says() -> None:
    text = to_markdown(report(Verdict("SCH-2", Outcome.ERROR, 1, "# x | y\n<script>")))
    assert "| SCH the scheduler |  |  | 1 |" in text
    assert r"Seen: \# x \| y \<script\>" in text


class Tags(HTMLParser):
    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.links: list[str] = []
        self.targets: set[str] = set()
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.targets |= {f"#{value}" for name, value in attrs if name == "id"}
        self.links += [value or "" for name, value in attrs if name in ("src", "href")]


def test_html_needs_nothing_from_elsewhere() -> None:
    page = to_html(report())
    tags = Tags(page)
    assert tags.links
    assert set(tags.links) <= tags.targets
    assert not {"script", "link", "img", "iframe"} & set(tags.tags)
    assert not re.search(r"url\((?!#)|@import", page)


def test_html_shows_words_of_an_engine_as_text() -> None:
    page = to_html(report(Verdict("SCH-2", Outcome.FAIL, 1, "<b>`x<y`</b>", ("<i>",))))
    assert "&lt;b&gt;<code>x&lt;y</code>&lt;/b&gt;" in page
    assert "<i>" not in page


def test_html_shows_stories_commands_and_all_requirements() -> None:
    page = to_html(report(commands={"BLK-8": "the command"}))
    assert "<span>the</span> <span>command</span>" in page
    assert all(line.replace("'", "&#39;") in page for line in STORY)
    assert all(verdict.spec_id in page for verdict in VERDICTS)
    assert page.count('<svg class="blocks"') == 2


# ---- the blocks over time ----------------------------------------------------------------------


def test_history_follows_who_holds_and_computes_what() -> None:
    steps = columns(TRACE)
    assert [column.step for column in steps] == [0, 1, 2, 3, 4]
    first, second = RequestId(0), RequestId(1)
    assert steps[0].cells[1].holders == (Holder(first, 4, 4, (4, 4)),)
    assert steps[1].cells[0].holders == (Holder(first, 0, 3), Holder(second, 0, 3))
    assert steps[1].cells[1].holders == (Holder(first, 4, 5, (5, 5)),)
    assert steps[2].cells[1].left == first  # it ended; its block keeps what it held
    assert steps[4].cells[1].holders == (Holder(RequestId(2), 4, 7, (4, 7)),)
    assert steps[4].cells[2].left == second
    assert steps[3].cells[2].published


def test_history_keeps_those_who_wait_and_drops_the_preempted() -> None:
    trace = {
        "world": {"block_size": 2},
        "operations": [
            plan(0, row(0, 0, 2, 0)),
            plan(1, row(1, 0, 2, 1)),
            plan(2, row(0, 2, 1, 0, 1), preempted=(1,)),
            {"op": "fail_step", "step": 2, "finished": []},
        ],
    }
    steps = columns(trace)
    assert steps[1].cells[0].holders == (Holder(RequestId(0), 0, 1),)
    assert steps[2].preempted == (RequestId(1),)
    assert steps[2].cells[1].holders == (Holder(RequestId(0), 2, 2, (2, 2)),)
    assert steps[2].failed


def test_history_lets_an_aborted_request_finish_its_step() -> None:
    trace = {
        "world": {"block_size": 2},
        "operations": [
            plan(0, row(0, 0, 2, 0), row(1, 0, 1, 1)),
            {"op": "abort", "request": 0},
            {"op": "commit", "step": 0, "finished": [{"id": [0, 0], "reason": "abort"}]},
            plan(1, row(1, 1, 1, 1)),
        ],
    }
    assert columns(trace)[1].cells[0].left == RequestId(0)


def test_picture_is_well_formed_and_says_what_each_cell_is() -> None:
    svg = ET.fromstring(picture(TRACE))
    titles = [element.text for element in svg.iter("title")]
    assert "block 0, step 1: request 0 holds 0-3; request 1 holds 0-3; published" in titles
    assert "block 2, step 4: free, left by 1" in titles
    assert len([t for t in titles if t and t.startswith("block")]) == 4 * 5


def test_picture_as_text() -> None:
    lines = text_picture(TRACE)
    assert lines[1] == "block 0  r0[0-3]  (r0) (r1)  (r1)    (r1)    r2[8]"
    assert lines[3] == "block 2  .        r1[4-5]    r1[6]   r1[7]   r1~"
    assert text_picture({"world": {"block_size": 4}, "operations": []}) == []


def test_a_trace_without_steps_has_no_picture() -> None:
    assert (
        picture({"world": {"block_size": 4}, "operations": [{"op": "abort", "request": 0}]}) == ""
    )
