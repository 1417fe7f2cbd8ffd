"""One environment that can be filmed: a pool of one that draws itself.

Atari is drawn in colour by a second game with the same seed and actions, Gymnasium by `rgb_array`,
an environment in C by `podrace_render`, and a JAX environment by its library. Without any of them
the observation is drawn.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator
from typing import Any, Protocol

import jax
import numpy as np

from podrace.envs import env_names
from podrace.envs.adapters.adapt import LimitedState
from podrace.envs.base import PooledState, ResetState, batch
from podrace.envs.hidden import make_gymnasium
from podrace.envs.host.base import HostSpec, PoolArgs
from podrace.envs.host.timesteps import Stepper, everyone
from podrace.envs.spaces import map_leaves
from podrace.errors import HostError, RunError, UsageError
from podrace.run.video.pictures import NumericObservation, draw, enlarge, to_image
from podrace.system.blame import account
from podrace.types import LAST, TimeStep


class Stage(Protocol):
  """One environment and its picture."""

  note: str  # reason why the observation is drawn; '' if the environment draws itself

  def reset(self, seed: int) -> TimeStep:
    """Begin a new episode and return its FIRST timestep [1, ...]."""
    ...

  def step(self, action: Any) -> tuple[TimeStep, float, bool]:
    """Return the next timestep [1, ...], the unclipped reward, and whether the game is over."""
    ...

  def frame(self) -> np.ndarray | NumericObservation:
    """Return the picture [H, W, 3] u8, or the observation if it has no image."""
    ...

  def close(self) -> None:
    """Close the environment."""


def make_stage(name: str, env: Any, deadline: float) -> Stage:
  """Return the stage of environment `env`, made by `envs.make` or `host.make` from `name`.

  A step in a worker process may take `deadline` seconds.

  Raises:
    UsageError: if it cannot be drawn.
  """
  library, inner, options = env_names.parse(name)
  if isinstance(env, HostSpec):
    if library == 'ale':
      return _AtariStage(inner, options, env, deadline)
    if library == 'gymnasium':
      return _GymnasiumStage(inner, options, env)
    if library == 'c':
      return _NativeStage(env, deadline)
    if env.jax is None:
      raise UsageError(f"{name} can't be drawn: of the host, ale:, gymnasium: and c: can")
    env = env.jax
  return _JaxStage(env)


class NamedStage:
  """A stage that names the environment in its failures.

  Raises: RunError, from `reset`, `step` and `frame`, for any exception of the environment.
  """

  def __init__(self, name: str, stage: Stage) -> None:
    self.note, self.close = stage.note, stage.close
    self._name, self._stage = name, stage

  def reset(self, seed: int) -> TimeStep:
    """Begin a new episode, as `Stage.reset`."""
    with self._failing():
      return self._stage.reset(seed)

  def step(self, action: Any) -> tuple[TimeStep, float, bool]:
    """Step the environment, as `Stage.step`."""
    with self._failing():
      return self._stage.step(action)

  def frame(self) -> np.ndarray | NumericObservation:
    """Return the picture, as `Stage.frame`."""
    with self._failing():
      return self._stage.frame()

  @contextlib.contextmanager
  def _failing(self) -> Iterator[None]:
    try:
      yield
    except (RunError, UsageError):
      raise
    except HostError as e:
      raise RunError(f'{self._name} failed: {e}') from e
    except Exception as e:
      raise RunError(f'{self._name} failed:\n{account(e)}') from e


class _JaxStage:
  """Stage of an environment in JAX."""

  def __init__(self, env: Any) -> None:
    both = batch(env, 1)
    self._reset, self._step = jax.jit(both.reset), jax.jit(both.step)
    self._space = env.observation_space
    self._drawing = find_draw_function(env)
    self.note = (
      '' if self._drawing else 'it draws no picture of itself: this is what the agent sees'
    )
    self._state: Any = None
    self._timestep: Any = None

  def reset(self, seed: int) -> TimeStep:
    key, self._key = jax.random.split(jax.random.key(seed))
    self._state, self._timestep = self._reset(key)
    return self._timestep

  def step(self, action: Any) -> tuple[TimeStep, float, bool]:
    self._key, key = jax.random.split(self._key)
    self._state, timestep = self._step(self._state, action, key[None])
    self._timestep = timestep
    return timestep, float(timestep.reward[0]), bool(timestep.step_type[0] == LAST)

  def frame(self) -> np.ndarray | NumericObservation:
    if self._drawing is not None:
      return enlarge(to_image(self._drawing(first_of_batch(self._state))))
    return draw(self._space, jax.tree.map(np.asarray, first_of_batch(self._timestep.observation)))

  def close(self) -> None: ...


class _PoolStage:
  """Stage of one environment in a host pool."""

  note = ''

  def __init__(self, spec: HostSpec, deadline: float) -> None:
    self._spec, self._deadline = spec, deadline
    self._pool: Any = None

  def reset(self, seed: int) -> TimeStep:
    self.close()
    seeds = np.array([seed], np.uint32)
    self._pool = self._spec.make(PoolArgs(1, 1, seeds, 1, self._deadline))
    self._pool.reset()
    return self._pool.recv().timestep

  def step(self, action: Any) -> tuple[TimeStep, float, bool]:
    self._pool.send(everyone(1), action)
    arrival = self._pool.recv()
    return arrival.timestep, float(arrival.score[0]), bool(arrival.ended[0])

  def close(self) -> None:
    if self._pool is not None:
      self._pool.close()
      self._pool = None


class _AtariStage(_PoolStage):
  """An Atari game, drawn in colour by a twin with the same seed and actions."""

  def __init__(self, name: str, options: Any, spec: HostSpec, deadline: float) -> None:
    super().__init__(spec, deadline)
    from podrace.envs.host import ale

    changed = dict(grayscale=False, img_height=210, img_width=160, stack_num=1)
    self._values, self._name = {**ale.DEFAULTS, **options}, name
    self._twin_of = lambda: ale.vector(self._name, self._values, 1, 1, 1, **changed)
    self._twin: Any = None
    self._picture: Any = None

  def reset(self, seed: int) -> TimeStep:
    timestep = super().reset(seed)
    self._twin = self._twin_of()
    self._picture, _ = self._twin.reset(seed=np.array([seed], np.int64) % 2**31)
    return timestep

  def step(self, action: Any) -> tuple[TimeStep, float, bool]:
    result = super().step(action)
    # With episodic lives the pool answers a lost life by a no-op, so the twin gets its actions.
    self._twin.send(self._pool.sent)
    self._picture, score, *_ = self._twin.recv()
    if float(score[0]) != result[1] and not result[0].first[0]:
      raise RunError(f'ale:{self._name}: the game that is drawn is not the one that is played')
    return result

  def frame(self) -> np.ndarray:
    return enlarge(to_image(self._picture[0, -1]))

  def close(self) -> None:
    super().close()
    if self._twin is not None:
      self._twin.close()
      self._twin = None


class _NativeStage(_PoolStage):
  """An environment in C, drawn by its own `podrace_render` if it has one and is in this process."""

  def __init__(self, spec: HostSpec, deadline: float) -> None:
    super().__init__(spec, deadline)
    self._timestep: Any = None
    super().reset(0)
    if not getattr(self._pool, 'renders', False):
      self.note = 'it draws no picture of itself here: this is what the agent sees'

  def reset(self, seed: int) -> TimeStep:
    self._timestep = super().reset(seed)
    return self._timestep

  def step(self, action: Any) -> tuple[TimeStep, float, bool]:
    result = super().step(action)
    self._timestep = result[0]
    return result

  def frame(self) -> np.ndarray | NumericObservation:
    if self.note:
      return draw(self._spec.observation_space, first_of_batch(self._timestep.observation))
    return enlarge(to_image(self._pool.render()))


class _GymnasiumStage:
  """A Gymnasium environment in this process, with `render_mode='rgb_array'` if it has that."""

  def __init__(self, name: str, options: Any, spec: HostSpec) -> None:
    self._env, self.note = _make_rendering_env(name, options)
    self._space, self._stepper = spec.observation_space, Stepper(1)
    self._observation: Any = None

  def reset(self, seed: int) -> TimeStep:
    self._observation, _ = self._env.reset(seed=seed)
    self._stepper.reset()
    return self._timestep(self._observation, 0.0, False, False)

  def step(self, action: Any) -> tuple[TimeStep, float, bool]:
    from podrace.envs.host.worker import actions_for

    (one,) = actions_for(self._env.action_space, np.asarray(action))
    self._observation, reward, terminated, truncated, _ = self._env.step(one)
    timestep = self._timestep(self._observation, reward, terminated, truncated)
    return timestep, float(reward), bool(terminated or truncated)

  def _timestep(self, x: Any, reward: float, terminated: bool, truncated: bool) -> TimeStep:
    def one(space: Any, y: Any) -> np.ndarray:
      return np.asarray(y, space.dtype)[None]

    flags = (np.array([bool(f)]) for f in (terminated, truncated))  # 0 and 1 may be flags
    return self._stepper.timestep(
      everyone(1), map_leaves(one, self._space, x), np.array([reward], np.float32), *flags
    )

  def frame(self) -> np.ndarray | NumericObservation:
    if self.note:
      return draw(self._space, self._observation)
    return to_image(self._env.render())

  def close(self) -> None:
    self._env.close()


def _make_rendering_env(name: str, options: Any) -> tuple[Any, str]:
  """Return an environment that renders and '', or one that cannot and the reason.

  Raises:
    UsageError: if a library needed for rendering is missing.
  """
  import gymnasium

  with warnings.catch_warnings():  # the library warns of modes that it lacks
    warnings.simplefilter('ignore')
    env: Any = None
    try:
      env = make_gymnasium(name, **(dict(options) | {'render_mode': 'rgb_array'}))
      env.reset(seed=0)
      to_image(_render(env))
      return env, ''
    except (ImportError, gymnasium.error.DependencyNotInstalled) as e:
      raise UsageError(f"gymnasium:{name} can't be drawn: {e}") from e
    except Exception as e:
      why = 'its class has no render_mode and render() for rgb_array'
      if env is not None:
        why = f'it renders no rgb_array ({type(e).__name__}: {str(e).partition(chr(10))[0]})'
        env.close()
    return make_gymnasium(name, **options), f'{why}: this is what the agent sees'


def _render(env: Any) -> np.ndarray:
  """Render an environment.

  Raises:
    ValueError: if the result is not an image.
  """
  picture = np.asarray(env.render())
  if picture.ndim != 3 or picture.dtype.kind not in 'uif':
    raise ValueError(f'render() returned {picture.dtype} {picture.shape}')
  return picture


def first_of_batch(tree: Any) -> Any:
  """Return the values of the only environment in arrays [1, ...] or a pool's state."""
  if isinstance(tree, PooledState):
    tree = tree.inner
  return jax.tree.map(lambda x: x[0], tree)


def find_draw_function(env: Any) -> Callable[[Any], Any] | None:
  """Return the function that draws a state of the environment, or None."""
  while hasattr(env, 'dynamics'):
    env = env.dynamics
  draws = getattr(env, 'draw', None)
  if draws is None:
    return None

  def of_state(state: Any) -> Any:
    while isinstance(state, ResetState | PooledState | LimitedState):
      state = state.inner
    return draws(state)

  return of_state
