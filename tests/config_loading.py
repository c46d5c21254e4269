"""Loading a configuration from arguments: it, or its problems."""

import pytest

from torchtitan.config import load_config
from torchtitan.utils.errors import ConfigError


def load(*argv):
    return load_config(list(argv)).config


def problems(*argv):
    with pytest.raises(ConfigError) as error:
        load_config(list(argv))
    return error.value.problems
