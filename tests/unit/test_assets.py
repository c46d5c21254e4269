"""Shipped files are found from any folder, after the user's own."""

from pathlib import Path

import pytest

from torchtitan.config import load_config
from torchtitan.utils.assets import CHECKOUT, find_asset, find_config, shipped_configs

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def elsewhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def test_shipped_files_are_found_by_path_and_configurations_by_bare_name():
    assert ROOT == CHECKOUT
    assert find_asset("./tests/assets/tokenizer") == ROOT / "tests/assets/tokenizer"
    expected = ROOT / "train_configs/llama3_8b.toml"
    assert find_config("llama3_8b") == find_config("train_configs/llama3_8b.toml") == expected
    assert set(shipped_configs()) == {path.stem for path in (ROOT / "train_configs").iterdir()}


def test_a_file_of_ones_own_wins(tmp_path):
    own = tmp_path / "train_configs/llama3_8b.toml"
    own.parent.mkdir()
    own.touch()
    assert find_config("train_configs/llama3_8b.toml").resolve() == own


@pytest.mark.parametrize("missing", ["llama3_9b", "no.toml", "llama3_8b.toml"])
def test_a_missing_file_keeps_its_name(missing):
    assert find_config(missing) == find_asset(missing) == Path(missing)


@pytest.mark.parametrize("base", ["train_configs/llama3_8b.toml", "llama3_8b"])
def test_a_shipped_configuration_can_be_extended(tmp_path, base):
    path = tmp_path / "my.toml"
    path.write_text(f'extends = "{base}"\n[training]\nsteps = 7\n')
    config = load_config(["--config", str(path)]).config
    assert (config.model.flavor, config.training.steps) == ("8B", 7)


def test_what_is_extended_is_looked_for_beside_the_file_first(tmp_path):
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub/base.toml").write_text("[training]\nsteps = 8\n")
    path = tmp_path / "sub/my.toml"
    path.write_text('extends = "base.toml"\n')
    assert load_config(["--config", str(path)]).config.training.steps == 8
