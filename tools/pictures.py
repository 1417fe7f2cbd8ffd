"""Draws how data flows through each architecture: docs/pictures/ARCHITECTURE.svg.

    python tools/pictures.py

The ground is light, so that a picture can be read on light and dark pages.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parents[1] / 'docs' / 'pictures'
GROUND, LINE, TEXT = '#f7f7f5', '#5f6b76', '#1d252c'
COLORS = {  # function of a box -> its colour
  'environments': '#cfe8d5',
  'acting': '#cfdff5',
  'learning': '#f6ddc2',
  'storage': '#e3d7ef',
}


@dataclasses.dataclass(frozen=True)
class Box:
  """A part of an architecture."""

  text: str
  x: float  # of its middle
  y: float
  kind: str
  width: float = 2.4
  height: float = 1.0


@dataclasses.dataclass(frozen=True)
class Arrow:
  """An arrow from one place to another."""

  start: tuple[float, float]
  end: tuple[float, float]
  text: str = ''
  at: tuple[float, float] | None = None  # of the text; None: the middle
  bend: float = 0.0
  side: str = 'center'  # of the text: left, center or right


@dataclasses.dataclass(frozen=True)
class Frame:
  """A machine, a process or a program around boxes."""

  text: str
  x: float  # of its lower left corner
  y: float
  width: float
  height: float


@dataclasses.dataclass(frozen=True)
class Picture:
  """All of it; one unit is about a centimetre."""

  width: float
  height: float
  parts: tuple[Box | Arrow | Frame, ...]


ANAKIN = Picture(
  11,
  5.6,
  (
    Frame('one compiled program, on every device', 0.3, 0.3, 10.4, 4.9),
    Box('environments\nin JAX', 2, 3.2, 'environments'),
    Box('act', 5.5, 3.2, 'acting', 1.8),
    Box('learn', 9, 3.2, 'learning', 1.8),
    Arrow((3.2, 3.45), (4.6, 3.45), 'timesteps', (3.9, 3.75)),
    Arrow((4.6, 2.95), (3.2, 2.95), 'actions', (3.9, 2.6)),
    Arrow((6.4, 3.2), (8.1, 3.2), 'trajectory', (7.25, 3.5)),
    Arrow((9, 2.7), (5.5, 2.7), 'parameters', (7.25, 1.72), bend=-0.35),
    Arrow((9.4, 0.3), (9.4, 2.7), 'gradients: the mean over all devices', (9.2, 0.9), side='right'),
  ),
)

SEBULBA = Picture(
  11,
  7.2,
  (
    Frame('the host', 0.3, 0.3, 3.4, 6.5),
    Box('environments\nof thread 0', 2, 5.2, 'environments'),
    Box('environments\nof thread 1', 2, 2.0, 'environments'),
    Frame('actor devices', 5.1, 0.3, 2.4, 6.5),
    Box('act', 6.3, 5.2, 'acting', 1.6),
    Box('act', 6.3, 2.0, 'acting', 1.6),
    Frame('learner devices', 8.2, 0.3, 2.5, 6.5),
    Box('learn', 9.45, 3.6, 'learning', 1.6, 1.4),
    *(
      arrow
      for y in (5.2, 2.0)
      for arrow in (
        Arrow((3.2, y + 0.25), (5.5, y + 0.25), 'observations', (4.4, y + 0.55)),
        Arrow((5.5, y - 0.25), (3.2, y - 0.25), 'actions', (4.4, y - 0.6)),
      )
    ),
    Arrow((7.1, 5.2), (9.1, 4.3), 'unrolls', (8.35, 5.1)),
    Arrow((7.1, 2.0), (9.1, 2.9), 'unrolls', (8.35, 2.05)),
    Arrow((8.65, 3.8), (6.5, 4.7), '', bend=0.1),
    Arrow((8.65, 3.4), (6.5, 2.5), 'parameters', (7.2, 3.6), bend=-0.1),
  ),
)


def turns(y: float, step: float, act: float, starts: dict[int, tuple[float, ...]]) -> list[Box]:
  """Returns the steps of groups, each followed by its inference, along the time axis."""
  boxes = []
  for group, times in starts.items():
    for x in times:
      name = f' {group}' if len(starts) > 1 else ''
      boxes.append(Box(f'step{name}', x + step / 2, y, 'environments', step - 0.06, 0.8))
      boxes.append(Box(f'act{name}', x + step + act / 2, y - 1.0, 'acting', act - 0.06, 0.8))
  return boxes


OVERLAP = Picture(
  11,
  7.0,
  (
    Frame('--actor-groups 1: environments and device wait for each other', 0.3, 3.9, 10.4, 2.8),
    *turns(5.6, 2.4, 1.2, {0: (0.6, 4.2)}),
    Box('step', 9.0, 5.6, 'environments', 2.34, 0.8),
    Frame('--actor-groups 2: one steps while the other is acted for', 0.3, 0.8, 10.4, 2.8),
    *turns(2.5, 1.2, 1.0, {0: (0.6, 3.0, 5.4, 7.8), 1: (1.8, 4.2, 6.6)}),
    Box('step 1', 9.6, 2.5, 'environments', 1.14, 0.8),
    Arrow((0.6, 0.4), (10.4, 0.4), 'time', (5.5, 0.4)),
  ),
)

SEED = Picture(
  11,
  7.2,
  (
    Frame('machine 1', 0.3, 3.8, 3.6, 3.0),
    Frame('machine 2', 0.3, 0.3, 3.6, 3.0),
    Box('podrace envs:\nenvironments', 2.1, 5.0, 'environments', 2.5, 1.1),
    Box('podrace envs:\nenvironments', 2.1, 1.5, 'environments', 2.5, 1.1),
    Frame('learner: podrace train', 5.5, 0.3, 5.2, 6.5),
    Box('slots, act\nin batches', 7.0, 3.4, 'acting', 2.2, 1.4),
    Box('learn', 9.6, 3.4, 'learning', 1.5, 1.4),
    Arrow((3.35, 5.2), (6.2, 4.2), 'observations', (4.75, 5.15)),
    Arrow((6.0, 3.75), (3.35, 4.7), 'actions', (4.7, 3.75)),
    Arrow((3.35, 1.3), (6.2, 2.6), 'observations', (4.75, 1.4)),
    Arrow((6.0, 3.05), (3.35, 1.8), 'actions', (4.7, 2.95)),
    Arrow((8.1, 3.65), (8.85, 3.65), 'unrolls', (8.5, 4.35)),
    Arrow((8.85, 3.15), (8.1, 3.15), 'parameters', (8.5, 2.45)),
  ),
)

DISTRIBUTED = Picture(
  11,
  7.6,
  (
    Frame('podrace act, share 0', 0.3, 4.2, 3.6, 3.0),
    Frame('podrace act, share 1', 0.3, 0.3, 3.6, 3.0),
    Box('environments\nand act', 2.1, 5.5, 'acting', 2.6, 1.2),
    Box('environments\nand act', 2.1, 1.6, 'acting', 2.6, 1.2),
    Frame('podrace replay', 5.0, 4.2, 5.7, 3.0),
    Box('tables of windows,\nor a queue of unrolls', 7.85, 5.5, 'storage', 3.8, 1.2),
    Frame('podrace train', 5.0, 0.3, 5.7, 3.0),
    Box('learn', 7.85, 1.6, 'learning', 2.2, 1.2),
    Arrow((3.4, 5.7), (5.95, 5.7), 'experience', (4.55, 6.05)),
    Arrow((3.4, 2.0), (5.95, 5.0), '', bend=0.0),
    Arrow((8.3, 4.9), (8.3, 2.2), 'samples', (8.4, 3.75), side='left'),
    Arrow((7.4, 2.2), (7.4, 4.9), 'priorities', (7.3, 3.75), side='right'),
    Arrow((6.75, 1.5), (3.4, 1.5), 'parameters', (5.1, 1.15)),
    Arrow((6.75, 2.0), (3.4, 5.0), ''),
  ),
)

PICTURES = {
  'anakin': ANAKIN,
  'sebulba': SEBULBA,
  'overlap': OVERLAP,
  'seed': SEED,
  'distributed': DISTRIBUTED,
}


def draw(picture: Picture, path: Path) -> None:
  """Writes an SVG; the same bytes for the same picture."""
  import matplotlib

  matplotlib.use('Agg')
  import matplotlib.pyplot as plt

  with matplotlib.rc_context({'svg.hashsalt': 'podrace', 'svg.fonttype': 'path'}):
    scale = 0.5
    figure = plt.figure(figsize=(picture.width * scale, picture.height * scale), facecolor=GROUND)
    axis = figure.add_axes((0, 0, 1, 1))
    axis.set(xlim=(0, picture.width), ylim=(0, picture.height))
    axis.axis('off')
    for part in picture.parts:
      DRAWERS[type(part)](axis, part)
    figure.savefig(path, format='svg', facecolor=GROUND, metadata={'Date': None})
    plt.close(figure)


def draw_box(axis: Any, box: Box) -> None:
  """A filled, rounded box with its text."""
  from matplotlib.patches import FancyBboxPatch

  left, low = box.x - box.width / 2, box.y - box.height / 2
  style = 'round,pad=0,rounding_size=0.12'
  axis.add_patch(
    FancyBboxPatch(
      (left, low), box.width, box.height, style, facecolor=COLORS[box.kind], edgecolor=LINE,
      linewidth=0.9, zorder=3,
    )
  )  # fmt: skip
  axis.text(box.x, box.y, box.text, ha='center', va='center', color=TEXT, fontsize=10, zorder=4)


def draw_frame(axis: Any, frame: Frame) -> None:
  """A dashed line around, with its name at the upper edge."""
  from matplotlib.patches import FancyBboxPatch

  style = 'round,pad=0,rounding_size=0.15'
  axis.add_patch(
    FancyBboxPatch(
      (frame.x, frame.y), frame.width, frame.height, style, facecolor='none', edgecolor=LINE,
      linewidth=0.9, linestyle=(0, (4, 3)), zorder=1,
    )
  )  # fmt: skip
  axis.text(
    frame.x + 0.15, frame.y + frame.height - 0.12, frame.text, ha='left', va='top',
    color=TEXT, fontsize=9, fontweight='bold', zorder=6,
    bbox=dict(facecolor=GROUND, edgecolor='none', pad=0.8),
  )  # fmt: skip


def draw_arrow(axis: Any, arrow: Arrow) -> None:
  """An arrow, with its text on the ground's colour."""
  axis.annotate(
    '',
    arrow.end,
    arrow.start,
    arrowprops=dict(
      arrowstyle='-|>', color=LINE, linewidth=1.2, shrinkA=0, shrinkB=0,
      connectionstyle=f'arc3,rad={arrow.bend}',
    ),
    zorder=2.5,
  )  # fmt: skip
  if arrow.text:
    (x0, y0), (x1, y1) = arrow.start, arrow.end
    x, y = arrow.at or ((x0 + x1) / 2, (y0 + y1) / 2)
    axis.text(
      x, y, arrow.text, ha=arrow.side, va='center', color=TEXT, fontsize=9, zorder=5,
      bbox=dict(facecolor=GROUND, edgecolor='none', pad=0.8),
    )  # fmt: skip


DRAWERS: dict[type, Any] = {Box: draw_box, Frame: draw_frame, Arrow: draw_arrow}


def main() -> None:
  """Draws all."""
  FOLDER.mkdir(exist_ok=True)
  for name, picture in PICTURES.items():
    draw(picture, FOLDER / f'{name}.svg')


if __name__ == '__main__':
  main()
