"""Grasp: close a gripper on an object that a small image shows, after QT-Opt's robots.

Kalashnikov et al. 2018 (arXiv 1806.10293) grasp with an arm and a camera. Kept of it: an image and
a continuous action, an angle with two right values, a reward only at the end, and objects for
testing that no training episode has.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from functools import cached_property
from typing import Any, NamedTuple

import gymnasium
import jax
import jax.numpy as jnp
import numpy as np

from podrace.envs.adapters.adapt import box
from podrace.envs.base import restart, transition
from podrace.types import Array, TimeStep

SIDE, MIDDLE = 24, 11.5  # pixels of the image, and its centre
# Bytes up to 255 in a small image would be categories of a grid, see `envs.spaces`.
BRIGHT = 200
MARGIN, START = 5.0, 3.0  # from the border to all places; from the centre to the gripper at first
REACH, TURN = 2.0, math.radians(30)  # of one step: pixels of each axis, radians
NEAR, ALIGNED = 1.5, math.radians(20)  # distance in pixels and angle at which a grasp succeeds
PENALTY = 0.02  # of each step that does not close
GAP, FINGER = 2.6, (1.2, 0.6, 8.0)  # from the gripper's centre to a finger, and a finger's shape
APART = 6.0  # least distance from the object to a distractor, in pixels
SCRIPT_PLACE, SCRIPT_ANGLE = 1.75, math.radians(31)  # standard deviations of the script's errors
SCRIPT_CLOSE = 0.05  # share of steps at which the script closes wherever it is


def _objects(*parts: tuple[float, ...]) -> Any:
  return np.array(list(itertools.product(*parts)), np.float32)


# Half the length and half the width in pixels, and the power of the superellipse: 1 is a diamond,
# 2 an ellipse, and 8 nearly a rectangle. No shape and no size is in both sets.
OBJECTS = {
  'train': _objects((3.0, 3.5, 4.0, 4.5), (0.9, 1.2, 1.5), (2.0, 8.0)),
  'unseen': _objects((2.7, 3.25, 3.75, 4.25, 4.8), (0.8, 1.05, 1.35, 1.6), (1.3, 4.0)),
}


class GraspState(NamedTuple):
  """Places in pixels and angles in radians, f32."""

  place: Array  # [3] of the object: x, y, angle
  shape: Array  # [3] a row of OBJECTS
  distractors: tuple[Array, ...]  # [3] each: x, y, radius of a disc
  gripper: Array  # [3] x, y, angle
  time: Array  # [] i32
  success: Array  # [] bool


@dataclasses.dataclass(frozen=True)
class Grasp:
  """Move and turn a gripper over an object, and close it.

  The camera moves with the gripper and does not turn. The image has a plane of the object and the
  distractors, and a plane of the gripper's two fingers, which are in the middle.
  An action is (dx, dy, dtheta, close) within [-1, 1]: up to 2 pixels for each axis and 30 degrees.
  It moves first. If `close` is above 0, the episode terminates, with reward 1 if the gripper is
  within 1.5 pixels of the object and 20 degrees of its axis, modulo 180 degrees, and else 0. All
  other steps have reward -0.02. An episode is truncated after `steps` steps.

  `success` of an episode is 1 or 0.
  """

  objects: str = 'train'  # a key of OBJECTS
  distractors: int = 0  # discs in the plane of the object, which cannot be grasped
  slip: float = 0.0  # probability that a right grasp loses the object
  steps: int = 10

  def __post_init__(self) -> None:
    if self.objects not in OBJECTS:
      raise ValueError(f'objects must be {" or ".join(OBJECTS)}, not {self.objects!r}')
    if not 0 <= self.distractors <= 10 or not 0 <= self.slip <= 1 or self.steps < 1:
      raise ValueError(
        'grasp needs distractors from 0 to 10, a slip from 0 to 1 and steps >= 1: '
        f'{self.distractors=}, {self.slip=}, {self.steps=}'
      )

  @cached_property
  def observation_space(self) -> gymnasium.spaces.Box:
    """Two planes [24, 24, 2]: the object and distractors, the gripper's fingers."""
    return box(0, BRIGHT, (SIDE, SIDE, 2), np.uint8)

  @cached_property
  def action_space(self) -> gymnasium.spaces.Box:
    """A move (dx, dy), a turn, and whether to close."""
    return box(-1, 1, (4,), np.float32)

  def reset(self, key: Array) -> tuple[GraspState, TimeStep]:
    """Begin an episode."""
    keys = jax.random.split(key, 5)
    table = jnp.asarray(OBJECTS[self.objects])
    far = SIDE - 1 - MARGIN
    place = jax.random.uniform(keys[0], (2,), minval=MARGIN, maxval=far)
    angles = jax.random.uniform(keys[1], (2,), maxval=math.pi)
    start = MIDDLE + jax.random.uniform(keys[2], (2,), minval=-START, maxval=START)
    state = GraspState(
      place=jnp.append(place, angles[0]),
      shape=table[jax.random.randint(keys[3], (), 0, len(table))],
      distractors=self._discs(place, keys[4]),
      gripper=jnp.append(start, angles[1]),
      time=jnp.int32(0),
      success=jnp.bool_(False),
    )
    return state, restart(self._image(state))

  def _discs(self, place: Array, key: Array) -> tuple[Array, ...]:
    """Return distractors [3], at least APART from the object."""
    u = jax.random.uniform(key, (3, self.distractors))
    distance, angle = APART + (SIDE / 2 - APART) * u[0], 2 * math.pi * u[1]
    offset = jnp.stack([jnp.cos(angle), jnp.sin(angle)], -1) * distance[:, None]
    # An offset of at most half the image stays as far after it is wrapped around.
    return tuple(jnp.concatenate([(place[None] + offset) % SIDE, 1.0 + 0.6 * u[2][:, None]], -1))

  def step(self, state: GraspState, action: Array, key: Array) -> tuple[GraspState, TimeStep]:
    """Take one action."""
    move = jnp.clip(action, -1.0, 1.0)
    gripper = state.gripper + move[:3] * jnp.array([REACH, REACH, TURN])
    place = jnp.clip(gripper[:2], MARGIN, SIDE - 1 - MARGIN)
    gripper = jnp.append(place, gripper[2] % math.pi)
    closes = move[3] > 0
    near = jnp.sum(jnp.square(gripper[:2] - state.place[:2])) <= NEAR**2
    aligned = jnp.abs(_between(gripper[2], state.place[2])) <= ALIGNED
    holds = jax.random.uniform(key) >= self.slip
    success = closes & near & aligned & holds
    state = state._replace(gripper=gripper, time=state.time + 1, success=success)
    reward = jnp.where(closes, success.astype(jnp.float32), -PENALTY)
    return state, transition(self._image(state), reward, closes, state.time >= self.steps)

  def infos(self, state: GraspState) -> dict[str, Array]:
    """Return whether the episode that ends in `state` had success."""
    return {'success': state.success.astype(jnp.float32)}

  def scripted(self, state: GraspState, key: Array) -> Array:
    """Return an action of the script for `podrace record --scripted`."""
    return scripted(state, key)

  def draw(self, state: GraspState) -> Array:
    """Return a picture [240, 240, 3] f32: the object and distractors red, the fingers blue."""
    planes = _planes(state, jnp.full(2, MIDDLE), 10 * SIDE)
    colours = jnp.array([[0.84, 0.37, 0.0], [0.34, 0.71, 0.91]])
    return 0.07 + 0.93 * jnp.clip(planes @ colours, 0.0, 1.0)

  def _image(self, state: GraspState) -> Array:
    return jnp.round(BRIGHT * _planes(state, state.gripper[:2], SIDE)).astype(jnp.uint8)


def scripted(state: GraspState, key: Array, noise: float = 1.0) -> Array:
  """Return an action [4] of a policy that sees the state, with errors.

  It goes to where it takes the object to be, and closes when it is there. With `noise` 1 about a
  quarter of its episodes succeed, with 0 all.
  """
  place_key, close_key = jax.random.split(key)
  spread = jnp.array([SCRIPT_PLACE, SCRIPT_PLACE, SCRIPT_ANGLE])
  error = noise * spread * jax.random.normal(place_key, (3,))
  turn = _between(state.place[2], state.gripper[2])
  way = jnp.append(state.place[:2] - state.gripper[:2], turn) + error
  move = way / jnp.array([REACH, REACH, TURN])
  arrives = jnp.all(jnp.abs(move) <= 1)
  hasty = jax.random.uniform(close_key) < noise * SCRIPT_CLOSE
  return jnp.append(jnp.clip(move, -1.0, 1.0), jnp.where(arrives | hasty, 1.0, -1.0))


def _between(a: Array, b: Array) -> Array:
  """Return the angle from b to a, modulo 180 degrees, within 90 degrees of 0."""
  return (a - b + math.pi / 2) % math.pi - math.pi / 2


def _planes(state: GraspState, centre: Array, side: int) -> Array:
  """Return the planes [side, side, 2] of a state, within [0, 1], around a place [2].

  `side` is the number of pixels that show SIDE pixels of the scene.
  """
  axis = (jnp.arange(side) + 0.5) * SIDE / side - 0.5
  y, x = jnp.meshgrid(axis - MIDDLE + centre[1], axis - MIDDLE + centre[0], indexing='ij')
  sharp = side / SIDE

  def blob(place: Array, shape: Any) -> Array:
    dx, dy, (a, b, power) = x - place[0], y - place[1], shape
    u = dx * jnp.cos(place[2]) + dy * jnp.sin(place[2])
    v = dy * jnp.cos(place[2]) - dx * jnp.sin(place[2])
    radius = (jnp.abs(u / a) ** power + jnp.abs(v / b) ** power) ** (1 / power)
    return jnp.clip(0.5 + (1 - radius) * b * sharp, 0.0, 1.0)  # an edge of one pixel

  def disc(d: Array) -> Array:
    radius = jnp.sqrt(jnp.square(x - d[0]) + jnp.square(y - d[1]))
    return jnp.clip(0.5 + (d[2] - radius) * sharp, 0.0, 1.0)

  scene = blob(state.place, state.shape)
  for d in state.distractors:
    scene = jnp.maximum(scene, disc(d))
  across = GAP * jnp.stack([-jnp.sin(state.gripper[2]), jnp.cos(state.gripper[2])])
  fingers = [
    blob(jnp.append(state.gripper[:2] + sign * across, state.gripper[2]), FINGER)
    for sign in (-1.0, 1.0)
  ]
  return jnp.stack([scene, jnp.maximum(*fingers)], -1)
