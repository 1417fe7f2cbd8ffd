"""The nouns of podrace: data, environments, agents, replay.

Letters used for shapes everywhere: T time, B batch (environments), A actions. Importing this does
not import jax, so that machines that only run environments do not need it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np

if TYPE_CHECKING:
  from jax import Array

Metrics = dict[str, 'Array']  # scalars, all of the same meaning on every device

FIRST, MID, LAST = 0, 1, 2  # values of TimeStep.step_type

# The largest reward or score, in size. Learning squares returns in float32 and adds them up: with a
# discount of 0.9999 and a million timesteps in a batch that makes (1e12 * 1e4)^2 * 1e6 = 1e38, and
# float32 ends at 3.4e38.
LARGEST_REWARD = 1e12
# The largest float that another process may send as an observation or action, in size. Optimisers
# square gradients, which are products of two activations: (1e9)^4 = 1e36. Observations of this
# process are its user's own, and not bounded.
LARGEST_OBSERVATION = 1e9
# The largest float that another process may send as output of its agent, in size: as returns of
# such rewards.
LARGEST_OUTPUT = 2.0**54
TINY = float(np.finfo(np.float32).tiny)  # devices flush smaller numbers to 0


def __getattr__(name: str) -> Any:
  if name == 'Array':
    import jax

    return jax.Array
  raise AttributeError(f'module {__name__!r} has no attribute {name!r}')


def round_inward(low: np.ndarray, high: np.ndarray, dtype: Any) -> tuple[np.ndarray, np.ndarray]:
  """Return bounds in a narrower float type, rounded towards each other.

  They are rounded to the nearest number where the type has no number between them. Devices flush
  numbers of float32 below TINY in size to 0, so no bound is one.
  """
  with np.errstate(over='ignore'):
    near_low, near_high = low.astype(dtype), high.astype(dtype)
  inf = np.array(np.inf, dtype)
  up = np.where(near_low < low, np.nextafter(near_low, inf), near_low)
  down = np.where(near_high > high, np.nextafter(near_high, -inf), near_high)
  if np.dtype(dtype) == np.float32:
    up = np.where((up > 0) & (up < TINY), np.float32(TINY), up)
    up = np.where((up < 0) & (up > -TINY), np.float32(0), up)
    down = np.where((down < 0) & (down > -TINY), np.float32(-TINY), down)
    down = np.where((down > 0) & (down < TINY), np.float32(0), down)
  crossed = up > down
  return np.where(crossed, near_low, up), np.where(crossed, near_high, down)


def has_choice(low: Any, high: Any) -> Any:
  """Return whether half the range between two bounds is a number that devices tell from 0."""
  return high / 2 - low / 2 >= TINY


class TimeStep(NamedTuple):
  """Output of environments at time t (dm_env's TimeStep, always arrays)."""

  observation: Any  # [B, ...] a pytree of arrays, as the observation space declares
  reward: Array  # [B] f32, for the action taken at t-1; 0 on FIRST; at most LARGEST_REWARD in size
  discount: Array  # [B] f32, 0 where the episode terminated, else 1 (1 also if truncated)
  step_type: Array  # [B] i8, FIRST, MID or LAST

  @property
  def first(self) -> Array:
    """[B] bool: an episode begins here."""
    return self.step_type == FIRST

  @property
  def last(self) -> Array:
    """[B] bool: an episode ends here; the next action is ignored."""
    return self.step_type == LAST


class ActorOutput(NamedTuple):
  """Output of an agent at time t."""

  action: Any  # [B, ...] as the action space declares
  extras: Any = ()  # [B, ...] anything for `learn`: log-probabilities, values, ...


class Trajectory(NamedTuple):
  """The only currency between actors, replay and learners."""

  timesteps: TimeStep  # [T+1, B, ...] the last one bootstraps, and opens the next trajectory
  outputs: ActorOutput  # [T, B, ...]
  agent_state: Any  # [B, ...] the recurrent state before timesteps[0]
  env_id: Array  # [B] i32 which environment, counted over all devices


_axes: Any = (1, 1, 0, 0)
BATCH_AXIS = Trajectory(*_axes)  # of the leaves of each field


def map_batch(f: Callable[..., Any], *trajectories: Trajectory) -> Trajectory:
  """Return f(axis, x, ...) for each leaf of trajectories; `axis` is its batch axis."""
  import jax

  fields = zip(_axes, *trajectories, strict=True)
  return Trajectory(*(jax.tree.map(functools.partial(f, axis), *field) for axis, *field in fields))


def take_batch(trajectory: Trajectory, index: Array) -> Trajectory:
  """Return the environments at `index` [N] of a trajectory's batch."""
  return map_batch(lambda axis, x: x[(slice(None),) * axis + (index,)], trajectory)


class Sample(NamedTuple):
  """A batch that replay gives to the learner."""

  trajectory: Trajectory
  weight: Array  # [B] f32 importance weight
  index: Array  # type: ignore[assignment]  # [B] i32 where replay keeps it


class TrainState(NamedTuple):
  """State of learning. Architectures know only `params` and `rest` of it."""

  params: Any  # all that `act` needs, so all that actors are ever sent
  rest: Any  # optimiser state, target networks, counters, meta-parameters


class Environment(Protocol):
  """A pure environment. It is one copy, which the runner vmaps.

  `step` after LAST ignores the action and returns FIRST, of a new episode (next-step reset).

  It may also have `infos(state) -> {name: number}`, of the episode that ends in `state`, for logs
  (`info_NAME`, the mean over the episodes).

  Example:
      import jax
      from podrace.envs.own.catch import Catch
      from podrace.envs.base import NextStepReset

      env = NextStepReset(Catch())
      state, timestep = env.reset(jax.random.key(0))
      while not timestep.last:
        state, timestep = env.step(state, 1, jax.random.key(1))
      print(float(timestep.reward))
  """

  @property
  def observation_space(self) -> Any:
    """A gymnasium.spaces.Space, of one environment."""
    ...

  @property
  def action_space(self) -> Any:
    """A gymnasium.spaces.Space, of one environment."""
    ...

  def reset(self, key: Array) -> tuple[Any, TimeStep]:
    """Begin an episode."""
    ...

  def step(self, state: Any, action: Any, key: Array) -> tuple[Any, TimeStep]:
    """Take an action."""
    ...


class Arrival(NamedTuple):
  """The environments of a HostEnvironment that are ready, as numpy arrays [b]."""

  env_id: np.ndarray  # i32, within the pool
  timestep: TimeStep  # its reward is for learning, clipped if that is set
  score: np.ndarray  # f32, the reward as the environment has it
  ended: np.ndarray  # bool: a whole game is over, which not every LAST means where lives are lost
  run_id: np.ndarray  # i32, how often the environment was restarted


class HostEnvironment(Protocol):
  """A pool of stateful environments on the host.

  After `reset`, each environment arrives with FIRST by itself. After that, an environment arrives
  when an action was sent. `recv` returns at least one and at most `batch_size` environments, in
  any order. A pool that always returns all of them in order is in lockstep. A pool of environments
  that may disconnect returns none now and then, so that its caller can do other work. Observations
  may be in memory of the pool that the next `recv` overwrites.
  """

  num_envs: int
  batch_size: int  # how many `recv` returns
  watches_itself: bool  # replaces environments that hang or die; else the caller must watch

  def reset(self) -> None:
    """Begin an episode."""
    ...

  def send(self, env_id: np.ndarray, action: Any) -> None:
    """Send actions to environments."""
    ...

  def recv(self) -> Arrival:
    """Wait for environments that are ready."""
    ...

  def close(self) -> None:
    """Close the environments."""
    ...

  def kill(self) -> None:
    """End processes at once, if there are any. Any thread may call this."""
    ...


class Agent(Protocol):
  """An algorithm: a frozen dataclass of hyper-parameters with four pure functions.

  `podrace.hooks` lists its optional members.

  Example:
      import dataclasses
      import jax
      import jax.numpy as jnp
      from podrace.types import ActorOutput, TrainState

      @dataclasses.dataclass(frozen=True)
      class Random:
        num_actions: int = 3

        def init(self, key):
          return TrainState(params=(), rest=())

        def initial_state(self, env_id):
          return ()

        def act(self, params, state, timestep, key):
          x = jax.random.randint(key, timestep.reward.shape, 0, self.num_actions)
          return ActorOutput(x), state

        def learn(self, train, sample, key):
          return train, jnp.ones_like(sample.weight), dict(loss=jnp.float32(0))
  """

  def init(self, key: Array) -> TrainState:
    """Return the first state of training."""
    ...

  def initial_state(self, env_id: Array) -> Any:
    """Return the state of acting for environments [B]; () if there is none."""
    ...

  def act(self, params: Any, state: Any, timestep: TimeStep, key: Array) -> tuple[ActorOutput, Any]:
    """Choose the actions of timesteps [B]."""
    ...

  def learn(
    self, train: TrainState, sample: Sample, key: Array
  ) -> tuple[TrainState, Array, Metrics]:
    """Make one update.

    An agent that learns from replay also has `memory(num_envs, unroll_length, stack) -> Replay`.

    Returns:
      The new state, a priority [B] for each trajectory, and scalars to report.
    """
    ...


class Replay(NamedTuple):
  """Sizes of a replay, bundled with five pure functions.

  Each device has a state of its own, of arrays with at least one axis.
  """

  init: Callable[[Trajectory], Any]  # from one trajectory's shapes
  add: Callable[[Any, Trajectory], Any]
  sample: Callable[[Any, Array], Sample]
  update: Callable[[Any, Array, Array], Any]  # state, index [B], priority [B]
  times: Callable[[Array], Array | int]  # how many samples the update-th update learns from
  windows: Any = None  # its storage of the past, if any: `podrace.replay.windows.Windows`
