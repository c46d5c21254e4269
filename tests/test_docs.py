"""Documents hold true: links lead somewhere, keys exist, examples are tested, the site builds."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.doc_blocks import BLOCKS, PAGES, ROOT, workspace
from torchtitan.config.load.compat import UNSUPPORTED
from torchtitan.config.load.decode import load_config
from torchtitan.config.load.keys import FIELDS
from torchtitan.models import all_families
from torchtitan.utils.assets import shipped_configs


def test_every_configuration_that_ships_is_listed():
    page = (ROOT / "docs/reference/command-line.md").read_text()
    assert [name for name in shipped_configs() if f"`{name}`" not in page] == []


@pytest.mark.parametrize(
    "name",
    ["README.md", "docs/index.md", "docs/start/from-hf-trainer.md", "mkdocs.yml", "pyproject.toml"],
)
def test_every_family_is_named_where_the_project_is_introduced(name):
    families = {re.match("[a-z]+", spec.name)[0] for spec in all_families()}
    text = (ROOT / name).read_text().lower()
    assert [family for family in families if family not in text] == []


def slugs(page: Path) -> set[str]:
    """Anchors of a page's headings."""
    headings = re.findall(
        r"^#+ (.*)$", re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.M | re.S), re.M
    )
    return {
        re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-") for heading in headings
    }


MORE = [
    ROOT / name for name in ("CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md", "tests/README.md")
]


@pytest.mark.parametrize("page", [*PAGES, *MORE], ids=lambda p: str(p.relative_to(ROOT)))
def test_links_lead_somewhere(page):
    for target, anchor in re.findall(r"\]\(([^)#\s]*)(?:#([^)]*))?\)", page.read_text()):
        if "://" in target:
            continue
        path = page.parent / target if target else page
        assert path.exists(), target
        assert not anchor or anchor in slugs(path), f"{target}#{anchor}"


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_keys_exist(page):
    """Every `section.key` that a page mentions is one."""
    sections = {key.split(".")[0] for key in FIELDS}
    text = page.read_text()
    for section, key in re.findall(r"[`\s-]([a-z_]+)\.([a-z_]+(?:\.[a-z_]+)?)[`\s=]", text):
        name = f"{section}.{key}"
        if (
            section in sections
            and not key.endswith((".py", "md", "json", "toml", "jsonl"))
            and key != "py"
        ):
            known = (
                name in FIELDS
                or name in UNSUPPORTED
                or any(f.startswith(name + ".") for f in FIELDS)
            )
            assert (
                known or name.startswith("model.overrides.") or key in ("safetensors", "stpes")
            ), name


def tracked() -> list[str]:
    command = ["git", "ls-files"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    return done.stdout.split()


@pytest.mark.parametrize("page", [*PAGES, *MORE], ids=lambda p: str(p.relative_to(ROOT)))
def test_source_files_exist(page):
    """Every file of code that a page names by its folder is one; in docs/internals, also those
    named alone. Elsewhere these may be the reader's.
    """
    files = [f"/{name}" for name in tracked()]
    named = re.findall(r"`([\w./-]+\.py)`", page.read_text())
    if page.parent.name != "internals":
        named = [name for name in named if "/" in name]
    assert [name for name in named if not any(f.endswith(f"/{name}") for f in files)] == []


def test_toml_blocks_are_legal(tmp_path, monkeypatch):
    monkeypatch.chdir(workspace(tmp_path))
    Path("70b.toml").write_text("")  # `plan --write` makes it
    found = 0
    for block in BLOCKS:
        if block.language == "toml":
            Path("example.toml").write_text(block.text)
            load_config(["--config", "example.toml"])
            found += 1
    assert found >= 10


WIDE = {"change-one-thing.md", "checkpointing.md", "init.md"}
"""Pages whose outputs are still wider."""


def test_shown_outputs_are_at_most_100_columns_wide():
    shown = [b for b in BLOCKS if b.language in ("", "text", "json") and b.page not in WIDE]
    assert [line for block in shown for line in block.text.splitlines() if len(line) > 100] == []


def test_example_is_the_tested_one():
    files = {file.stem: file for file in (ROOT / "tests/examples").glob("*.py")}
    files["gated_attention"] = ROOT / "tests/examples/gated_attention/__init__.py"
    del files["all_at_once"]  # of the tests alone
    assert len(files) == 12
    for name, file in files.items():
        (shown,) = (block for block in BLOCKS if block.file == f"{name}.py")
        assert shown.text == file.read_text(), name
    (shown,) = (
        block
        for block in BLOCKS
        if block.page == "adding-a-model.md" and block.language == "python"
    )
    assert shown.text == (ROOT / "torchtitan/models/families/smollm3.py").read_text()


def test_the_loop_in_the_readme_is_the_example():
    (shown,) = (b for b in BLOCKS if b.page == "README.md" and b.language == "python")
    example = (ROOT / "examples/loop.py").read_text()
    pieces = shown.text.split("    ...\n")
    assert len(pieces) == 3
    assert [piece for piece in pieces if piece not in example] == []


def test_site_builds(tmp_path):
    command = [
        sys.executable,
        "-m",
        "mkdocs",
        "build",
        "--strict",
        "--quiet",
        "--site-dir",
        str(tmp_path),
    ]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def test_nothing_of_this_machine_is_in_the_project():
    files = tracked()
    assert len(files) > 50
    for name in files:
        path = ROOT / name
        if path.is_file() and path.suffix in (".py", ".md", ".toml", ".sh", ".yml", ".cff", ""):
            assert "/" + "work/" not in path.read_text(errors="ignore"), name
