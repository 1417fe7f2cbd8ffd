"""Pictures of observations without a display: images and grids as they are, numbers as bars."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from podrace.envs.spaces import leaves, seen, values

SMALLEST = 256  # least pixels of the longer side
# Colours of a grid's channels, distinguishable with colour blindness, as in
# podrace.experiments.plot.
PALETTE = np.array(
  [
    (0, 114, 178), (213, 94, 0), (0, 158, 115), (204, 121, 167), (230, 159, 0), (86, 180, 233),
    (240, 228, 66), (255, 255, 255),
  ],
  np.uint8,
)  # fmt: skip
GROUND, TRACK, ZERO, BAR, WORDS = (18,) * 3, (46,) * 3, (120,) * 3, (86, 180, 233), (235,) * 3
NAMED = 24  # most numbers that get a row with name and value; more become thin bars
BARRED = 1000  # most thin bars; more numbers become pixels, as no video is 16,384 pixels wide
NAME_WIDTH, BAR_WIDTH, VALUE_WIDTH = 64, 176, 80  # pixels of a row


@dataclasses.dataclass(frozen=True)
class NumericObservation:
  """An observation without an image. Its bars depend on the whole episode: see `draw_numbers`."""

  names: tuple[str, ...]  # () of more than NAMED numbers
  values: np.ndarray  # [N] f32


def to_image(x: Any) -> np.ndarray:
  """Return an image with values 0 to 1 or 0 to 255 as [H, W, 3] u8."""
  x = np.asarray(x)
  if x.dtype != np.uint8:
    largest = 1 if x.max(initial=0) <= 1 else 255
    x = np.clip(x * (255 / largest), 0, 255).astype(np.uint8)
  x = x[..., None] if x.ndim == 2 else x
  return np.repeat(x, 3, axis=-1) if x.shape[-1] == 1 else x[..., :3]


def draw(space: Any, observation: Any) -> np.ndarray | NumericObservation:
  """Draw the first part of an observation with at least two axes, or return its numbers.

  An action mask and a state are left out, as networks do not see them.
  """
  space = seen(space)
  parts = [np.asarray(x) for x in values(space, observation)]
  for x in parts:
    if x.ndim == 3 and x.shape[0] < min(x.shape[1:]) and x.dtype == np.uint8:
      return enlarge(to_image(x[-1]))  # the newest of stacked frames
    if x.ndim == 3 and x.dtype == np.uint8 and x.shape[-1] in (1, 3):
      return enlarge(to_image(x))
    if x.ndim == 3:
      return enlarge(draw_grid(x))
    if x.ndim == 2:
      return enlarge(to_image(x.astype(np.float32) / max(float(np.abs(x).max(initial=0)), 1e-9)))
  numbers = np.concatenate([np.ravel(x).astype(np.float32) for x in parts])
  named = zip((name for name, _ in leaves(space, '')), parts, strict=True)
  if len(numbers) > NAMED:
    return NumericObservation((), numbers)
  names = [n for name, x in named for n in _number_names(name.lstrip('/'), x.size)]
  return NumericObservation(tuple(names), numbers)


def _number_names(part: str, size: int) -> list[str]:
  """Return a name for each number of one part of an observation."""
  if size == 1 and part:
    return [part]
  return [f'{part}[{i}]' if part else str(i) for i in range(size)]


def draw_grid(x: np.ndarray) -> np.ndarray:
  """Draw [H, W, C] with a colour per channel. The last channel set in a cell is visible."""
  picture = np.full((*x.shape[:2], 3), 24, np.uint8)
  for channel in range(x.shape[-1]):
    picture[x[..., channel] > 0] = PALETTE[channel % len(PALETTE)]
  return picture


def draw_numbers(episode: Sequence[NumericObservation]) -> Iterator[np.ndarray]:
  """Draw a bar for each number of each observation, on the scale of its range in the episode.

  A picture is drawn when it is read, because all of them would fill the memory.
  """
  values = np.stack([x.values for x in episode])
  finite = np.where(np.isfinite(values), values, np.nan)
  known = ~np.isnan(finite).all(0)
  low, high = np.zeros((2, values.shape[1]), np.float32)
  low[known], high[known] = np.nanmin(finite[:, known], 0), np.nanmax(finite[:, known], 0)
  draws = draw_rows if len(low) <= NAMED else draw_thin_bars if len(low) <= BARRED else draw_pixels
  return (draws(x, low, high) for x in episode)


def scale_to_range(x: np.ndarray, low: np.ndarray, high: np.ndarray) -> np.ndarray:
  """Map x from [low, high] to [0, 1]. Return 0.5 for an empty range or NaN."""
  width = np.where(high > low, high - low, 1)
  part = np.clip((np.nan_to_num(x, nan=np.nan, posinf=1e38, neginf=-1e38) - low) / width, 0, 1)
  return np.where((high > low) & ~np.isnan(x), part, 0.5)


def draw_rows(x: NumericObservation, low: np.ndarray, high: np.ndarray) -> np.ndarray:
  """Draw a row for each number: its name, a bar and its value.

  The bar begins at zero, or at the end of the range that is nearer to zero.
  """
  from PIL import Image, ImageDraw

  n = len(x.values)
  row = min(40, max(16, 200 // max(n, 1)))
  image = Image.new('RGB', (NAME_WIDTH + BAR_WIDTH + VALUE_WIDTH, row * n + 8), GROUND)
  pen = ImageDraw.Draw(image)
  ends, zeros = (scale_to_range(v, low, high) for v in (x.values, np.zeros(n, np.float32)))
  for i, (name, value) in enumerate(zip(x.names, x.values, strict=True)):
    top = 4 + i * row
    end, zero = (NAME_WIDTH + round(p[i] * (BAR_WIDTH - 1)) for p in (ends, zeros))
    bar = (top + row // 5, top + row - 1 - row // 5)
    pen.rectangle((NAME_WIDTH, bar[0], NAME_WIDTH + BAR_WIDTH - 1, bar[1]), TRACK)
    pen.rectangle((min(end, zero), bar[0], max(end, zero), bar[1]), BAR)
    if low[i] < 0 < high[i]:
      pen.line((zero, top + 1, zero, top + row - 2), ZERO)
    pen.rectangle((end - 1, bar[0], end + 1, bar[1]), WORDS)
    name = name if len(name) <= 9 else f'…{name[-8:]}'
    pen.text((NAME_WIDTH - 6, top + row / 2), name, WORDS, anchor='rm')
    pen.text((NAME_WIDTH + BAR_WIDTH + 6, top + row / 2), f'{value:.4g}', WORDS, anchor='lm')
  return np.asarray(image)


def draw_thin_bars(
  x: NumericObservation, low: np.ndarray, high: np.ndarray, height: int = 128
) -> np.ndarray:
  """Draw a bar for each number, side by side."""
  n = len(x.values)
  width = max(3, 320 // n)
  picture = np.full((height, width * n, 3), GROUND, np.uint8)
  ends, zeros = (scale_to_range(v, low, high) for v in (x.values, np.zeros(n, np.float32)))
  for i, (end, zero) in enumerate(zip(ends, zeros, strict=True)):
    columns = slice(i * width, (i + 1) * width - 1)
    a, b = sorted(height - 1 - round(float(p) * (height - 1)) for p in (end, zero))
    picture[:, columns] = TRACK
    picture[a : b + 1, columns] = BAR
    if low[i] < 0 < high[i]:
      picture[height - 1 - round(float(zero) * (height - 1)), columns] = ZERO
  return picture


def draw_pixels(x: NumericObservation, low: np.ndarray, high: np.ndarray) -> np.ndarray:
  """Draw a pixel for each number, row by row: the higher in its range, the brighter."""
  side = math.isqrt(len(x.values) - 1) + 1
  grey = np.zeros((side * side, 1), np.uint8)
  grey[: len(x.values), 0] = np.round(255 * scale_to_range(x.values, low, high))
  return enlarge(np.repeat(grey.reshape(side, side, 1), 3, axis=-1))


def enlarge(picture: np.ndarray) -> np.ndarray:
  """Enlarge a picture by a whole factor, so that its longer side has at least SMALLEST pixels."""
  factor = -(-SMALLEST // max(picture.shape[:2]))
  return picture.repeat(factor, 0).repeat(factor, 1) if factor > 1 else picture
