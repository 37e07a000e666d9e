"""The tokenizer, as far as the engine needs one."""

from pathlib import Path
from typing import Any, Protocol

from transformers import AutoTokenizer


class Tokenizer(Protocol):
    """The part of a Hugging Face tokenizer that the engine uses."""

    eos_token_id: int | None

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]: ...

    def decode(self, token_ids: list[int], *, skip_special_tokens: bool) -> str: ...

    def apply_chat_template(
        self, conversation: Any, *, tokenize: bool, add_generation_prompt: bool
    ) -> str: ...


def load_tokenizer(path: str | Path) -> Tokenizer:
    """Tokenizer of a local checkpoint; ValueError if it has none."""
    try:
        tokenizer: Tokenizer = AutoTokenizer.from_pretrained(path, local_files_only=True)
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise ValueError(
            f"no tokenizer in {path} ({error}); pass skip_tokenizer=True to work with token ids"
        ) from error
    return tokenizer
