"""`--require MARKER`: where a device must be, a skipped test is a failure."""

import pytest

TESTS = """
import pytest

@pytest.fixture
def device():
    pytest.skip("no device")

@pytest.mark.gpu
def test_skips_early(device): ...

@pytest.mark.gpu
def test_skips_late(): pytest.skip("too small")

@pytest.mark.gpu
def test_runs(): ...

@pytest.mark.gpu
@pytest.mark.xfail
def test_is_known_to_fail(): assert 0

def test_is_no_gpu_test(): pytest.skip("something else")
"""


@pytest.mark.parametrize(
    ("args", "outcomes"),
    [
        ((), {"passed": 1, "skipped": 3, "xfailed": 1}),
        (("--require", "perf"), {"passed": 1, "skipped": 3, "xfailed": 1}),
        (
            ("--require", "gpu"),
            {"passed": 1, "skipped": 1, "xfailed": 1, "failed": 1, "errors": 1},
        ),
    ],
    ids=["nothing", "others", "gpu"],
)
def test_a_required_suite_may_not_skip(pytester: pytest.Pytester, args, outcomes) -> None:
    pytester.makepyfile(TESTS)
    pytester.makeini("[pytest]\nmarkers = gpu")
    result = pytester.runpytest("-p", "gpu_host", *args)
    result.assert_outcomes(**outcomes)
    if "errors" in outcomes:
        result.stdout.fnmatch_lines(["*--require gpu: *no device*", "*--require gpu: *too small*"])
