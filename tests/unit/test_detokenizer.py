"""Incremental text: whole characters, stop strings, and the same text as decoding at once."""

import json
import pickle
from collections.abc import Sequence
from dataclasses import asdict

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE

from nanovllm.engine.detokenizer import Detokenizer
from nanovllm.sampling_params import SamplingParams

few = settings(max_examples=150, deadline=None, derandomize=True)


class PieceTokenizer:
    """Token i is the text `pieces[i]`; ids in `special` are skipped. Counts what it decodes."""

    def __init__(self, pieces: Sequence[str], special: Sequence[int] = ()) -> None:
        self.pieces = pieces
        self.special = special
        self.longest = 0

    def decode(self, token_ids: list[int], *, skip_special_tokens: bool) -> str:
        self.longest = max(self.longest, len(token_ids))
        skipped = self.special if skip_special_tokens else ()
        return "".join(self.pieces[i] for i in token_ids if i not in skipped)


class ByteTokenizer:
    """Token i is byte i; id 256 is special."""

    def __init__(self) -> None:
        self.longest = 0

    def decode(self, token_ids: list[int], *, skip_special_tokens: bool) -> str:
        self.longest = max(self.longest, len(token_ids))
        return bytes(i for i in token_ids if i < 256).decode(errors="replace")


def stream(detokenizer: Detokenizer, token_ids: Sequence[int]) -> list[str]:
    """Deltas of each token and of the end; pushing stops at a stop string."""
    deltas = []
    for token_id in token_ids:
        deltas.append(detokenizer.push(token_id))
        if detokenizer.stopped:
            break
    return [*deltas, detokenizer.finish()]


def pieces_stream(pieces: Sequence[str], **params: object) -> tuple[Detokenizer, list[str]]:
    detokenizer = Detokenizer(PieceTokenizer(pieces), SamplingParams(**params))
    return detokenizer, stream(detokenizer, range(len(pieces)))


# --- stop strings ---


@pytest.mark.spec("STP-3a", "STP-3b")
@pytest.mark.parametrize(
    ("stop", "include_stop", "text"),
    [
        ("DE", False, "A"),
        ("FG", False, "ADE"),
        ("ADEFGH", False, ""),
        ("DE", True, "ADE"),
        ("FG", True, "ADEFG"),
        ("ADEFGH", True, "ADEFGH"),
        (["GH", "EF"], False, "AD"),
        (["EF", "DEFG"], False, "AD"),
        (["F", "DEF", "EF"], False, "A"),
    ],
)
def test_b73_stop_inside_or_across_tokens(
    stop: str | list[str], include_stop: bool, text: str
) -> None:
    detokenizer, deltas = pieces_stream(["A", "DEF", "GH"], stop=stop, include_stop=include_stop)
    assert detokenizer.stopped
    assert detokenizer.text == text == "".join(deltas)


@pytest.mark.spec("STP-3c")
def test_b74_the_start_of_a_stop_string_is_held_back() -> None:
    detokenizer, deltas = pieces_stream(["ABC", "DEF", "G", "HI", "J"], stop="DEFGHIJ")
    assert deltas == ["ABC", "", "", "", "", ""]
    assert detokenizer.stopped


@pytest.mark.spec("STP-3c", "STP-4")
def test_held_text_is_released_when_it_cannot_match_any_more() -> None:
    _, deltas = pieces_stream(["xa", "b", "a", "b", "d"], stop="abac")
    assert deltas == ["x", "", "", "ab", "abd", ""]


@pytest.mark.spec("STP-4")
def test_held_text_is_released_at_the_end() -> None:
    detokenizer, deltas = pieces_stream(["one E", "N"], stop="END")
    assert deltas == ["one ", "", "EN"]
    assert not detokenizer.stopped
    assert detokenizer.finish() == ""


@pytest.mark.spec("STP-2")
def test_stop_strings_are_ignored_before_min_tokens() -> None:
    pieces = ["a.", "b.", "c", ".", "d"]
    for min_tokens, text in ((0, "a"), (1, "a"), (2, "a.b"), (3, "a.b.c"), (4, "a.b.c")):
        detokenizer, deltas = pieces_stream(pieces, stop=".", min_tokens=min_tokens)
        assert detokenizer.text == text == "".join(deltas)


@pytest.mark.spec("STP-2", "STP-3a")
def test_a_stop_string_counts_if_its_last_token_reaches_min_tokens() -> None:
    detokenizer, _ = pieces_stream(["x", "EN", "D"], stop="END", min_tokens=3)
    assert detokenizer.stopped
    assert detokenizer.text == "x"


@pytest.mark.spec("STP-2")
@pytest.mark.parametrize(
    "copy",
    [
        lambda params: pickle.loads(pickle.dumps(params)),
        lambda params: SamplingParams(**json.loads(json.dumps(asdict(params)))),
    ],
)
def test_b82_stopping_survives_serialisation(copy) -> None:
    params = copy(SamplingParams(stop=["END"], min_tokens=3, include_stop=True))
    detokenizer = Detokenizer(PieceTokenizer(["END"]), params)
    assert stream(detokenizer, [0] * 9) == ["END", "END", "END", ""]


@pytest.mark.spec("SCH-12c")
def test_a_token_that_ends_the_request_is_no_text() -> None:
    params = SamplingParams(stop_token_ids=[1], stop="yes")
    detokenizer = Detokenizer(PieceTokenizer(["y", "es"]), params, params.end_token_ids([7]))
    assert stream(detokenizer, [0, 1]) == ["", "", "y"]
    assert not detokenizer.stopped


def first_stop(text: str, stops: Sequence[str]) -> str | None:
    """What stays before the stop string that is complete first, reading character by character."""
    for end in range(len(text) + 1):
        ending = [stop for stop in stops if text[:end].endswith(stop)]
        if ending:
            return text[: end - max(map(len, ending))]
    return None


@pytest.mark.spec("STP-3a", "STP-3b", "STP-3c", "STP-4")
@few
@given(
    pieces=st.lists(st.text("ab", max_size=4), max_size=12),
    stops=st.lists(st.text("ab", min_size=1, max_size=5), max_size=3),
)
def test_token_borders_do_not_change_the_text(pieces: list[str], stops: list[str]) -> None:
    detokenizer, deltas = pieces_stream(pieces, stop=stops)
    whole = "".join(pieces)
    cut = first_stop(whole, stops)
    assert detokenizer.stopped == (cut is not None)
    assert "".join(deltas) == detokenizer.text == (whole if cut is None else cut)


# --- characters ---


@pytest.mark.spec("STP-4")
def test_b76_a_character_appears_with_its_last_byte() -> None:
    text = "aé漢🙂b"
    deltas = stream(Detokenizer(ByteTokenizer(), SamplingParams()), text.encode())
    expected = [piece for c in text for piece in [""] * (len(c.encode()) - 1) + [c]]
    assert deltas == [*expected, ""]


@pytest.mark.spec("STP-4")
def test_an_end_inside_a_character_releases_what_is_there() -> None:
    deltas = stream(Detokenizer(ByteTokenizer(), SamplingParams()), "b漢".encode()[:-1])
    assert deltas == ["b", "", "", "\ufffd"]


@pytest.mark.spec("STP-4")
def test_text_before_an_incomplete_character_is_not_held() -> None:
    pieces = [b"ab\xe6", b"\xbc", b"\xa2c"]

    class ChunkTokenizer:
        def decode(self, token_ids: list[int], *, skip_special_tokens: bool) -> str:
            return b"".join(pieces[i] for i in token_ids).decode(errors="replace")

    deltas = stream(Detokenizer(ChunkTokenizer(), SamplingParams()), range(3))
    assert deltas == ["ab", "", "漢c", ""]


@pytest.mark.spec("STP-3a", "STP-4")
def test_a_stop_string_of_split_characters() -> None:
    detokenizer = Detokenizer(ByteTokenizer(), SamplingParams(stop="🙂é"))
    assert "".join(stream(detokenizer, "漢🙂🙂é!".encode())) == "漢🙂"
    assert detokenizer.stopped


@pytest.mark.spec("STP-4")
def test_special_tokens_are_skipped_even_inside_a_character() -> None:
    first, *rest = "漢".encode()
    deltas = stream(Detokenizer(ByteTokenizer(), SamplingParams()), [256, first, 256, *rest, 256])
    assert "".join(deltas) == "漢"


@pytest.mark.spec("STP-4")
@pytest.mark.parametrize(
    "token_ids",
    [
        [*"wörter und 漢字 ".encode()] * 30,
        [0xFF] * 500,
        [0xE6, 0xBC] * 250,
        [256] * 500,
        [97] + [256] * 500,
        [0xE6] + [256] * 500,
    ],
    ids=["text", "no UTF-8", "halves", "special", "special after text", "special in a character"],
)
def test_the_cost_of_a_token_does_not_grow(token_ids: list[int]) -> None:
    tokenizer = ByteTokenizer()
    deltas = stream(Detokenizer(tokenizer, SamplingParams()), token_ids)
    assert tokenizer.longest <= 33
    assert "".join(deltas) == tokenizer.decode(token_ids, skip_special_tokens=True)


# --- real tokenizers ---

_MIXED = "the naïve 漢字 of 🙂🙃 — fin. ".encode()


def byte_level_tokenizer() -> Tokenizer:
    """Byte-level BPE: every byte, every chunk of 2-5 bytes of a mixed text, two special tokens."""
    as_symbol = dict(zip(_byte_order(), _alphabet_order(), strict=True))
    chunks = [bytes([b]) for b in range(256)]
    chunks += sorted({_MIXED[i : i + n] for n in range(2, 6) for i in range(len(_MIXED) - n)})
    vocab = {"".join(as_symbol[b] for b in chunk): i for i, chunk in enumerate(chunks)}
    tokenizer = Tokenizer(BPE(vocab=vocab, merges=[]))
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|end|>", "<|user|>"])
    return tokenizer


def _byte_order() -> list[int]:
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    return printable + [b for b in range(256) if b not in printable]


def _alphabet_order() -> list[str]:
    """GPT-2's byte symbols in code point order: printable bytes as themselves, the rest after."""
    return sorted(pre_tokenizers.ByteLevel.alphabet())


BYTE_LEVEL = byte_level_tokenizer()


@pytest.mark.spec("STP-4")
@few
@given(st.lists(st.integers(0, BYTE_LEVEL.get_vocab_size() - 1), max_size=80))
def test_byte_level_pieces_concatenate_to_the_decoded_text(token_ids: list[int]) -> None:
    detokenizer = Detokenizer(BYTE_LEVEL, SamplingParams())
    text = BYTE_LEVEL.decode(token_ids, skip_special_tokens=True)
    delivered = ""
    for token_id in token_ids:
        delivered += detokenizer.push(token_id)
        assert text.startswith(delivered)
    assert delivered + detokenizer.finish() == text == detokenizer.text


@pytest.mark.spec("STP-4")
@few
@given(st.binary(max_size=60))
def test_random_bytes(data: bytes) -> None:
    deltas = stream(Detokenizer(BYTE_LEVEL, SamplingParams()), [*data])
    assert "".join(deltas) == data.decode(errors="replace")


def sentencepiece_tokenizer() -> Tokenizer:
    """Llama's decoder: a word mark is a space, bytes as <0xNN>, the first space is dropped."""
    pieces = ["<unk>", "▁", "▁▁", "▁hello", "▁wo", "rld", ",", "\n"]
    vocab = {piece: i for i, piece in enumerate([*pieces, *(f"<0x{b:02X}>" for b in range(256))])}
    tokenizer = Tokenizer(BPE(vocab=vocab, merges=[], unk_token="<unk>", byte_fallback=True))
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    tokenizer.add_special_tokens([AddedToken("</s>", special=True)])
    return tokenizer


SENTENCEPIECE = sentencepiece_tokenizer()
_CHARACTERS = [[8 + b for b in c.encode()] for c in "é漢🙂"]
_END = SENTENCEPIECE.token_to_id("</s>")


@pytest.mark.spec("STP-4")
@few
@given(
    st.lists(
        st.sampled_from([*([i] for i in range(1, 8)), *_CHARACTERS]), min_size=1, max_size=60
    ).map(lambda groups: [i for group in groups for i in group])
)
def test_spaces_and_byte_runs_of_a_sentencepiece_decoder(token_ids: list[int]) -> None:
    deltas = stream(Detokenizer(SENTENCEPIECE, SamplingParams()), [*token_ids, _END])
    assert "".join(deltas) == SENTENCEPIECE.decode(token_ids)
    assert "\ufffd" not in "".join(deltas)


@pytest.mark.spec("STP-4")
def test_a_decoder_that_strips_all_leading_space() -> None:
    class StrippingTokenizer(PieceTokenizer):
        def decode(self, token_ids: list[int], *, skip_special_tokens: bool) -> str:
            return super().decode(token_ids, skip_special_tokens=skip_special_tokens).lstrip()

    tokenizer = StrippingTokenizer(["a", " ", "b"])
    deltas = stream(Detokenizer(tokenizer, SamplingParams()), [1, 0, 1, 1, 1, 2, 1, 0])
    assert "".join(deltas) == "a   b a"
