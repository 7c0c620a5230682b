"""A saved pipeline, and a check that no model is loaded."""

import diffusers
import pytest
from tiny_pipelines import build


@pytest.fixture
def no_model(monkeypatch):
    """Fails the test where a model is loaded."""

    def fail(*args, **kwargs):
        raise AssertionError("a model was loaded before the refusal")

    monkeypatch.setattr(diffusers.DiffusionPipeline, "from_pretrained", fail)


@pytest.fixture(scope="session")
def model(tmp_path_factory):
    """The folder of a tiny pipeline."""
    folder = tmp_path_factory.mktemp("sd3")
    build("sd3")[0].save_pretrained(folder)
    return str(folder)
