"""In a notebook a run shows a table of updates and the images of evaluations."""

import sys
from types import ModuleType, SimpleNamespace

import pytest
import transformers.trainer
from tiny_runs import trainer_for
from transformers import TrainerCallback


class Display:
    """A stand-in for `IPython.display`: keeps what each output shows last."""

    def __init__(self):
        self.outputs = []

    class HTML(SimpleNamespace):
        def __init__(self, data):
            super().__init__(data=data)

    class Image(SimpleNamespace):
        def __init__(self, data, format):
            super().__init__(data=data, format=format)

    def display(self, content, display_id):
        handle = SimpleNamespace(shown=[content])
        handle.update = handle.shown.append
        self.outputs.append(handle)
        return handle


@pytest.fixture
def notebook(monkeypatch):
    """A machine on which transformers believes that it is in a notebook."""

    class NotebookProgressCallback(TrainerCallback):
        def on_log(self, *args, **kwargs):
            raise AssertionError("transformers' table of losses is shown")

    fake = Display()
    module = ModuleType("IPython.display")
    module.display, module.HTML, module.Image = fake.display, fake.HTML, fake.Image
    package = ModuleType("IPython")
    package.display = module
    monkeypatch.setitem(sys.modules, "IPython", package)
    monkeypatch.setitem(sys.modules, "IPython.display", module)
    monkeypatch.delitem(sys.modules, "diffusion_grpo.training.notebook", raising=False)
    monkeypatch.setattr(transformers.trainer, "DEFAULT_PROGRESS_CALLBACK", NotebookProgressCallback)
    monkeypatch.setattr("diffusion_grpo.training.show_progress.is_in_notebook", lambda: True)
    yield fake
    sys.modules.pop("diffusion_grpo.training.notebook", None)


def test_a_notebook_shows_rewards_and_images(tmp_path, notebook, capsys):
    settings = {"eval_strategy": "steps", "eval_steps": 1, "eval_on_start": True, "beta": 0.1}
    trainer_for(tmp_path, **settings, disable_tqdm=False).train()
    table, images = notebook.outputs
    pages = [shown.data for shown in table.shown]
    for title in ("update", "reward", "KL", "grad norm", "s/update"):
        assert f"<th>{title}</th>" in pages[-1], title
    assert pages[-1].count("<tr>") == 3 and " ± " in pages[-1]  # titles and two updates
    assert "before training: held-out reward" in pages[-1] and "after 2 updates" in pages[-1]
    assert any("1 of 2 updates, " in page and " left" in page for page in pages)
    assert any("samples of the rollout" in page for page in pages)
    assert len(images.shown) == 3 and images.shown[-1].data == (tmp_path / "grid.png").read_bytes()
    assert "Training Loss" not in "".join(pages) and "update 1/2" not in capsys.readouterr().out
