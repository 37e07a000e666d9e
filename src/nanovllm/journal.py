"""Results on disk that know which line of the input each of them answers.

The k-th record answers the k-th line and begins with that line's number and digest:

    input    line 1      line 2      (blank)   line 4     line 5   ...
    output   record 1    record 2              rec|            a killed run stops anywhere
             `--- compared with the input --'  `- torn: cut off, line 4 is computed again

So a resumed run repeats no line, loses none, and refuses a file that answers another input.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from time import monotonic
from typing import Any, NamedTuple

Record = dict[str, Any]

SYNC_SECONDS = 1.0


class Line(NamedTuple):
    """A line of the input; `digest` covers its bytes and whatever else decides its result."""

    number: int
    content: bytes
    digest: str

    def head(self) -> Record:
        return {"line": self.number, "digest": self.digest}


def read_lines(path: Path, context: str) -> Iterator[Line]:
    """Lines of a JSONL file, numbered from 1; blank ones count but are left out."""
    with path.open("rb") as file:
        for number, raw in enumerate(file, start=1):
            if content := raw.strip():
                digest = hashlib.blake2b(context.encode() + b"\n" + content, digest_size=16)
                yield Line(number, content, digest.hexdigest())


class Journal:
    """The records on disk, one JSON object a line; this process's alone while it is open.

    Every record goes to the operating system at once, so that a killed process loses none of them.
    It is synced to the disk at most `SYNC_SECONDS` later and on close: what a power cut takes in
    between is computed again.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._end = 0  # of the last whole record
        self._synced_at = monotonic()
        self._file = path.open("a+b")
        self._file.seek(0)
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self._file.close()
            raise ValueError(f"{path} is being written by another run") from None

    def recover(self, line: Line) -> Record | None:
        """The next record if it is there and whole; ValueError if it does not answer `line`."""
        raw = self._file.readline()
        head = json.dumps(line.head())[:-1].encode()
        if not raw.endswith(b"\n"):
            if not (raw.startswith(head) or head.startswith(raw)):
                raise self._foreign(line)
            return None
        if not raw.startswith(head):
            raise self._foreign(line)
        try:
            record: Record = json.loads(raw)
        except ValueError:
            raise self._foreign(line) from None
        self._end += len(raw)
        return record

    def check_end(self) -> None:
        """Raises ValueError if there are more records than those recovered."""
        if self._file.readline():
            raise ValueError(f"{self.path} has more records than the input has lines")

    def _foreign(self, line: Line) -> ValueError:
        return ValueError(
            f"{self.path} belongs to another job: where the record of line {line.number} should be "
            "is something else. The input, the model or the sampling parameters have changed, or "
            "the file is no result of a job"
        )

    def truncate(self) -> None:
        """Cut off what follows the records recovered: a torn record, or all of an older job's."""
        self._file.truncate(self._end)

    def append(self, records: Iterable[Record]) -> None:
        for record in records:
            self._end += self._file.write(json.dumps(record).encode() + b"\n")
        self._file.flush()
        if monotonic() - self._synced_at >= SYNC_SECONDS:
            self._sync()

    def _sync(self) -> None:
        os.fsync(self._file.fileno())
        self._synced_at = monotonic()

    def close(self) -> None:
        if not self._file.closed:
            self._sync()
            self._file.close()
