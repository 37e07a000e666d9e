"""The journal of a job: a killed run goes on from it, and no other job's file is touched."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from job_files import DEFAULTS, REQUESTS, open_job, records, run, write

from nanovllm import LLM
from nanovllm.journal import Journal


@pytest.fixture(scope="module")
def llm(checkpoint: Path) -> Iterator[LLM]:
    with LLM(checkpoint, kvcache_block_size=4, num_kvcache_blocks=64, max_num_seqs=4) as engine:
        yield engine


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return write(tmp_path / "in.jsonl", REQUESTS)


@pytest.fixture
def target(tmp_path: Path) -> Path:
    return tmp_path / "out.jsonl"


def test_a_run_cut_off_at_any_byte_goes_on_to_the_same_result(
    llm: LLM, source: Path, target: Path
) -> None:
    run(llm, source, target)
    whole = target.read_bytes()
    ends = [i + 1 for i, byte in enumerate(whole) if byte == ord("\n")]
    for cut in [0, 1, 20, 60, *ends, *(end - 1 for end in ends), ends[1] + 1, ends[2] + 70]:
        target.write_bytes(whole[:cut])
        num_whole = sum(end <= cut for end in ends)
        with open_job(source, target) as job:
            assert job.num_recorded == num_whole
            missing = list(job.run(llm))
        assert [r["line"] for r in missing] == list(range(num_whole + 1, 6)), cut
        assert target.read_bytes() == whole, cut


def test_a_complete_job_has_nothing_to_do(llm: LLM, source: Path, target: Path) -> None:
    run(llm, source, target)
    before = llm.stats().num_requests
    with open_job(source, target) as job:
        assert job.is_complete
        assert (job.num_lines, job.num_recorded, job.num_failed) == (5, 5, 0)
        assert list(job.run(llm)) == []
    assert llm.stats().num_requests == before


def test_lines_added_to_the_input_are_answered_too(llm: LLM, source: Path, target: Path) -> None:
    run(llm, source, target)
    write(source, [*REQUESTS, {"prompt": "more"}])
    assert [r["line"] for r in run(llm, source, target)] == [6]
    assert [r["line"] for r in records(target)] == [1, 2, 3, 4, 5, 6]


@pytest.mark.parametrize("torn", [0, 3], ids=["whole", "torn"])
@pytest.mark.parametrize(
    "change",
    [
        {"requests": [{"prompt": "other"}, *REQUESTS[1:]]},
        {"requests": [*REQUESTS[:4], {"prompt": "other"}]},
        {"requests": REQUESTS[:4]},
        {"requests": [b"", *REQUESTS]},
        {"defaults": DEFAULTS | {"top_k": 3}},
        {"model": Path("another-model")},
    ],
    ids=["first line", "last line", "fewer lines", "moved lines", "parameters", "model"],
)
def test_results_of_another_job_are_refused_and_left_alone(
    llm: LLM, source: Path, target: Path, change: dict[str, Any], torn: int
) -> None:
    run(llm, source, target)
    content = target.read_bytes()
    content = content[: len(content) - torn]
    target.write_bytes(content)
    write(source, change.get("requests", REQUESTS))
    options = {name: value for name, value in change.items() if name != "requests"}
    with pytest.raises(ValueError, match=r"belongs to another job|more records than the input"):
        open_job(source, target, **options)
    assert target.read_bytes() == content


@pytest.mark.parametrize("content", [b"dear diary", b"dear diary\n", b'{"line": 1}\n', b"\0"])
def test_a_file_that_is_no_journal_is_refused_and_left_alone(
    source: Path, target: Path, content: bytes
) -> None:
    target.write_bytes(content)
    with pytest.raises(ValueError, match="belongs to another job: where the record of line 1"):
        open_job(source, target)
    assert target.read_bytes() == content


def test_a_spoilt_record_is_refused_and_left_alone(llm: LLM, source: Path, target: Path) -> None:
    run(llm, source, target)
    spoilt = target.read_bytes().replace(b"samples", b'sam"les', 1)
    target.write_bytes(spoilt)
    with pytest.raises(ValueError, match="where the record of line 1 should be"):
        open_job(source, target)
    assert target.read_bytes() == spoilt


def test_overwriting_starts_anew_but_not_before_the_run(
    llm: LLM, source: Path, target: Path
) -> None:
    target.write_bytes(b"dear diary\n" * 1000)
    with open_job(source, target, overwrite=True) as job:
        assert target.read_bytes().startswith(b"dear diary")
        assert not job.is_complete
        list(job.run(llm))
    assert [r["line"] for r in records(target)] == [1, 2, 3, 4, 5]


def test_the_input_is_never_the_output(source: Path) -> None:
    content = source.read_bytes()
    with pytest.raises(ValueError, match="cannot be its output"):
        open_job(source, source, overwrite=True)
    assert source.read_bytes() == content


def test_two_runs_cannot_write_one_output(source: Path, target: Path) -> None:
    with open_job(source, target), pytest.raises(ValueError, match="written by another run"):
        open_job(source, target)
    open_job(source, target).close()


def test_what_is_written_is_never_more_than_whole_records(
    llm: LLM, source: Path, target: Path
) -> None:
    with open_job(source, target) as job:
        for number, record in enumerate(job.run(llm), start=1):
            on_disk = records(target)
            assert on_disk[number - 1] == record
            assert job.num_recorded == len(on_disk)


@pytest.mark.parametrize("seconds", [0.0, 1e9], ids=["by time", "by close"])
def test_records_are_handed_over_at_once_and_synced_in_time(
    target: Path, monkeypatch: pytest.MonkeyPatch, seconds: float
) -> None:
    synced: list[bytes] = []
    monkeypatch.setattr("nanovllm.journal.SYNC_SECONDS", seconds)
    monkeypatch.setattr(
        "nanovllm.journal.os.fsync", lambda _descriptor: synced.append(target.read_bytes())
    )
    journal = Journal(target)
    journal.append([{"line": 1}])
    assert records(target) == [{"line": 1}]
    assert len(synced) == (seconds == 0)
    journal.close()
    journal.close()
    assert set(synced) == {b'{"line": 1}\n'}
