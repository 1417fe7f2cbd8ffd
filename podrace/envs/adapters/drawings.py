"""Pictures of simple mechanics, in numpy and without a display."""

from __future__ import annotations

from typing import Any

import numpy as np

PAPER, LINE, BODY, ROD = (244, 246, 248), (150, 158, 166), (27, 31, 36), (213, 94, 0)
Point = tuple[float, float]


def cart_pole(state: Any, params: Any) -> np.ndarray:
  """Draw the cart on its track and the pole in its length. Positive angles lean to the right."""
  picture = np.full((200, 360, 3), PAPER, np.uint8)
  threshold = float(params.x_threshold)
  scale = 340 / (2 * threshold + 0.6)  # pixels of a unit; the cart is 0.6 wide
  x, y = 180 + float(state.x) * scale, 155.0
  theta, length = float(state.theta), 2 * float(params.length) * scale
  rod(picture, (0, y + 14), (359, y + 14), 0.75, LINE)
  for end in (-1, 1):
    at = 180 + end * threshold * scale
    rod(picture, (at, y + 6), (at, y + 22), 0.75, LINE)
  rod(picture, (x - 0.3 * scale + 8, y), (x + 0.3 * scale - 8, y), 12, BODY)
  tip = (x + length * np.sin(theta), y - length * np.cos(theta))
  rod(picture, (x, y), tip, 4.5, ROD)
  rod(picture, (x, y), (x, y), 3, PAPER)
  return picture


def pendulum(state: Any, params: Any) -> np.ndarray:
  """Draw the rod, upright at angle 0. Positive angles are to the left, as in Gymnasium."""
  picture = np.full((256, 256, 3), PAPER, np.uint8)
  theta, middle, length = float(state.theta), 128.0, 100.0
  rod(picture, (middle, middle - length - 12), (middle, middle - length - 20), 0.75, LINE)
  tip = (middle - length * np.sin(theta), middle - length * np.cos(theta))
  rod(picture, (middle, middle), tip, 9, ROD)
  rod(picture, (middle, middle), (middle, middle), 4, BODY)
  return picture


def rod(
  picture: np.ndarray, a: Point, b: Point, radius: float, colour: tuple[int, int, int]
) -> None:
  """Draw a thick line with round ends from a to b, (x, y) in pixels, into a picture."""
  margin = radius + 1
  left, top = (max(int(min(p, q) - margin), 0) for p, q in zip(a, b, strict=True))
  right, bottom = (int(max(p, q) + margin) + 1 for p, q in zip(a, b, strict=True))
  part = picture[top : max(bottom, 0), left : max(right, 0)]  # the rod is nowhere else
  rows, columns = np.mgrid[top : top + part.shape[0], left : left + part.shape[1]]
  dx, dy = b[0] - a[0], b[1] - a[1]
  along = ((columns - a[0]) * dx + (rows - a[1]) * dy) / max(dx * dx + dy * dy, 1e-9)
  along = np.clip(along, 0, 1)
  distance = np.hypot(columns - a[0] - along * dx, rows - a[1] - along * dy)
  inside = np.clip(radius + 0.5 - distance, 0, 1)[..., None]
  part[:] = np.round(part * (1 - inside) + np.array(colour) * inside).astype(np.uint8)
