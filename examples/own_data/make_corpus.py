"""Make a folder of mixed files, in place of your own: `python make_corpus.py FOLDER`.

Markdown, compressed JSON lines and Parquet, of Python's language reference and standard library.
"""

import gzip
import json
import os
import sys
from pathlib import Path
from pydoc_data.topics import topics

import pyarrow
import pyarrow.parquet

LIBRARY = Path(os.__file__).parent
PACKAGES = ("asyncio", "email", "http", "json", "logging", "multiprocessing", "unittest", "urllib")


def sources(pattern: str) -> list[str]:
    """Source files of the standard library."""
    return [path.read_text(errors="replace") for path in sorted(LIBRARY.glob(pattern))]


def main(folder: Path) -> None:
    reference = folder / "reference"
    reference.mkdir(parents=True, exist_ok=True)
    for name, text in topics.items():
        (reference / f"{name}.md").write_text(text)
    with gzip.open(folder / "modules.jsonl.gz", "wt") as file:
        for text in sources("*.py"):
            file.write(json.dumps({"text": text}) + "\n")
    packages = [text for name in PACKAGES for text in sources(f"{name}/*.py")]
    pyarrow.parquet.write_table(pyarrow.table({"text": packages}), folder / "packages.parquet")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
