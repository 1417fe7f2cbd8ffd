"""Recording of episodes: of a run's policy, a scripted one, or actions at random."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from podrace.envs.base import PooledState, ResetState
from podrace.envs.host.base import HostSpec, PoolArgs
from podrace.envs.host.checker import Checker
from podrace.envs.host.jax import JaxPool, JaxSteps
from podrace.envs.host.spaces import action_bounds, allowed_choices, best_choices
from podrace.envs.logs.recorded_spaces import check_keys
from podrace.envs.logs.writing import Episode, check_target, cut_episodes, write_log
from podrace.errors import HostError, RunError, UsageError
from podrace.hooks import act_with, check_greedy, greedily
from podrace.run.directory import check_directory, load_config
from podrace.run.evaluate import acting_key, stage_of
from podrace.run.evaluate_host import HOST_AT_ONCE, WatchedPool, spread_env_ids
from podrace.run.saved_params import restore_params
from podrace.settings.config import Config
from podrace.settings.presets import PRESETS
from podrace.settings.resolved import Resolved
from podrace.settings.validation import needs_sebulba
from podrace.system.files.schema import NEWEST
from podrace.system.scheduling import cores
from podrace.types import FIRST, LAST
from podrace.version import __version__

POLICY, SCRIPTED, RANDOM = 'policy', 'scripted', 'random'  # ways of acting

# (timestep [n], state of the environments, noise [n]) -> actions [n]
Act = Callable[[Any, Any, 'Noise'], np.ndarray]


class Noise(NamedTuple):
  """Random actions, some of which replace actions of the policy."""

  is_taken: np.ndarray  # [n] bool
  actions: np.ndarray  # [n, ...]

  def apply(self, action: Any) -> Any:
    """Return actions [n, ...] of NumPy or JAX, some of them replaced."""
    is_taken = self.is_taken.reshape(-1, *(1,) * (action.ndim - 1))
    return jnp.where(is_taken, self.actions.astype(action.dtype), action)


@dataclasses.dataclass(frozen=True)
class Recording:
  """The settings of a recording.

  Attributes:
    episodes: number of episodes.
    seed: seed of the first episode; the next have the next numbers.
    way: POLICY, SCRIPTED or RANDOM.
    noise: share of actions that are drawn at random instead.
    greedy: take the best action of the policy instead of sampling.
    max_steps: longer episodes are truncated.
    member: index of the seed that acts, in a run with several.
  """

  episodes: int
  seed: int = 0
  way: str = POLICY
  noise: float = 0.0
  greedy: bool = False
  max_steps: int = 1_000_000
  member: int = 0

  def __post_init__(self) -> None:
    for name, low, high in (('episodes', 1, 2**24), ('max_steps', 1, 2**31), ('seed', 0, 2**31)):
      if not low <= getattr(self, name) < high:
        option = f'--{name.replace("_", "-")}'
        raise UsageError(f'{option} must be {low} to {high - 1}, not {getattr(self, name)}')
    if not 0 <= self.noise <= 1:
      raise UsageError(f'--noise must be a share of actions, 0 to 1, not {self.noise:g}')
    if self.noise and self.way == RANDOM:
      raise UsageError(f'--random draws every action at random: leave out --noise {self.noise:g}')


def _check_keys(space: Any, env: str) -> None:
  """Raise UsageError if an observation space has keys that a data set cannot have."""
  try:
    check_keys(space)
  except UsageError as e:
    raise UsageError(f'{env}: its observation space {e}') from e


def record(
  source: str,
  recording: Recording,
  folder: Path,
  env: str = '',
  checkpoint: str = NEWEST,
  allow_code: Iterable[str] = (),
) -> dict[str, Any]:
  """Record episodes as a Minari data set in a new directory.

  Args:
    source: a run directory, or a preset, which has no policy; '' if `env` is enough.
    recording: the episodes.
    folder: the directory of the data set.
    env: another environment than that of `source`.
    checkpoint: newest, best or a step.
    allow_code: modules of the user that the run may import.

  Returns:
    Statistics of the episodes, and the directory.

  Raises:
    UsageError: if the directory exists, or the policy or environment does not fit.
    RunError: if an environment fails, or the data set cannot be written.
  """
  check_target(folder)
  check_directory(folder, '--to')
  config = _config(source, env, recording.way, allow_code)
  run_dir = Path(source) if recording.way == POLICY else None
  resolved = Resolved(config, run_dir).acting
  stage = stage_of(resolved, env if source else '')
  policy = _policy(resolved, recording, stage, run_dir, checkpoint)
  player = _Player(stage, recording, policy, config.env_deadline)
  _check_keys(stage.observation_space, name := env or config.env)
  about = {
    'algorithm_name': f'podrace {player.describe(run_dir)}',
    'podrace': {
      'version': __version__, 'env': name, 'noise': recording.noise, 'seed': recording.seed
    },
  }  # fmt: skip
  size = write_log(folder, stage.observation_space, stage.action_space, player.play(), about)
  returns = np.array(player.returns)
  return {
    'episodes': len(returns),
    'steps': player.steps,
    'episode_return_mean': float(returns.mean()),
    'episode_return_std': float(returns.std()),
    'bytes': size,
    'dataset': str(folder),
  }


def _config(source: str, env: str, way: str, allow_code: Iterable[str]) -> Config:
  """Return the configuration of a run, a preset or an environment."""
  if not source:
    architecture: Any = 'sebulba' if needs_sebulba(env) else 'anakin'
    return Config(agent=None, env=env, architecture=architecture)
  if source not in PRESETS or os.path.lexists(f'{source}/config.json'):
    return load_config(Path(source), allow_code)
  if way == POLICY:
    raise UsageError(
      f'the preset {source} has no policy: give --scripted or --random, or a run directory'
    )
  return PRESETS[source]()


def _policy(
  resolved: Resolved, recording: Recording, stage: Any, run_dir: Path | None, checkpoint: str
) -> Callable[[np.ndarray, int], Act]:
  """Return a function from the ids of environments [n] and a seed to their `Act`."""
  if recording.way == POLICY:
    assert run_dir is not None, 'a policy belongs to a run'
    return _trained(resolved, recording, run_dir, checkpoint)
  if recording.way == SCRIPTED:
    return _scripted(stage)
  return lambda ids, seed: lambda timestep, state, noise: noise.actions


def _trained(
  resolved: Resolved, recording: Recording, run_dir: Path, checkpoint: str
) -> Callable[[np.ndarray, int], Act]:
  agent = resolved.agent
  if recording.greedy:
    check_greedy(agent, 'leave out --greedy')
    agent = greedily(agent)
  _, params, _ = restore_params(resolved, run_dir, checkpoint, recording.member)
  spread = spread_env_ids(recording.episodes, resolved.config.num_envs)
  act = jax.jit(
    lambda params, state, timestep, key, noise: act_with(
      agent, params, state, timestep, key, noise.apply
    )
  )
  initial = jax.jit(agent.initial_state)

  def begin(ids: np.ndarray, seed: int) -> Act:
    state, key, t = initial(jnp.asarray(spread[ids % len(spread)])), acting_key(seed), 0

    def choose(timestep: Any, env_state: Any, noise: Noise) -> np.ndarray:
      nonlocal state, t
      output, state = act(params, state, timestep, jax.random.fold_in(key, t), noise)
      t += 1
      return np.asarray(output.action)

    return choose

  return begin


def _scripted(stage: Any) -> Callable[[np.ndarray, int], Act]:
  dynamics = getattr(stage, 'dynamics', stage)
  script = getattr(dynamics, 'scripted', None)
  if script is None:
    name = getattr(stage, 'name', type(dynamics).__name__)
    raise UsageError(f'--scripted: {name} has no method scripted(state, key) -> action')
  each = jax.jit(jax.vmap(script))

  def begin(ids: np.ndarray, seed: int) -> Act:
    key, t = acting_key(seed), 0

    def choose(timestep: Any, env_state: Any, noise: Noise) -> np.ndarray:
      nonlocal t
      inner = env_state.inner if isinstance(env_state, ResetState | PooledState) else env_state
      keys = jax.random.split(jax.random.fold_in(key, t), len(ids))
      t += 1
      return np.asarray(noise.apply(each(inner, keys)))

    return choose

  return begin


class _Player:
  """Plays rounds of episodes, of which each is the first one of an environment."""

  def __init__(
    self,
    stage: Any,
    recording: Recording,
    policy: Callable[[np.ndarray, int], Act],
    deadline: float,
  ) -> None:
    self._stage, self._recording, self._policy = stage, recording, policy
    self._deadline = deadline  # seconds that a step of an environment on the host may take
    self.returns: list[float] = []
    self.steps = 0
    if recording.way == RANDOM or recording.noise:
      _check_random(stage.action_space)

  def describe(self, run_dir: Path | None) -> str:
    """Return the policy in words."""
    r = self._recording
    plain = r.way if run_dir is None else f'{"greedy " if r.greedy else ""}policy of {run_dir.name}'
    return plain + (f', noise {r.noise:g}' if r.noise else '')

  def play(self) -> Iterator[list[Episode]]:
    """Yield the episodes of each round."""
    r = self._recording
    at_once = min(r.episodes, HOST_AT_ONCE)
    for first in range(0, r.episodes, at_once):
      ids = np.arange(first, first + at_once)
      episodes = self._round(ids)[: r.episodes - first]
      self.returns += [float(e.rewards.sum(dtype=np.float64)) for e in episodes]
      self.steps += sum(len(e.rewards) for e in episodes)
      yield episodes

  def _round(self, ids: np.ndarray) -> list[Episode]:
    seeds = (self._recording.seed + ids).astype(np.uint32)
    if not isinstance(self._stage, HostSpec):
      return self._episodes(self._jax_pool(len(ids), int(seeds[0])), ids, seeds)
    spec = self._stage
    args = PoolArgs(len(ids), len(ids), seeds, min(len(ids), cores()), self._deadline)
    watched: Any = WatchedPool(spec.name, spec.make(args), args.deadline)
    try:
      episodes: list[Episode] = watched.run(lambda: self._episodes(watched, ids, seeds))
    except HostError as e:
      raise RunError(f'{spec.name} failed: {e}') from e
    return episodes

  def _jax_pool(self, n: int, seed: int) -> JaxPool:
    if not hasattr(self, '_jax_steps'):
      self._jax_steps = JaxSteps(self._stage, n, length=256)
    reset_key, step_key = jax.random.split(jax.random.key(seed))
    return JaxPool(self._jax_steps, reset_key, lambda number: jax.random.fold_in(step_key, number))

  def _episodes(self, pool: Any, ids: np.ndarray, seeds: np.ndarray) -> list[Episode]:
    """Play one episode in each environment of a pool."""
    n, spec = len(ids), self._stage
    check = Checker(spec, n) if isinstance(spec, HostSpec) else None
    act, rng = self._policy(ids, int(seeds[0])), np.random.default_rng(seeds.tolist())
    timesteps: list[Any] = []
    actions: list[Any] = []
    lengths, run_id = np.full(n, -1), np.zeros(n, np.int64)
    pool.reset()
    for t in range(self._recording.max_steps + 1):
      arrival = pool.recv()
      if check is not None:
        check(arrival)
      timesteps.append(jax.tree.map(np.array, arrival.timestep))
      if ((arrival.run_id != run_id) & (lengths < 0)).any():
        raise RunError(f'{spec.name}: an environment failed and was restarted')
      lengths = np.where((lengths < 0) & (arrival.timestep.step_type == LAST), t, lengths)
      if (lengths >= 0).all() or t == self._recording.max_steps:
        break
      actions.append(self._choose(act, arrival.timestep, getattr(pool, 'state', None), rng))
      pool.send(np.arange(n, dtype=np.int32), actions[-1])
    lengths = np.where(lengths < 0, len(actions), lengths)
    stacked = jax.tree.map(lambda *xs: np.stack(xs), *timesteps)
    assert (stacked.step_type[0] == FIRST).all()
    return cut_episodes(spec.observation_space, stacked, np.stack(actions), lengths, seeds)

  def _choose(self, act: Act, timestep: Any, state: Any, rng: np.random.Generator) -> np.ndarray:
    space, n = self._stage.action_space, len(timestep.reward)
    if self._recording.way != RANDOM and not self._recording.noise:
      return act(
        timestep, state, Noise(np.zeros(n, bool), np.zeros((n, *space.shape), space.dtype))
      )
    drawn = random_actions(space, timestep.observation, n, rng)
    return act(timestep, state, Noise(rng.random(n) < self._recording.noise, drawn))


def _check_random(space: Any) -> None:
  low, high = action_bounds(space)
  if not (np.isfinite(low).all() and np.isfinite(high).all()):
    raise UsageError(f'random actions need bounds, and the action space is {space}')


def random_actions(space: Any, observation: Any, n: int, rng: np.random.Generator) -> np.ndarray:
  """Return actions [n, ...] drawn alike from a space, of choices within the action mask."""
  low, high = action_bounds(space)
  shape = (n, *space.shape)
  if np.issubdtype(space.dtype, np.floating):
    return rng.uniform(low, high, shape).astype(space.dtype)
  low, high = (np.asarray(x, np.int64) for x in (low, high))
  if (mask := allowed_choices(space, observation, n)) is not None:
    return best_choices(space, rng.random(mask.shape) * mask)
  return rng.integers(low, high, shape, endpoint=True).astype(space.dtype)
