"""Progress display in a notebook: bars, a table with a row per update, and the images of the last evaluation."""

import html
from pathlib import Path
from typing import Any

from IPython import display

from .progress import ShowingCallback, describe_rollout, evaluation_line, format_seconds, update_values

ROWS = 20  # the table shows the last ones
INTERVAL = 0.5  # seconds between redraws within an update


class NotebookCallback(ShowingCallback):
    """Callback that shows progress, reward, KL and time left, with the images of evaluations below.

    It must come after `SampleGridCallback`, which draws these images.
    """

    def begin(self, args):
        self.about, self.rows, self.evaluations = describe_rollout(args, self.total), [], []
        self.handle: Any = display.display(display.HTML(""), display_id=True)
        self.images: Any = None
        self.drawn = float("-inf")
        self._draw()

    def show_progress(self):
        if self.progress.done == 0 or self.clock() - self.drawn >= INTERVAL:
            self._draw()

    def show_update(self, step, logs):
        self.rows.append({"update": str(step), **update_values(logs)})
        self._draw()

    def show_evaluation(self, step, logs):
        self.evaluations.append(evaluation_line(step, logs, self.prompts))
        self._draw()

    def on_evaluate(self, args, state, control, metrics=None, **kwargs):
        grid = Path(args.output_dir) / "grid.png"
        if not state.is_world_process_zero or not grid.is_file():
            return
        image = display.Image(data=grid.read_bytes(), format="png")
        if self.total and self.images is not None:
            self.images.update(image)
        else:
            self.images = display.display(image, display_id=True)

    def end(self):
        self._draw()

    def _draw(self) -> None:
        self.drawn = self.clock()
        self.handle.update(display.HTML(self._page()))

    def _page(self) -> str:
        left = self.left
        time_left = "" if left is None or self.step >= self.total else f", {format_seconds(left)} left"
        parts = [f"<p>{html.escape(self.about)}</p>", _bar(self.step, self.total, f"updates{time_left}")]
        progress = self.progress
        if progress.stage is not None:
            parts.append(_bar(progress.done, progress.total, f"{progress.unit} of the {progress.stage}"))
        if self.rows:
            parts.append(_table(self.rows[-ROWS:]))
        parts += [f"<p>{html.escape(line)}</p>" for line in self.evaluations]
        return "\n".join(parts)


def _bar(done: int, total: int, text: str) -> str:
    return f'<div><progress value="{done}" max="{total}"></progress> {done} of {total} {html.escape(text)}</div>'


def _table(rows: list[dict[str, str]]) -> str:
    names = list(dict.fromkeys(name for row in rows for name in row))
    head = "".join(f"<th>{html.escape(name)}</th>" for name in names)
    body = ["".join(f"<td>{html.escape(row.get(name, ''))}</td>" for name in names) for row in rows]
    return f"<table><tr>{head}</tr>{''.join(f'<tr>{cells}</tr>' for cells in body)}</table>"
