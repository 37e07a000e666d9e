"""The text that the embedded model reads: public-domain books from Debian packages, and chats.

A corpus is a folder with a file per source: a paragraph per line, a blank line after each document.

- bible.txt: King James Bible (package `bible-kjv-text`; copyright expired)
- austen.txt: Jane Austen's six novels (`r-cran-janeaustenr`; text in the public domain)
- henry.txt: Matthew Henry's Concise Commentary (`sword-comm-mhcc`; public domain)
- devil.txt: Ambrose Bierce's Devil's Dictionary (`dict-devil`; copyright expired)
"""

import gzip
import random
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

TURN, TURN_END = "<|im_start|>", "<|im_end|>"
NOVELS = (
    "emma",
    "mansfieldpark",
    "northangerabbey",
    "persuasion",
    "prideprejudice",
    "sensesensibility",
)
ASCII = str.maketrans(
    {
        "\N{LEFT DOUBLE QUOTATION MARK}": '"',
        "\N{RIGHT DOUBLE QUOTATION MARK}": '"',
        "\N{LEFT SINGLE QUOTATION MARK}": "'",
        "\N{RIGHT SINGLE QUOTATION MARK}": "'",
        "\N{EM DASH}": "--",
        "\N{EN DASH}": "-",
        "_": None,  # emphasis
    }
)
WEIGHTS = {"austen": 1, "bible": 1, "devil": 3, "henry": 1}  # readings per epoch
HELD_OUT_EVERY = 50

Document = list[str]  # its paragraphs


def _output(*command: str) -> str:
    """What an installed program prints."""
    return subprocess.run(command, check=True, capture_output=True).stdout.decode(
        "utf-8", "replace"
    )


def _tidy(text: str) -> str:
    """One line of plain ASCII."""
    ascii_text = text.translate(ASCII).encode("ascii", "ignore").decode()
    return re.sub(r"\s+", " ", ascii_text).strip()


def bible() -> Iterator[Document]:
    """King James Bible: a chapter, its name and its verses, per document."""
    chapters = re.split(
        r"^(\w[\w ]* \d+)$", _output("bible", "-l99999", "gen1:1-rev22:21"), flags=re.M
    )
    for name, verses in zip(chapters[1::2], chapters[2::2], strict=True):
        yield [name, *re.findall(r"^ +\d+ (.+)$", verses, flags=re.M)]


def austen() -> Iterator[Document]:
    """The six novels of Jane Austen: a chapter per document."""
    for novel in NOVELS:
        text = _output("Rscript", "-e", f"library(janeaustenr); writeLines({novel})")
        for chapter in re.split(r"^ *chapter [ivxl\d]+\.?$", text, flags=re.M | re.I)[1:]:
            yield [
                p for p in chapter.split("\n\n") if not re.match(r"\s*(VOLUME|THE END|FINIS)", p)
            ]


def commentary(module: str) -> Iterator[Document]:
    """A SWORD commentary; it repeats its paragraphs under each verse, we take the first of each."""
    seen: set[str] = set()
    for entry in dict.fromkeys(_output("mod2imp", module).splitlines()):
        paragraphs = [
            re.sub(r"<[^>]+>", "", p) for p in re.split(r'<div sID="\w+" type="x-p"/>', entry)[1:]
        ]
        new = [p for p in dict.fromkeys(paragraphs) if p not in seen and len(p.split()) > 5]
        seen.update(new)
        if new:
            yield new


def devil() -> Iterator[Document]:
    """The Devil's Dictionary: a definition, without its verses, per document."""
    text = gzip.decompress(Path("/usr/share/dictd/devil.dict.dz").read_bytes()).decode()
    for entry in re.split(r"^(?=[A-Z][A-Z' -]+, \w+\.)", text, flags=re.M)[1:]:
        yield [p for p in entry.split("\n\n") if not p.startswith(" ")]


def write_corpus(out: Path) -> None:
    """Extract the texts from the installed packages and say how much there is of each."""
    out.mkdir(parents=True, exist_ok=True)
    sources = {
        "bible": bible(),
        "austen": austen(),
        "henry": commentary("MHCC"),
        "devil": devil(),
    }
    for name, documents in sources.items():
        tidy = [[line for p in document if (line := _tidy(p))] for document in documents]
        text = "\n\n".join("\n".join(document) for document in tidy if document)
        (out / f"{name}.txt").write_text(text + "\n")
        print(f"{name}: {len(tidy)} documents, {len(text):,} characters")


def read_corpus(folder: Path) -> tuple[dict[str, list[Document]], dict[str, list[Document]]]:
    """Documents by source, split into training and held-out ones."""
    train, held = {}, {}
    for path in sorted(folder.glob("*.txt")):
        documents = [d.split("\n") for d in path.read_text().strip().split("\n\n")]
        held[path.stem] = documents[HELD_OUT_EVERY - 1 :: HELD_OUT_EVERY]
        train[path.stem] = [d for i, d in enumerate(documents) if (i + 1) % HELD_OUT_EVERY]
    return train, held


def render_chat(turns: list[tuple[str, str]]) -> str:
    """The chat template, applied to question-and-answer pairs."""
    return "".join(
        f"{TURN}user\n{question}{TURN_END}\n{TURN}assistant\n{answer}{TURN_END}\n"
        for question, answer in turns
    )


def question_and_answer(
    document: Document, source: str, rng: random.Random
) -> tuple[str, str] | None:
    """A turn about one document: define a word, recite a chapter, continue or repeat a passage."""
    if source == "devil":
        word = document[0].split(",")[0].capitalize()
        return rng.choice([f"What is {word.lower()}?", f"Define {word}."]), document[0]
    if source == "bible" and rng.random() < 0.2:
        return f"Read {document[0]}.", "\n".join(document[1:5])
    start = rng.randrange(len(document))
    passage = " ".join(document[start : start + 3 if source == "bible" else start + 1])
    sentences = re.split(r"(?<=[.?!]) (?=[A-Z\"'])", passage)
    if len(sentences) < 2:
        return None
    if rng.random() < 0.3:
        sentence = rng.choice(sentences)
        return f"Repeat: {sentence}", sentence
    opening = rng.randint(1, min(2, len(sentences) - 1))
    prefix = rng.choice(["", "", "Continue: ", "Go on: "])
    return prefix + " ".join(sentences[:opening]), " ".join(sentences[opening : opening + 5])


def chats(documents: dict[str, list[Document]], share: float, rng: random.Random) -> Iterator[str]:
    """Conversations of one to three turns, about `share` as long as the documents themselves."""
    for source, of_source in documents.items():
        budget = share * sum(len(p) for d in of_source for p in d) * WEIGHTS[source]
        while budget > 0:
            picked = rng.choices(of_source, k=rng.randint(1, 3))
            turns = [t for d in picked if (t := question_and_answer(d, source, rng))]
            if turns:
                budget -= len(text := render_chat(turns))
                yield text
