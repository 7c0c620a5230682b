"""Draw the diagrams of docs/how_it_works.md: `python docs/diagrams.py` writes docs/images/how_*.svg."""

import statistics
from html import escape
from pathlib import Path

IMAGES = Path(__file__).parent / "images"
INK, PALE, BLUE, ORANGE = "#24292f", "#f3f4f6", "#dbeafe", "#fed7aa"
REWARDS = (3.2, 4.1, 3.8, 2.9, 4.3, 3.5, 3.0, 3.7)


class Drawing:
    """Collects the shapes of one diagram, on a white card that is readable in a dark theme too."""

    def __init__(self, width: int, height: int):
        self.size, self.shapes = (width, height), []

    def text(self, x: float, y: float, words: str, size: int = 13, anchor: str = "middle", weight: str = "normal"):
        style = f'font-size="{size}" text-anchor="{anchor}" font-weight="{weight}"'
        self.shapes.append(f'<text x="{x:g}" y="{y:g}" {style}>{escape(words)}</text>')

    def box(self, x: float, y: float, width: float, height: float, *lines: str, fill: str = PALE):
        self.shapes.append(
            f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="6" fill="{fill}" stroke="{INK}"/>'
        )
        top = y + height / 2 - 8.5 * (len(lines) - 1) + 4.5
        for number, line in enumerate(lines):
            first = number == 0 and len(lines) > 1
            self.text(
                x + width / 2, top + 17 * number, line, 13 if first else 12, weight="bold" if first else "normal"
            )

    def line(self, *points: tuple[float, float], arrow: bool = True, dashed: bool = False):
        path = " ".join(f"{x:g},{y:g}" for x, y in points)
        style = ' marker-end="url(#arrow)"' * arrow + ' stroke-dasharray="4 3"' * dashed
        self.shapes.append(f'<polyline points="{path}" fill="none" stroke="{INK}"{style}/>')

    def dot(self, x: float, y: float, fill: str = PALE):
        self.shapes.append(f'<circle cx="{x:g}" cy="{y:g}" r="7" fill="{fill}" stroke="{INK}"/>')

    def bar(self, x: float, base: float, height: float, fill: str):
        top = min(base, base - height)
        self.shapes.append(
            f'<rect x="{x:g}" y="{top:g}" width="34" height="{abs(height):g}" fill="{fill}" stroke="{INK}"/>'
        )

    def write(self, name: str, title: str) -> None:
        width, height = self.size
        head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" role="img"'
        head += f' font-family="sans-serif" fill="{INK}"><title>{escape(title)}</title>'
        head += '<defs><marker id="arrow" viewBox="0 0 8 8" refX="8" refY="4" markerWidth="8" markerHeight="8"'
        head += f' orient="auto"><path d="M0 0 8 4 0 8z" fill="{INK}"/></marker></defs>'
        head += f'<rect width="{width}" height="{height}" rx="8" fill="#ffffff"/>'
        (IMAGES / f"how_{name}.svg").write_text("\n".join([head, *self.shapes, "</svg>"]) + "\n", encoding="utf-8")


def draw_loop() -> None:
    drawing = Drawing(720, 140)
    parts = ("prompts", "each × group size"), ("rollout", "samples"), ("rewards", "a number each")
    parts += ("advantages", "within the group"), ("update", "replay, loss")
    for number, (name, note) in enumerate(parts):
        fill = ORANGE if name == "update" else BLUE if name == "rollout" else PALE
        drawing.box(12 + 142 * number, 20, 128, 56, name, note, fill=fill)
        if number:
            drawing.line((12 + 142 * number - 14, 48), (12 + 142 * number, 48))
    drawing.line((644, 76), (644, 118), (218, 118), (218, 77))
    drawing.text(431, 110, "the new weights make the next rollout")
    drawing.write("loop", "prompts, rollout, rewards, advantages, update, and again")


def draw_rollout() -> None:
    drawing = Drawing(720, 210)
    drawing.box(12, 80, 92, 44, "prompt", "encoded once")
    drawing.line((104, 102), (132, 102))
    xs = [140 + 84 * step for step in range(6)]
    drawing.text(xs[0], 80, "initial latent", 12)
    drawing.text((xs[0] + xs[1]) / 2, 126, "shared calls", 12)
    drawing.text(xs[1] - 20, 24, "trained step: each sample", 12)
    drawing.text(xs[1] - 20, 40, "draws noise of its own", 12)
    drawing.text((xs[3] + xs[4]) / 2, 196, "steps without noise", 12)
    drawing.line((xs[0], 102), (xs[1] - 8, 102))
    for y in (48, 84, 120, 156):
        drawing.line((xs[1], 102), (xs[2] - 8, y))
        for step in range(2, 5):
            drawing.line((xs[step], y), (xs[step + 1] - 8, y))
            drawing.dot(xs[step], y, ORANGE if step == 2 else PALE)
        drawing.box(xs[5] - 8, y - 13, 60, 26, "sample", fill=BLUE)
    drawing.dot(xs[0], 102)
    drawing.dot(xs[1], 102, ORANGE)
    drawing.line((xs[5] + 52, 102), (xs[5] + 84, 102))
    drawing.text(xs[5] + 112, 98, "to the", 12)
    drawing.text(xs[5] + 112, 114, "rewards", 12)
    drawing.write("rollout", "samples of a prompt share their first steps, and part at the trained step")


def draw_reward() -> None:
    drawing = Drawing(720, 140)
    drawing.box(12, 50, 130, 50, "sample, prompt", "other columns")
    for y, name, score, weight in ((14, "text", "0.90", "0.7"), (86, "color", "0.50", "0.3")):
        drawing.line((142, 75), (196, y + 25))
        drawing.box(196, y, 150, 50, name, "a function or a network")
        drawing.line((346, y + 25), (396, y + 25))
        drawing.text(420, y + 30, score)
        drawing.text(470, y + 30, f"× {weight}")
        drawing.line((495, y + 25), (550, 75))
    drawing.box(550, 50, 150, 50, "reward 0.78", "0.7 · 0.90 + 0.3 · 0.50")
    drawing.write("reward", "each reward scores a sample, and the weighted scores are added")


def draw_advantage() -> None:
    mean, std = statistics.mean(REWARDS), statistics.stdev(REWARDS)
    drawing = Drawing(720, 210)
    for number, reward in enumerate(REWARDS):
        x, advantage = 100 + 58 * number, (reward - mean) / std
        drawing.bar(x, 110, 45 * advantage, BLUE if advantage > 0 else ORANGE)
        drawing.text(x + 17, 198, f"{reward:.1f}")
        drawing.text(x + 17, 110 - 45 * advantage + (-5 if advantage > 0 else 14), f"{advantage:+.2f}", 11)
    drawing.line((92, 110), (570, 110), arrow=False)
    drawing.text(12, 198, "reward", anchor="start")
    drawing.text(12, 114, "advantage", anchor="start")
    for y, words in ((92, f"mean {mean:.4f}"), (110, "standard"), (127, f"deviation {std:.4f}")):
        drawing.text(582, y, words, 12, "start")
    drawing.write("advantage", "advantages of eight samples: reward minus mean, divided by the standard deviation")


def draw_selection() -> None:
    drawing = Drawing(720, 190)
    order = sorted(REWARDS)
    for number, reward in enumerate(REWARDS):
        chosen = BLUE if reward in order[-2:] else ORANGE if reward in order[:2] else PALE
        drawing.bar(100 + 58 * number, 140, 28 * (reward - 1), chosen)
        drawing.text(117 + 58 * number, 160, f"{reward:.1f}")
    drawing.text(12, 160, "reward", anchor="start")
    drawing.text(
        340, 182, "best_of_n: 4 trains on the two best (blue) and the two worst (orange) samples of a group", 12
    )
    drawing.write("selection", "of eight samples, the two best and the two worst are trained on")


def draw_update() -> None:
    drawing = Drawing(720, 190)
    drawing.box(12, 20, 126, 50, "recorded step", "latent before, after")
    drawing.line((138, 45), (166, 45))
    drawing.box(166, 20, 126, 50, "network", "with gradient", fill=ORANGE)
    drawing.line((292, 45), (320, 45))
    drawing.box(320, 20, 120, 50, "log p", "of the same step")
    drawing.line((440, 45), (468, 45))
    drawing.box(468, 20, 92, 50, "ratio ρ", "p / p_old")
    drawing.line((560, 45), (588, 45))
    drawing.box(588, 20, 120, 50, "loss", "−A · ρ, clipped")
    drawing.box(320, 116, 120, 50, "log p_old", "from the rollout")
    drawing.line((440, 141), (514, 141), (514, 71))
    drawing.box(588, 116, 120, 50, "advantage A", "of the sample")
    drawing.line((648, 116), (648, 71))
    drawing.line((608, 70), (608, 92), (229, 92), (229, 71), dashed=True)
    drawing.text(250, 108, "backward", 12)
    drawing.write("update", "a recorded step is replayed with gradient, and its ratio is weighted by the advantage")


if __name__ == "__main__":
    for draw in (draw_loop, draw_rollout, draw_reward, draw_advantage, draw_selection, draw_update):
        draw()
