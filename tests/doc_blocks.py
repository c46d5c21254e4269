"""Pages and their fenced blocks.

What a fenced block is for:
  ```bash   runs in a copy of the tree, with fewer and smaller training steps; as written in the
  longest tier
  ```sh     begins with a comment that says what it needs; its configuration, files and flags are
  checked
  ```text   right after a ```bash block: what that prints. `...` stands for omitted lines, `…` at
  the end of a line for its rest; a block with the title
            "for example" is not compared
  ```toml and ```python that begin with `# NAME`, or have it as title: files for the commands
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
NAV = re.findall(r": (\S+\.md)$", (ROOT / "mkdocs.yml").read_text(), re.M)
EXAMPLES = sorted(
    page for folder in ("examples", "benchmarks") for page in (ROOT / folder).rglob("README.md")
)
PAGES = [ROOT / "README.md", *EXAMPLES, *(ROOT / "docs" / name for name in NAV)]


@dataclass(frozen=True)
class Block:
    """A fenced block of a page."""

    page: str
    language: str
    title: str
    text: str
    prints: str | None = None
    """The ```text block right after it."""

    @property
    def lines(self) -> list[str]:
        """Its commands: without comments, and with continued lines joined."""
        joined = re.sub(r"\\\n\s*", " ", self.text)
        return [line for line in joined.splitlines() if line.strip() and not line.startswith("#")]

    @property
    def file(self) -> str | None:
        """The name of the file that it is, if it says so."""
        match = re.match(r"# ([\w-]+\.(?:toml|py))\n", self.text)
        return self.title or (match and match[1]) if self.language in ("toml", "python") else None


def read_blocks(page: Path) -> Iterator[Block]:
    fence = r'^```(\w*)(?: title="([^"\n]*)")?\n(.*?)^```\n'
    text = page.read_text()
    for match in re.finditer(fence, text, re.M | re.S):
        after = re.compile(r"\s*" + fence, re.M | re.S).match(text, match.end())
        prints = after[3] if after and after[1] == "text" and not after[2] else None
        name = str(page.relative_to(ROOT)) if page in EXAMPLES else page.name
        yield Block(name, match[1], match[2] or "", match[3], prints)


BLOCKS = [block for page in PAGES for block in read_blocks(page)]
RUN, CHECKED = ([b for b in BLOCKS if b.language == language] for language in ("bash", "sh"))


def workspace(folder: Path) -> Path:
    """A copy of the tree, with the files that the pages define."""
    folders = ["scripts", "benchmarks", "requirements", "torchtitan", "train_configs", "tests"]
    folders += ["docs", "examples"]
    for name in ("run_train.sh", *folders, "pyproject.toml", "constraints.txt", "README.md"):
        (folder / name).symlink_to(ROOT / name)
    for block in BLOCKS:
        if block.file:
            (folder / block.file).write_text(block.text)
    return folder
