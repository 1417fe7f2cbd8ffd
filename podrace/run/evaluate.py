"""Evaluation: episodes of a trained agent, each counted once, none favoured for being short."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from gymnasium import spaces
from jax import lax

from podrace import envs
from podrace.envs.base import batch
from podrace.envs.check import check_environment
from podrace.envs.host import base as host
from podrace.envs.host.base import HostSpec
from podrace.envs.spaces import STATE
from podrace.errors import CheckpointError, RunError, UsageError
from podrace.hooks import can_be_greedy, greedily
from podrace.run.checkpoint import Checkpoints
from podrace.run.directory import load_config
from podrace.run.evaluate_host import CHUNK, host_evaluator, spread
from podrace.settings.agents import bind_run
from podrace.settings.config import Config
from podrace.system.files import number
from podrace.types import Agent, Array, Environment

GREEDY, SAMPLED = 'greedy', 'sampled'  # ways of acting: the best action, or as in training
ACTING = (GREEDY, SAMPLED)

AT_ONCE = 512  # environments stepped together


def evaluator(
  agent: Agent,
  env: Environment,
  episodes: int,
  max_steps: int = 1_000_000,
  num_envs: int | None = None,
) -> Callable[[Any, Array], np.ndarray]:
  """A function from parameters and a key to the returns [episodes] f64 of environments' first episodes.

  It is compiled once. Taking the first episode of each, and not the first that end, keeps long ones in.
  The agent gets ids of a run of `num_envs` environments (None: of so many as there are
  episodes): an epsilon of each environment's own depends on that.

  Raises, when called:
    RunError: if an episode is still going after `max_steps`.
  """
  n, every = min(episodes, AT_ONCE), spread(episodes, num_envs or episodes)
  begin, chunk = _episodes(agent, env, n, max_steps)

  def some(params: Any, env_id: np.ndarray, key: Array) -> np.ndarray:
    """Of at most n environments; those that are there to fill up don't count."""
    counts = np.arange(n) < len(env_id)
    begin_key, run_key = jax.random.split(key)
    t, carry = jnp.int32(0), begin(jnp.asarray(np.resize(env_id, n)), counts, begin_key)
    while not np.all(carry[-1]):
      if t >= max_steps:
        raise RunError(
          f'{int(np.sum(~carry[-1]))} of {len(env_id)} episodes have not ended in {t} steps'
        )
      t, carry = chunk(params, carry, t, run_key)
    return np.asarray(carry[-2], np.float64)[counts]

  def evaluate(params: Any, key: Array) -> np.ndarray:
    return np.concatenate(
      [
        some(params, every[start : start + n], jax.random.fold_in(key, start))
        for start in range(0, episodes, n)
      ]
    )

  return evaluate


def _episodes(
  agent: Agent, env: Environment, n: int, max_steps: int
) -> tuple[Callable[..., Any], Callable[..., Any]]:
  """Compiled: the beginning of n episodes, and up to CHUNK steps of those that go on."""
  both = batch(env, n)

  @jax.jit
  def begin(env_id: Array, counts: Array, key: Array) -> Any:
    env_state, timestep = both.reset(key)
    return env_state, timestep, agent.initial_state(env_id), jnp.zeros([n]), ~counts

  def step(params: Any, carry: Any, key: Array) -> Any:
    env_state, timestep, state, total, done = carry
    act_key, env_key = jax.random.split(key)
    output, state = agent.act(params, state, timestep, act_key)
    env_state, timestep = both.step(env_state, output.action, jax.random.split(env_key, n))
    total = total + jnp.where(done, 0.0, timestep.reward)
    return env_state, timestep, state, total, done | timestep.last

  @functools.partial(jax.jit, donate_argnums=1)
  def chunk(params: Any, carry: Any, t: Array, key: Array) -> Any:
    def going(x: Any) -> Array:
      t, carry = x
      return (t % CHUNK != 0) & (t < max_steps) & ~jnp.all(carry[-1])

    def body(x: Any) -> Any:
      t, carry = x
      return t + 1, step(params, carry, jax.random.fold_in(key, t))

    return lax.while_loop(going, body, body((t, carry)))

  return begin, chunk


def evaluate(
  run_dir: Path,
  episodes: int,
  seed: int = 0,
  acting: Sequence[str] = ACTING,
  max_steps: int = 1_000_000,
  allow_code: Iterable[str] = (),
  change: Callable[[Config], Config] = lambda config: config,
  env: str = '',
  say: Callable[[str], None] = lambda text: None,
) -> dict[str, Any]:
  """Evaluates the newest good checkpoint of a run, in each way of `acting`, in as many episodes.

  Of several ways the first one's numbers have their plain names, the others' their way before them, as in
  sampled_episode_return_mean.

  `allow_code` names modules of the run's own, as in `load_config`; `change` makes other settings of the recorded ones.
  `env` names another environment to play in, with the same spaces; '' is the run's own. `say` is for a person who
  waits: compiling takes up to minutes.

  Raises:
    UsageError: if there is no run or no checkpoint, the run names other modules, or `env` has other spaces.
    RunError: if an environment fails, or does not end its episode.
  """
  _check_numbers(episodes, max_steps, seed)
  config = change(load_config(run_dir, allow_code))
  agent, made = evaluable(config)
  if env:
    made = elsewhere(config, made, env)
  if GREEDY in acting and not can_be_greedy(agent):
    raise UsageError(f'{type(agent).__name__} has no field greedy: evaluate it with --sample')
  step, params, skipped = newest_params(config, agent, run_dir)
  ways = ' and '.join(acting)
  say(f'step {step:,}, {env or config.env}: compiling, then {episodes:,} episodes, {ways} ...')
  result: dict[str, Any] = {}
  for way in acting:
    actor = greedily(agent) if way == GREEDY else agent
    by_seed = returns_of(config, actor, made, episodes, max_steps)(params, seed)
    prefix = '' if way == acting[0] else f'{way}_'
    result |= {f'{prefix}{name}': x for name, x in described(by_seed).items()}
  result['step'] = step
  if skipped:
    result['damaged_checkpoints_skipped'] = skipped
  return result


def _check_numbers(episodes: int, max_steps: int, seed: int) -> None:
  """Raise UsageError for a number out of bounds."""
  for name, value, least, most in (
    ('--episodes', episodes, 1, 2**31 - 1),
    ('--max-steps', max_steps, 1, 2**31 - 1),
    ('--seed', seed, 0, 2**32 - 1),
  ):
    if not least <= value <= most:
      bound = f'at least {least}' if value < least else f'at most {most}'
      raise UsageError(f'{name} must be {bound}, not {value}')


def evaluable(config: Config) -> tuple[Any, Any]:
  """The agent of a run, bound, and its environment, in JAX or a HostSpec; both checked."""
  env = _made(config)
  agent = bind_run(config, env)
  return agent, _checked(env)


def evaluated(config: Config) -> tuple[Any, Any]:
  """As `evaluable`, with the environment of `--eval-env`, if there is one.

  Raises:
    UsageError: if that has other spaces.
  """
  agent, own = evaluable(config)
  return agent, elsewhere(config, own, config.eval_env, '--eval-env') if config.eval_env else own


def elsewhere(config: Config, own: Any, env: str, option: str = '--env') -> Any:
  """Another environment than a run's `own`, for the agent that was bound to that one.

  Raises:
    UsageError: if it has other spaces.
  """
  other = _checked(_made(dataclasses.replace(config, env=env)))
  for kind in ('observation', 'action'):
    ours, theirs = (getattr(x, f'{kind}_space') for x in (own, other))
    if ours == theirs:
      continue
    shown = [isinstance(x, spaces.Dict) and STATE in x.spaces for x in (ours, theirs)]
    advice = (
      f'; give {option} {env},state=true' if shown == [True, False] else f': {theirs}, not {ours}'
    )
    raise UsageError(
      f'{option} {env} has another {kind} space than {config.env}, where the agent has learned{advice}'
    )
  return other


def _made(config: Config) -> Any:
  return host.make(config.env) if config.architecture == 'sebulba' else envs.make(config.env)


def _checked(env: Any) -> Any:
  """The environment itself, of a HostSpec that has one in JAX."""
  if isinstance(env, HostSpec) and env.jax is not None:
    env = env.jax
  if not isinstance(env, HostSpec):
    check_environment(env)
  return env


def described(by_seed: list[np.ndarray]) -> dict[str, Any]:
  """What is said of the returns of each seed."""
  returns = np.concatenate(by_seed)
  found: dict[str, Any] = {
    'episode_return_mean': number(returns.mean()),
    'episode_return_std': number(returns.std()),
    'episodes': len(returns),
  }
  if len(by_seed) > 1:
    found['episode_return_mean_by_seed'] = [number(r.mean()) for r in by_seed]
  return found


def summarised(result: dict[str, Any], acting: Sequence[str] = ACTING) -> str:
  """A result of `evaluate` in a line, for people."""
  parts = []
  for way in acting:
    prefix = '' if way == acting[0] else f'{way}_'
    mean, std = (result[f'{prefix}episode_return_{x}'] for x in ('mean', 'std'))
    value = 'not finite' if mean is None or std is None else f'{mean:.2f} ± {std:.2f}'
    parts.append(f'{way} {value}')
  count = f'{result["episodes"]:,} episodes' + (' each' if len(acting) > 1 else '')
  return f'return: {", ".join(parts)} ({count}, step {result["step"]:,})'


def returns_of(
  config: Config, agent: Agent, env: Any, episodes: int, max_steps: int = 1_000_000
) -> Callable[[Any, int], list[np.ndarray]]:
  """From parameters and a seed to the returns [episodes] of each seed of a run, wherever its environments are."""
  if isinstance(env, HostSpec):
    play = host_evaluator(agent, env, episodes, max_steps, config.num_envs, config.env_deadline)
    return lambda params, seed: [play(params, seed)]
  returns = evaluator(agent, env, episodes, max_steps, config.num_envs)

  def by_seed(params: Any, seed: int) -> list[np.ndarray]:
    if config.seeds == 1:  # its parameters have no axis of seeds
      params = jax.tree.map(lambda x: x[None], params)
    key = jax.random.key(seed)
    return [
      returns(jax.tree.map(lambda x, i=i: x[i], params), jax.random.fold_in(key, i))
      for i in range(config.seeds)
    ]

  return by_seed


def newest_params(config: Config, agent: Agent, run_dir: Path) -> tuple[int, Any, list[int]]:
  """The newest parameters of a run that are whole: their step, they, and what was skipped."""
  device = jax.local_devices()[0]
  keys = jax.eval_shape(lambda: jax.random.split(jax.random.key(0), config.seeds))

  def params(keys: Array) -> Any:
    return jax.vmap(agent.init)(keys).params if config.seeds > 1 else agent.init(keys[0]).params

  one = jax.sharding.SingleDeviceSharding(device)
  shapes = jax.tree.map(
    lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=one), jax.eval_shape(params, keys)
  )
  if not (run_dir / 'checkpoints').is_dir():
    raise UsageError(f'{run_dir} has no checkpoints yet')
  checkpoints = Checkpoints(run_dir / 'checkpoints', writes=False)
  skipped: list[int] = []
  reason = ''
  for step in checkpoints.steps():
    try:
      return step, checkpoints.restore(step, shapes).params, skipped
    except CheckpointError as e:
      skipped.append(step)
      reason = reason or str(e)  # the newest's
  if not skipped:
    raise UsageError(f'{run_dir} has no checkpoint yet')
  raise RunError(f'none of the {len(skipped)} checkpoints in {run_dir} can be read: {reason}')
