"""What can never run, and is therefore refused before it is queued (SCH-7)."""

from nanovllm.config import SchedulerConfig


def max_output_tokens(
    config: SchedulerConfig, num_prompt_tokens: int, max_tokens: int | None
) -> int:
    """Output tokens that a request may take, at most `max_tokens`; None means to the end.

    `max_tokens` beyond `max_model_len` is capped, beyond the pool it is refused (SCH-7d).

    Raises ValueError, with the numbers, for an empty prompt, one that leaves no room for an output
    in `max_model_len`, and a request that the whole KV cache could not hold.
    """
    if num_prompt_tokens < 1:
        raise ValueError("the prompt is empty: it has 0 tokens")
    if num_prompt_tokens >= config.max_model_len:
        raise ValueError(
            f"the prompt has {num_prompt_tokens} tokens; max_model_len is {config.max_model_len}, "
            "prompt and output together"
        )
    num_slots = config.num_kvcache_blocks * config.kvcache_block_size
    pool = (
        f"the KV cache holds {num_slots} "
        f"({config.num_kvcache_blocks} blocks of {config.kvcache_block_size})"
    )
    if num_prompt_tokens > num_slots:
        raise ValueError(f"the prompt has {num_prompt_tokens} tokens; {pool}")
    to_the_end = config.max_model_len - num_prompt_tokens
    # The last sampled token is never stored, hence one output more than there are slots.
    storable = num_slots - num_prompt_tokens + 1
    if max_tokens is None:
        return min(to_the_end, storable)
    wanted = min(max_tokens, to_the_end)
    if wanted > storable:
        raise ValueError(
            f"{num_prompt_tokens} prompt tokens and max_tokens={max_tokens} need "
            f"{num_prompt_tokens + wanted - 1} slots; {pool}"
        )
    return wanted
