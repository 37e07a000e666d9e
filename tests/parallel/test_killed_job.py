"""`nanovllm generate --input` in a process that is killed."""

import json
import signal
import subprocess
import time
from pathlib import Path

from cli_door import POOL_ARGS, command, invoke


def test_a_killed_job_resumes_to_the_result_of_an_undisturbed_one(
    checkpoint: Path, tmp_path: Path
) -> None:
    source, target, undisturbed = (tmp_path / name for name in ("in", "out", "undisturbed"))
    requests = [{"prompt": f"line {i}", "max_tokens": 5 + 2 * i, "seed": i} for i in range(20)]
    # Nobody reads the complaint about the third line, so the job stands still in the middle of it.
    requests[2] = {"no such key " * 100_000: 1}
    source.write_text("".join(json.dumps(request) + "\n" for request in requests))
    args = ["generate", "--ignore-eos", "-i", source, "--model", checkpoint, *POOL_ARGS]

    with command(*args, "-o", target, stderr=subprocess.PIPE) as process:
        deadline = time.monotonic() + 60
        while not target.exists() or target.read_bytes().count(b"\n") < 3:
            assert process.poll() is None, "the job ended before it could be killed"
            assert time.monotonic() < deadline, "the job writes nothing"
            time.sleep(0.01)
        process.send_signal(signal.SIGKILL)
    assert process.returncode == -signal.SIGKILL
    num_whole = target.read_bytes().count(b"\n")
    assert 3 <= num_whole < 20

    with target.open("ab") as file:
        file.write(b'{"line": ')  # what a process killed while it writes leaves behind
    resumed = invoke(*args, "-o", target, "--json")
    assert json.loads(resumed.stdout)["num_resumed"] == num_whole
    assert json.loads(resumed.stdout)["num_failed"] == 1
    invoke(*args, "-o", undisturbed)
    assert target.read_bytes() == undisturbed.read_bytes()
    assert target.read_bytes().count(b"\n") == 20
