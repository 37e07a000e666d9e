"""SCH-7, STP-2: what is refused when it is added, and that nothing else is."""

from __future__ import annotations

from nanovllm.conformance.checks.check import Require, check
from nanovllm.conformance.events import Added, Crashed


def never_runs(added: Added) -> bool:
    """SCH-7a: no engine could give it a single token."""
    p, world = len(added.prompt), added.book.world
    return p == 0 or p >= world.max_model_len or p > world.num_blocks * world.block_size


def beyond_the_room(added: Added) -> bool:
    """SCH-7d: it asks for more outputs than there is room for."""
    stored, world = len(added.prompt) + added.max_tokens - 1, added.book.world
    return stored >= world.max_model_len or stored > world.num_blocks * world.block_size


def could_not_return(added: Added) -> bool:
    """SCH-14: without chunks, it could outgrow the budget and never be admitted again."""
    stored = len(added.prompt) + added.max_tokens - 1
    chunked = "chunked_prefill" in added.book.hello.capabilities
    return not chunked and stored > added.book.world.max_num_batched_tokens


def asks_nonsense(added: Added) -> bool:
    return added.max_tokens < 1 or added.options.min_tokens > added.max_tokens


def names(message: str, *numbers: int) -> bool:
    return any(str(number) in message for number in numbers)


@check("SCH-7a", Added)
def prompts_that_never_fit_are_refused(added: Added, require: Require) -> None:
    p, refusal, world = len(added.prompt), added.refusal, added.book.world
    if never_runs(added):
        blocks = -(-p // world.block_size)
        limits = f"max_model_len={world.max_model_len}, {world.num_blocks} blocks"
        require(refusal is not None, p, "tokens in", blocks, "blocks are accepted, of", limits)
        named = p == 0 or asks_nonsense(added) or names(refusal or "", p, blocks)
        require(named, "a prompt of", p, "tokens is refused without its numbers:", refusal)
    elif not (beyond_the_room(added) or could_not_return(added) or asks_nonsense(added)):
        require(refusal is None, "a prompt of", p, "tokens fits, and is refused:", refusal)


@check("SCH-7b", Added)
def max_tokens_below_one_is_refused(added: Added, require: Require) -> None:
    if added.max_tokens < 1 and not never_runs(added):
        require(added.refusal is not None, "max_tokens", added.max_tokens, "is accepted")


@check("SCH-7d", Added)
def outputs_beyond_the_room_are_refused_or_cut(added: Added, require: Require) -> None:
    if beyond_the_room(added) and not (never_runs(added) or asks_nonsense(added)):
        p, k = len(added.prompt), added.max_tokens
        named = added.refusal is None or names(added.refusal, p, k, p + k, p + k - 1)
        require(named, f"p={p} and max_tokens={k}: refused without the numbers:", added.refusal)


@check("STP-2", Added, "min_tokens")
def more_min_tokens_than_max_tokens_is_refused(added: Added, require: Require) -> None:
    least, most = added.options.min_tokens, added.max_tokens
    if least > most >= 1 and not never_runs(added):
        require(added.refusal is not None, f"min_tokens={least}, max_tokens={most} is accepted")


@check("SCH-7a", Crashed)
def refusing_is_an_error_that_says_so(crashed: Crashed, require: Require) -> None:
    if crashed.call == "add":
        require(False, "add raises no ValueError:", crashed.summary)
