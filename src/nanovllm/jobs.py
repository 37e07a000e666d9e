"""The offline job: a file of requests in, a file of results in input order out, resumable."""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Generator, Mapping
from dataclasses import asdict, dataclass, fields
from itertools import chain
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from nanovllm.journal import Journal, Line, Record, read_lines
from nanovllm.outputs import RequestOutput
from nanovllm.sampling_params import SamplingParams

if TYPE_CHECKING:
    from nanovllm.engine.llm_engine import Prompt
    from nanovllm.llm import LLM

PROMPT_KEYS = ("prompt", "prompt_token_ids", "messages")
PARAM_KEYS = tuple(f.name for f in fields(SamplingParams))


@dataclass(slots=True)
class _Entry:
    """A line whose record is not written yet, for its own sake or for one before it."""

    head: Record
    record: Record | None = None

    def finish(self, output: RequestOutput) -> None:
        # Nothing here may depend on what else ran, such as prefix hits: a resumed job writes what
        # an undisturbed one would have written.
        result: Record = {"num_prompt_tokens": output.num_prompt_tokens}
        result["samples"] = sample_records(output)
        errors = [sample.error for sample in output.samples if sample.finish_reason == "error"]
        self.record = self.head | ({"error": errors[0]} if errors else {}) | result


class Job:
    """Completes every line of `source` and writes the results to `target`; a context manager.

    A line is an object with one of `prompt` (text), `prompt_token_ids` or `messages`; if wanted an
    `id`, repeated in the record; and sampling parameters, under `sampling_params` or beside it. A
    line that is not, or that the engine refuses, gets a record with `error`.

    Args:
        defaults: sampling parameters of lines that do not give them.
        model: checkpoint directory; results of another one are not mixed in.
        overwrite: start anew, whatever `target` holds; it is cut when `run` begins.

    Raises ValueError if `target` belongs to another job, is the input, or is being written.
    """

    def __init__(
        self,
        source: Path,
        target: Path,
        defaults: Mapping[str, Any],
        *,
        model: Path,
        overwrite: bool = False,
    ) -> None:
        SamplingParams(**defaults)
        if target.exists() and target.samefile(source):
            raise ValueError(f"{target} is the input of the job and cannot be its output")
        self.defaults = dict(defaults)
        context = json.dumps([str(model.resolve()), self.defaults], sort_keys=True)
        self.num_lines = sum(1 for _ in read_lines(source, context))
        self.num_recorded = 0
        self.num_failed = 0
        self._lines = read_lines(source, context)
        self._overwrite = overwrite
        self._journal = Journal(target)
        if not overwrite:
            self._resume()

    def _resume(self) -> None:
        try:
            for line in self._lines:
                record = self._journal.recover(line)
                if record is None:
                    self._lines = chain([line], self._lines)
                    return
                self._count(record)
            self._journal.check_end()
        except BaseException:
            self._journal.close()
            raise

    @property
    def is_complete(self) -> bool:
        """Whether `run` would have nothing to do."""
        return self.num_recorded == self.num_lines and not self._overwrite

    def _count(self, record: Record) -> None:
        self.num_recorded += 1
        self.num_failed += "error" in record

    def run(self, llm: LLM, window: int | None = None) -> Generator[Record, None, None]:
        """Compute what is missing; yields each record once it is written.

        Lines are read as the engine takes them: it holds at most twice the sequences that can run
        at once. And at most `window` lines, 16 times these if not given, are read but not yet
        written, so that the engine stays full while many results wait for a long one before them.

        Raises ValueError if the engine has requests of its own.
        """
        if not llm.is_finished():
            raise ValueError("the engine of a job must not have other requests")
        num_seats = llm.config.max_num_seqs * llm.config.data_parallel_size
        queue = 2 * num_seats
        window = window or 16 * num_seats
        pending: deque[_Entry] = deque()
        live: dict[int, _Entry] = {}
        self._journal.truncate()
        try:
            while True:
                while len(live) < queue and len(pending) < window:
                    if (line := next(self._lines, None)) is None:
                        break
                    pending.append(self._admit(line, llm, live))
                if not pending:
                    return
                yield from self._write(pending)
                for output in llm.step().outputs:
                    live.pop(output.request_id).finish(output)
        finally:
            for request_id in live:
                llm.abort_request(request_id)
            if live:
                llm.step()  # hands their outputs over, so that the engine is left as it was found

    def _admit(self, line: Line, llm: LLM, live: dict[int, _Entry]) -> _Entry:
        entry = _Entry(line.head())
        try:
            raw = load_object(line.content)
            if "id" in raw:
                entry.head["id"] = raw.pop("id")
            prompt, params = parse_request(raw, self.defaults, llm)
            live[llm.add_request(prompt, params)] = entry
        except (ValueError, TypeError) as error:
            entry.record = entry.head | {"error": str(error)}
        return entry

    def _write(self, pending: deque[_Entry]) -> list[Record]:
        """Write the records that nothing earlier holds back."""
        records: list[Record] = []
        while pending and (record := pending[0].record) is not None:
            pending.popleft()
            records.append(record)
            self._count(record)
        self._journal.append(records)
        return records

    def close(self) -> None:
        self._journal.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()


def load_object(content: bytes) -> dict[str, Any]:
    """The JSON object of a line; ValueError if it is none."""
    try:
        value = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"not JSON: {error}") from None
    if not isinstance(value, dict):
        raise ValueError(f"must be a JSON object, got a {type(value).__name__}")
    return value


def parse_request(
    raw: Mapping[str, Any], defaults: Mapping[str, Any], llm: LLM
) -> tuple[Prompt, SamplingParams]:
    """Prompt and parameters of a line's object without its id; ValueError or TypeError if bad."""
    kinds = [key for key in PROMPT_KEYS if key in raw]
    if len(kinds) != 1:
        wanted = ", ".join(PROMPT_KEYS)
        raise ValueError(f"give one of {wanted}; got {' and '.join(kinds) or 'none of them'}")
    params = _sampling_params({key: value for key, value in raw.items() if key not in kinds})
    return _prompt(kinds[0], raw[kinds[0]], llm), SamplingParams(**{**defaults, **params})


def _sampling_params(raw: Mapping[str, Any]) -> dict[str, Any]:
    nested = raw.get("sampling_params", {})
    if not isinstance(nested, dict):
        raise TypeError(f"sampling_params must be an object, got {nested!r}")
    beside = {key: value for key, value in raw.items() if key != "sampling_params"}
    unknown = [key for key in (*beside, *nested) if key not in PARAM_KEYS]
    if unknown:
        valid = ", ".join(("id", *PROMPT_KEYS, "sampling_params", *PARAM_KEYS))
        raise ValueError(f"unknown key {', '.join(map(repr, unknown))}; the valid ones are {valid}")
    twice = sorted(beside.keys() & nested.keys())
    if twice:
        raise ValueError(f"{', '.join(twice)} given both in sampling_params and beside it")
    return beside | nested


def _prompt(kind: str, value: Any, llm: LLM) -> Prompt:
    if kind == "prompt":
        if not isinstance(value, str):
            raise TypeError(f"prompt must be a string, got {value!r}")
        return value
    if not isinstance(value, list):
        raise TypeError(f"{kind} must be a list, got {value!r}")
    if kind == "prompt_token_ids":
        return value
    return llm.apply_chat_template(value)


def sample_records(output: RequestOutput) -> list[Record]:
    """The samples of a finished request as JSON values; absent is what is None."""
    return [
        {key: value for key, value in asdict(sample).items() if value is not None}
        for sample in output.samples
    ]
