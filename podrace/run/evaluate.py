"""Evaluation of trained agents. Each episode counts once, short or long."""

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

from podrace.envs.base import batch
from podrace.envs.check import check_environment
from podrace.envs.host.base import HostSpec
from podrace.envs.host.spaces import i32
from podrace.envs.logs.recorded_spaces import check_spaces
from podrace.envs.spaces import STATE, convert
from podrace.errors import RunError, UsageError
from podrace.hooks import check_greedy, greedily
from podrace.run.directory import load_config
from podrace.run.evaluate_host import CHUNK, make_host_evaluator, spread_env_ids
from podrace.run.saved_params import param_shapes, restore_params
from podrace.settings.config import Config
from podrace.settings.record import argument, changes, option, to_json
from podrace.settings.resolved import Resolved
from podrace.system.files import number
from podrace.system.files.schema import NEWEST
from podrace.types import Agent, Array, Environment

GREEDY, SAMPLED = 'greedy', 'sampled'  # ways of acting: the best action, or sampled as in training
ACTING = (GREEDY, SAMPLED)

AT_ONCE = 512  # environments stepped at once


def make_evaluator(
  agent: Agent,
  env: Environment,
  episodes: int,
  max_steps: int = 1_000_000,
  num_envs: int | None = None,
) -> Callable[[Any, Array], np.ndarray]:
  """Return a function that evaluates parameters in JAX environments.

  The function takes parameters and a key, and returns the returns [episodes] f64. It is compiled
  once. The first episode of each environment counts. The first episodes to end would favour short
  ones.

  Args:
    agent: bound agent.
    env: environment to play in.
    episodes: number of episodes.
    max_steps: longest episode. The function raises RunError if one takes longer.
    num_envs: number of environments of the run, over which ids are spread. An exploration rate may
      depend on the id. Default: `episodes`.
  """
  n, env_ids = min(episodes, AT_ONCE), spread_env_ids(episodes, num_envs or episodes)
  begin, chunk = _compile_episodes(agent, env, n, max_steps)

  def evaluate_round(params: Any, env_id: np.ndarray, key: Array) -> np.ndarray:
    """Evaluate at most n environments. Padding environments do not count."""
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
        evaluate_round(params, env_ids[start : start + n], jax.random.fold_in(key, start))
        for start in range(0, episodes, n)
      ]
    )

  return evaluate


def _compile_episodes(
  agent: Agent, env: Environment, n: int, max_steps: int
) -> tuple[Callable[..., Any], Callable[..., Any]]:
  """Compile the start of n episodes, and up to CHUNK steps of the unfinished ones."""
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
  config: Config | None = None,
  env: str = '',
  say: Callable[[str], None] = lambda text: None,
  checkpoint: str | int = NEWEST,
  member: int | None = None,
) -> dict[str, Any]:
  """Evaluate a checkpoint of a run.

  Args:
    run_dir: directory of the run.
    episodes: number of episodes for each way of acting.
    seed: seed of the environments and actions.
    acting: subset of ACTING. Results of all but the first are named like sampled_episodes.
    max_steps: longest episode.
    allow_code: modules of the user that the run may import, as in `load_config`.
    config: configuration of the run. Default: the recorded one.
    env: another environment with the same spaces. Default: the run's own.
    say: receives progress messages, because compilation may take minutes.
    checkpoint: newest, best or a step, as in `restore_params`.
    member: index of a seed of the run. Default: all seeds.

  Returns:
    Statistics of the returns, the step, and damaged checkpoints that were skipped.

  Raises:
    UsageError: if there is no checkpoint, or a module or `env` is refused.
    RunError: if an environment fails, or does not end its episode.
  """
  check_numbers(episodes, max_steps, seed)
  resolved = Resolved(config or load_config(run_dir, allow_code), run_dir).acting
  config, stage = resolved.config, stage_of(resolved, env)
  check_acting(resolved.agent, acting)
  step, params, skipped = restore_params(resolved, run_dir, checkpoint, member)
  config = config if member is None else dataclasses.replace(config, seeds=1)
  plan = f'{episodes:,} episodes, {" and ".join(acting)}'
  say(f'step {step:,}, {env or config.env}: compiling, then {plan} ...')
  result: dict[str, Any] = {}
  for way in acting:
    actor = greedily(resolved.agent) if way == GREEDY else resolved.agent
    returns = make_returns(config, actor, stage, episodes, max_steps)(params, seed)
    result |= _name_statistics(summarize_returns(returns), '' if way == acting[0] else f'{way}_')
  result['step'] = step
  return result | ({'damaged_checkpoints_skipped': skipped} if skipped else {})


def check_shapes(run_dir: Path, recorded: Config, changed: Config) -> None:
  """Raise UsageError if changed settings give the network other parameters than a run has."""
  run, other = (Resolved(config, run_dir).acting for config in (recorded, changed))
  was, now = (jax.tree.flatten(param_shapes(x)) for x in (run, other))
  if was != now:
    old, new = (to_json(x.config, whole=True) for x in (run, other))
    settings = (f'{option(c.path)} {argument(c.new)}' for c in changes(old, new))
    raise UsageError(
      f'{", ".join(settings)}: the parameters of {run_dir} have other shapes than this network '
      'has: leave it out'
    )


def _name_statistics(statistics: dict[str, Any], prefix: str) -> dict[str, Any]:
  return {f'{prefix}{name}': x for name, x in statistics.items()}


def check_acting(agent: Any, acting: Sequence[str]) -> None:
  """Raise UsageError for a way of acting that is unknown, or that the agent does not have."""
  if strange := [way for way in acting if way not in ACTING]:
    raise UsageError(f'acting must be greedy or sampled, not {strange[0]!r:.100}')
  if GREEDY in acting:
    check_greedy(agent, 'evaluate it with --sample')


def check_numbers(episodes: int, max_steps: int, seed: int) -> None:
  """Raise UsageError for a number out of bounds."""
  for name, value, low, high in (
    ('--episodes', episodes, 1, 2**31 - 1),
    ('--max-steps', max_steps, 1, 2**31 - 1),
    ('--seed', seed, 0, 2**32 - 1),
  ):
    if not low <= value <= high:
      bound = f'at least {low}' if value < low else f'at most {high}'
      raise UsageError(f'{name} must be {bound}, not {value}')


def acting_key(seed: int) -> Any:
  """Return the key of acting, which differs from each key of the environments.

  Environments take the two keys of `jax.random.split(key)`. They equal `fold_in(key, 0)` and
  `fold_in(key, 1)`.
  """
  return jax.random.fold_in(jax.random.key(seed), 2)


def stage_of(resolved: Resolved, name: str = '') -> Any:
  """Return `eval_env`; raises UsageError also for a run that has no environment."""
  if not (name or resolved.config.env):
    raise UsageError(
      f'this run learned from the log {resolved.config.log} and has no environment: podrace eval '
      'and podrace record take --env LIB:NAME, one with the same spaces'
    )
  return eval_env(resolved, name)


def eval_env(resolved: Resolved, name: str = '', option: str = '--env') -> Any:
  """Return the checked environment to play in, in JAX if possible, else a HostSpec.

  Args:
    resolved: the configuration of the run.
    name: another environment with the same spaces. Default: the run's own.
    option: the option that names it, for messages.

  Raises:
    UsageError: if it has other spaces.
  """
  trained = resolved.env if not resolved.config.env else _check_env(resolved.env)
  if not name:
    return trained
  env = _check_env(resolved.make_env(name))
  if not resolved.config.env:
    check_spaces(trained, env, name)
    return env
  for kind in ('observation', 'action'):
    trained_space, space = (getattr(x, f'{kind}_space') for x in (trained, env))
    if convert(i32, trained_space) == convert(i32, space):
      continue
    has_state = [isinstance(x, spaces.Dict) and STATE in x.spaces for x in (trained_space, space)]
    advice = (
      f'; give {option} {name},state=true'
      if has_state == [True, False]
      else f': {space}, not {trained_space}'
    )
    raise UsageError(
      f'{option} {name} has another {kind} space than {resolved.config.env}, where the agent has '
      f'learned{advice}'
    )
  return env


def _check_env(env: Any) -> Any:
  """Check an environment, and replace a HostSpec by its JAX environment if it has one."""
  if isinstance(env, HostSpec) and env.jax is not None:
    env = env.jax
  if not isinstance(env, HostSpec):
    check_environment(env)
  return env


def summarize_returns(by_seed: list[np.ndarray]) -> dict[str, Any]:
  """Return mean, standard deviation and number of the returns, given by seed."""
  returns = np.concatenate(by_seed)
  summary: dict[str, Any] = {
    'episode_return_mean': number(returns.mean()),
    'episode_return_std': number(returns.std()),
    'episodes': len(returns),
  }
  if len(by_seed) > 1:
    summary['episode_return_mean_by_seed'] = [number(r.mean()) for r in by_seed]
  return summary


def format_result(result: dict[str, Any], acting: Sequence[str] = ACTING) -> str:
  """Return a result of `evaluate` as one line of text."""
  parts = []
  for way in acting:
    prefix = '' if way == acting[0] else f'{way}_'
    mean, std = (result[f'{prefix}episode_return_{x}'] for x in ('mean', 'std'))
    value = 'not finite' if mean is None or std is None else f'{mean:.2f} ± {std:.2f}'
    parts.append(f'{way} {value}')
  count = f'{result["episodes"]:,} episodes' + (' each' if len(acting) > 1 else '')
  return f'return: {", ".join(parts)} ({count}, step {result["step"]:,})'


def make_returns(
  config: Config, agent: Agent, env: Any, episodes: int, max_steps: int = 1_000_000
) -> Callable[[Any, int], list[np.ndarray]]:
  """Return a function from parameters and a seed to the returns [episodes] of each seed."""
  play = _make_play(config, agent, env, episodes, max_steps)

  def by_seed(params: Any, seed: int) -> list[np.ndarray]:
    if config.seeds == 1:  # such parameters have no seed axis
      params = jax.tree.map(lambda x: x[None], params)
    return [play(jax.tree.map(lambda x, i=i: x[i], params), seed, i) for i in range(config.seeds)]

  return by_seed


def _make_play(
  config: Config, agent: Agent, env: Any, episodes: int, max_steps: int
) -> Callable[[Any, int, int], np.ndarray]:
  """Return a function from parameters, a seed and the index of a member to returns [episodes]."""
  if isinstance(env, HostSpec):
    host = make_host_evaluator(
      agent, env, episodes, max_steps, config.num_envs, config.env_deadline
    )
    return lambda params, seed, member: host(params, (seed + member) % 2**32)
  play = make_evaluator(agent, env, episodes, max_steps, config.num_envs)
  return lambda params, seed, member: play(params, jax.random.fold_in(jax.random.key(seed), member))
