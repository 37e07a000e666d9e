"""`nanovllm chat`: memory, commands, failures, Ctrl-C."""

import signal
from pathlib import Path

import pytest
from cli_door import GREEDY, GREEDY_ARGS, POOL, POOL_ARGS, interrupt_after, invoke

from nanovllm import LLM, SamplingParams
from nanovllm.cli.chat import Conversation


@pytest.fixture(scope="module")
def llm(checkpoint: Path):
    with LLM(checkpoint, **POOL) as engine:
        yield engine


@pytest.fixture
def engine_args(checkpoint: Path) -> list[str]:
    return ["--model", str(checkpoint), *POOL_ARGS]


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def test_a_chat_through_a_pipe_remembers_and_resets(llm: LLM, engine_args: list[str]) -> None:
    typed = "hi\n\nhow are you\n/reset\nhi\n/exit\nnever read\n"
    result = invoke("chat", "--system", "Be brief.", *GREEDY_ARGS, *engine_args, stdin=typed)
    messages = [{"role": "system", "content": "Be brief."}]
    answers = []
    for text in ("hi", "how are you"):
        messages.append(user(text))
        answers.append(llm.chat(messages, GREEDY, use_tqdm=False)[0].text)
        messages.append({"role": "assistant", "content": answers[-1]})
    assert result.exit_code == 0
    assert result.stdout == f"{answers[0]}\n{answers[1]}\n{answers[0]}\n"
    assert result.stderr == ""


def test_the_end_of_the_input_leaves_the_chat(engine_args: list[str]) -> None:
    result = invoke("chat", *engine_args, stdin="/nonsense\n")
    assert result.exit_code == 0
    assert "/nonsense is no command" in result.stderr
    assert result.stdout == ""


def test_a_message_that_fails_is_reported_and_forgotten(engine_args: list[str], llm: LLM) -> None:
    typed = "hi\n" + "x" * 300 + "\nhow are you\n"
    result = invoke("chat", *GREEDY_ARGS, *engine_args, stdin=typed)
    without = invoke("chat", *GREEDY_ARGS, *engine_args, stdin="hi\nhow are you\n")
    assert result.exit_code == 1
    assert "the KV cache holds 256" in result.stderr
    assert "/reset" in result.stderr
    assert result.stdout == without.stdout


@pytest.mark.spec("SCH-15")
def test_a_failing_step_leaves_the_conversation_as_it_was(
    llm: LLM, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    conversation = Conversation(llm, GREEDY)
    conversation.answer("hi")
    before = list(conversation.messages)

    def fail(*_: object) -> None:
        raise RuntimeError("out of luck")

    monkeypatch.setattr(llm.model_runner, "run", fail)
    conversation.answer("and now")
    assert conversation.messages == before
    assert conversation.num_failed == 1
    assert "out of luck" in capsys.readouterr().err


@pytest.mark.spec("SCH-13")
def test_the_first_ctrl_c_stops_the_answer_and_keeps_what_was_printed(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    printed = interrupt_after(monkeypatch, [3])
    conversation = Conversation(llm, SamplingParams(max_tokens=None, ignore_eos=True, seed=1))
    conversation.answer("hi")
    assert printed.pop() == "\n"
    assert len(printed) == 3
    assert conversation.messages == [
        user("hi"),
        {"role": "assistant", "content": "".join(printed)},
    ]
    assert llm.is_finished()
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    conversation.answer("go on")
    assert len(conversation.messages) == 4


def test_the_second_ctrl_c_leaves(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    interrupt_after(monkeypatch, [2, 2])
    conversation = Conversation(llm, SamplingParams(max_tokens=None, ignore_eos=True, seed=1))
    with pytest.raises(KeyboardInterrupt):
        conversation.answer("hi")
    assert llm.is_finished()
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
