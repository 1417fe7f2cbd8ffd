"""All settings in one Anakin program, and population-based training there."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from podrace import hooks
from podrace.agents.population import Varied, with_values
from podrace.envs.base import batch
from podrace.errors import UsageError
from podrace.experiments.sweep.settings import Setting, Spaces
from podrace.fields import replace_paths
from podrace.run import loop
from podrace.run.build import build
from podrace.run.metrics import Line
from podrace.settings.config import Config
from podrace.settings.resolved import resolve
from podrace.system.files import number, write_whole
from podrace.types import TrainState, Trajectory

SHARE = 0.25  # share of a population that is replaced, and that replaces
FACTORS = (0.8, 1.25)  # factors of a replaced member's hyper-parameters


def why_not(config: Config, settings: list[Setting]) -> str:
  """Return the reason why the settings cannot be one program, or ''."""
  if config.architecture != 'anakin':
    return f'{config.env} runs under {config.architecture}'
  if config.agree == 'gossip':
    return 'with gossip each device has an agent of its own'
  for name in settings[0]:
    path = field_path(name)
    if not name.startswith('agent.') or not isinstance(_get_value(config.agent, path), float):
      return f'{name} is no number with a fraction of the agent'
    if path.startswith('buffer.'):
      return f'replay reads {name}'
  try:
    _act_without(config, [field_path(name) for name in settings[0]])
  except (_FieldRead, TypeError):
    return f'acting or replay reads {" or ".join(settings[0])}'
  try:
    build(vary(config, settings[:2]))
  except (jax.errors.ConcretizationTypeError, TypeError, UsageError) as e:
    return (
      f'the agent needs {" or ".join(settings[0])} when it is compiled ({str(e).splitlines()[0]})'
    )
  return ''


class _FieldRead(Exception):
  """A field was read that acting must not read."""


class _Guard:
  """Placeholder of a value. Any use raises _FieldRead."""

  def _fail(self, *args: Any) -> Any:
    raise _FieldRead

  __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __truediv__ = __rtruediv__ = _fail
  __pow__ = __rpow__ = __neg__ = __bool__ = __float__ = __int__ = __index__ = __jax_array__ = _fail
  __lt__ = __le__ = __gt__ = __ge__ = __eq__ = __ne__ = __array__ = _fail
  __hash__ = None  # type: ignore[assignment]


def _act_without(config: Config, paths: list[str]) -> None:
  """Trace the agent's acting, and its replay of it, without access to fields.

  Members share all but parameters.

  Raises:
    _FieldRead, TypeError: if they read one.
  """
  resolved = resolve(config)
  agent, env = resolved.agent, resolved.env
  unread = _guard(agent, paths)
  n, length = config.num_envs, config.unroll_length
  replay = hooks.memory(unread, env, n, length)

  def remember(key: Any) -> Any:
    params, (_, timestep), ids = agent.init(key).params, batch(env, n).reset(key), jnp.arange(n)
    state = unread.initial_state(ids)
    output, _ = unread.act(params, state, timestep, key)
    steps, outputs = (
      jax.tree.map(lambda x, times=times: jnp.broadcast_to(x, (times, *x.shape)), tree)
      for tree, times in ((timestep, length + 1), (output, length))
    )
    trajectory = Trajectory(steps, outputs, state, ids)
    return replay.add(replay.init(trajectory), trajectory)

  with jax.debug_key_reuse(False):
    jax.eval_shape(remember, jax.random.key(0))


def _guard(agent: Any, paths: list[str]) -> Any:
  """Return an agent, or the one that it wraps, without access to fields."""
  if hasattr(agent, 'agent'):
    return with_values(agent, {'agent': _guard(agent.agent, paths)})
  return with_values(agent, dict.fromkeys(paths, _Guard()))


def field_path(name: str) -> str:
  """Return the path of an agent's field from its option."""
  path = name.removeprefix('agent.').replace('-', '_')
  return 'lambda_' if path == 'lambda' else path


def _get_value(settings: Any, path: str) -> Any:
  for name in path.split('.'):
    if not hasattr(settings, name):
      raise UsageError(f'--vary agent.{path}: {type(settings).__name__} has no field {name}')
    settings = getattr(settings, name)
  return settings


def vary(config: Config, settings: list[Setting]) -> Config:
  """Return a configuration of all settings, each with the seeds of `config`.

  Raises:
    UsageError: if the agent refuses a setting.
  """
  paths = tuple(map(field_path, settings[0]))
  for setting in settings:  # the agent checks each setting
    try:
      replace_paths(config.agent, {field_path(n): float(v) for n, v in setting.items()})
    except (ValueError, TypeError) as e:
      raise UsageError(f'--vary {setting}: {e}') from e
  values = tuple(float(v) for setting in settings for v in setting.values())
  agent = Varied(config.agent, paths, values)
  return dataclasses.replace(config, agent=agent, seeds=config.seeds * len(settings))


def train(
  config: Config, settings: list[Setting], run_dir: Path, population: Population | None, quiet: bool
) -> tuple[list[list[float | None]], list[bool]]:
  """Train or resume all settings.

  Returns:
    The returns of each setting's seeds, and whether one of them diverged.
  """
  callbacks = [] if population is None else [population]
  population_config = vary(config, settings)
  summary = loop.train(population_config, run_dir, quiet=quiet, callbacks=callbacks)
  returns = summary.get('episode_return_by_seed') or [summary['episode_return']]
  each = config.seeds
  diverged = {i // each for i in summary.get('diverged', ())}
  of_settings = [returns[i : i + each] for i in range(0, len(returns), each)]
  return of_settings, [i in diverged for i in range(len(settings))]


class Population:
  """Population-based training (Jaderberg et al. 2017, arXiv 1711.09846), as a callback.

  At each line, the worst quarter of the members by their returns since the last line copy the
  learned values and hyper-parameters of members of the best quarter, and multiply each
  hyper-parameter by 0.8 or 1.25. Environments go on. Random draws depend on the seed and the step,
  so a resumed run is the same.

  Args:
    spaces: of the hyper-parameters.
    seed: of the random draws.
    file: keeps the history.
  """

  def __init__(self, spaces: Spaces, seed: int, file: Path) -> None:
    self._file = file
    self._spaces = {field_path(name): space for name, space in spaces.items()}
    self._seed = seed
    self.history: list[dict[str, Any]] = []  # step, from, to and values of each change

  def __call__(self, line: Line) -> None:
    """Ignore the line: `transform` uses it."""

  def state(self) -> Any:
    """Return the history, to be saved."""
    return self.history

  def restore(self, state: Any) -> None:
    """Restore the history."""
    self.history = state

  def transform(self, train: TrainState, line: Line) -> TrainState:
    """Replace the worst members."""
    returns = np.array([-np.inf if r is None else r for r in line['episode_return_by_seed']])
    for x in train.rest.values.values():
      returns[np.isnan(np.array(x))] = -np.inf  # a member that has diverged
    if not np.isfinite(returns).any():
      return train
    count = max(1, int(SHARE * len(returns)))
    order = np.argsort(returns, kind='stable')
    rng = np.random.default_rng([self._seed, line['step']])
    source = np.arange(len(returns))
    worst, best = order[:count], order[-count:]
    source[worst] = rng.choice(best[np.isfinite(returns[best])], count)
    train = jax.tree.map(lambda x: x[source], train)
    values = {name: np.array(x) for name, x in train.rest.values.items()}
    for name, space in self._spaces.items():
      changed = values[name][worst] * rng.choice(FACTORS, count)
      values[name][worst] = np.clip(changed, *space.bounds)
    change = {
      'step': line['step'], 'from': source[worst].tolist(), 'to': worst.tolist(),
      'values': {name: [number(v) for v in x] for name, x in values.items()},
    }  # fmt: skip
    write_whole(self._file, json.dumps([*self.history, change]) + '\n')
    self.history = [*self.history, change]
    new = {name: jax.numpy.asarray(x, jax.numpy.float32) for name, x in values.items()}
    return train._replace(rest=train.rest._replace(values=new))
