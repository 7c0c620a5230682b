"""Details that a user adds to a model card: the arguments of `create_model_card`, named as in transformers and TRL."""

import dataclasses
from pathlib import Path
from typing import Any

from huggingface_hub.utils import HFValidationError, validate_repo_id

from . import markdown
from .card_data import strip_folders


@dataclasses.dataclass(frozen=True)
class CardDetails:
    """Details of a model card in addition to those from the run. None or empty values leave the run's, if any.

    Attributes:
        title: the card's heading.
        datasets: Hub ids, which the metadata links, or other names of training datasets.
        dataset_names: names for them in the text, in place of their ids.
        tags: tags that follow those of this library.
        language: language codes such as "en".
        license: the Hub's name of a licence, in place of the base model's.
        base_model: Hub id of the base model.
        task: the Hub's name of a task, such as "text-to-image".
    """

    title: str | None = None
    datasets: tuple[str, ...] = ()
    dataset_names: tuple[str, ...] = ()
    tags: tuple[str, ...] = ()
    language: tuple[str, ...] = ()
    license: str | None = None
    base_model: str | None = None
    task: str | None = None

    def add(
        self,
        *,
        model_name: str | None = None,
        dataset_name: str | list[str] | None = None,
        tags: str | list[str] | None = None,
        language: str | list[str] | None = None,
        license: str | None = None,
        finetuned_from: str | None = None,
        tasks: str | list[str] | None = None,
        dataset_tags: str | list[str] | None = None,
        dataset: str | list[str] | None = None,
        dataset_args: str | list[str] | None = None,
    ) -> "CardDetails":
        """Return a copy in which the given details replace the present ones; see `Trainer.create_model_card`.

        Raises:
            ValueError: `dataset_args` is given, the base model is no Hub id, there are several tasks or licences, or a
                value is not text.
        """
        if dataset_args is not None:
            raise ValueError(
                f"dataset_args={dataset_args!r} cannot be shown on this card, whose table of rewards names the "
                "prompts; leave it out, or write it into `dataset`."
            )
        base = _read_text("finetuned_from", finetuned_from)
        if base is not None and not is_repo_id(base):
            raise ValueError(f"finetuned_from={finetuned_from!r} is not a model on the Hub; give its id, owner/name.")
        ids = _read_texts("dataset_name", dataset_name) + _read_texts("dataset_tags", dataset_tags)
        given: dict[str, Any] = {
            "title": _read_text("model_name", model_name),
            "datasets": tuple(dict.fromkeys(ids)),
            "dataset_names": _read_texts("dataset", dataset),
            "tags": _read_texts("tags", tags),
            "language": _read_texts("language", language),
            "license": _read_text("license", license),
            "base_model": base,
            "task": _read_text("tasks", tasks),
        }
        return dataclasses.replace(self, **{name: value for name, value in given.items() if value})

    def make_metadata(self) -> dict[str, Any]:
        """Return the fields of the card's header that these details set."""
        found = {
            "datasets": [name for name in self.datasets if is_repo_id(name)],
            "language": list(self.language),
            "license": self.license,
            "base_model": self.base_model,
            "pipeline_tag": self.task,
        }
        return {name: value for name, value in found.items() if value}

    def describe_datasets(self) -> list[str]:
        """Return a line that names the training datasets, with links; nothing if none was named."""
        links = [_link_dataset(name) for name in self.datasets]
        names = [markdown.escape(name) for name in self.dataset_names]
        if not links and not names:
            return []
        ids = f" ({', '.join(links)})" if links and names else ""
        return [f"The prompts are from {', '.join(names or links)}{ids}."]


def is_repo_id(name: str) -> bool:
    """Return whether a name is valid for a repository on the Hub, and is not an existing local path."""
    try:
        validate_repo_id(name)
    except HFValidationError:
        return False
    return not Path(name).exists()


def _link_dataset(name: str) -> str:
    shown = markdown.escape(strip_folders(name))
    return f"[{shown}](https://huggingface.co/datasets/{name})" if is_repo_id(name) else shown


def _read_texts(name: str, given: str | list[str] | None) -> tuple[str, ...]:
    """Return one text or several as a tuple.

    Raises:
        ValueError: something else was given.
    """
    texts = (given,) if isinstance(given, str) else () if given is None else given
    if not isinstance(texts, (list, tuple, set)) or not all(isinstance(text, str) for text in texts):
        raise ValueError(f"{name}={given!r} on a model card must be a text, or a list of texts.")
    return tuple(texts)


def _read_text(name: str, given: str | list[str] | None) -> str | None:
    """Return the one text that was given.

    Raises:
        ValueError: several were given, or something else.
    """
    texts = _read_texts(name, given)
    if len(texts) > 1:
        raise ValueError(f"{name}={given!r}: a model card takes only one; choose one.")
    return texts[0] if texts else None
