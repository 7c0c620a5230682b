"""Files of settings."""

import functools

import pytest
from command_line import write_config


@pytest.fixture
def config_file(tmp_path):
    """Writes the YAML file of a run with some keys changed, and returns its path."""
    return functools.partial(write_config, tmp_path)
