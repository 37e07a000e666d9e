"""`nanovllm conformance init`: the adapter to start from."""

from __future__ import annotations

from pathlib import Path

TEMPLATE = Path(__file__).parent / "adapters" / "template.py"


def write_template(target: Path) -> None:
    """Write the commented adapter to `target`; FileExistsError if there is a file already."""
    text = TEMPLATE.read_text(encoding="utf-8").replace("FILE:", f"{target}:")
    with target.open("x", encoding="utf-8") as file:
        file.write(text)
