"""A run that begins with the parameters of another one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax

from podrace import hooks
from podrace.errors import UsageError
from podrace.run.directory import load_config
from podrace.run.evaluate import evaluable, newest_params
from podrace.settings import user_code
from podrace.settings.config import Config
from podrace.settings.record import changes, option, to_json


def check_start(config: Config) -> Any:
  """The parameters [seeds or 1, ...] that a run begins with, of the newest checkpoint of `config.init_from`.

  Raises:
    UsageError: if there is no such run or no checkpoint, or if the parameters have other shapes.
  """
  source = Path(config.init_from)
  theirs = load_config(source, user_code.named_modules(to_json(config)))
  if theirs.seeds not in (1, config.seeds):
    raise UsageError(
      f'--init-from {source} has {theirs.seeds} seeds, this run {config.seeds}: it takes one of 1 seed, or of as many'
    )
  _check_units(source, theirs, config)
  params = newest_params(theirs, evaluable(theirs)[0], source)[1]
  if theirs.seeds == 1:
    params = jax.tree.map(lambda x: x[None], params)
  expected = jax.eval_shape(evaluable(config)[0].init, jax.random.key(0)).params
  _check(source, jax.tree.map(lambda x: x[0], params), expected)
  return params


def warm_started(config: Config, state: Any) -> Any:
  """A run's new state with the parameters of `check_start`; those of a run of one seed go to all seeds."""
  from podrace.run.build import agreement

  several, params, agree = config.seeds > 1, check_start(config), agreement(config)

  def of_all(x: Any) -> Any:
    return jax.numpy.broadcast_to(x, (config.seeds, *x.shape[1:])) if several else x[0]

  def start(train: Any, params: Any) -> Any:
    return agree.begun_from(train, lambda new: hooks.warm_start(config.agent, new, params))

  params = jax.tree.map(of_all, params)
  train = (jax.vmap(start) if several else start)(state.train, params)
  # Each leaf has memory of its own: an update takes all of it, and a target network has the parameters' arrays here.
  placed = jax.tree.map(
    lambda new, old: jax.device_put(new, old.sharding, may_alias=False), train, state.train
  )
  return state._replace(train=placed)


def _check_units(source: Path, theirs: Config, config: Config) -> None:
  """Raises UsageError where parameters were learned in other units of numbers than they would be used in."""
  was, now = (to_json(c, whole=True) for c in (theirs, config))
  for path, there, here in changes(was, now):
    if path.endswith('.scaling') and None not in (there, here):
      raise UsageError(
        f'--init-from {source}: its network has {option(path)} {there}, this one {here}, which are other units of '
        f'numbers: give {option(path)} {there}'
      )


def _check(source: Path, found: Any, expected: Any) -> None:
  """Raises UsageError where parameters differ in their names, shapes or dtypes."""
  ours, theirs = (
    {jax.tree_util.keystr(p): f'{x.dtype}{list(x.shape)}' for p, x in leaves}
    for leaves in map(jax.tree_util.tree_leaves_with_path, (expected, found))
  )
  wrong = [
    f'{name}: {theirs.get(name, "none")} there, {ours.get(name, "none")} here'
    for name in sorted(ours.keys() | theirs.keys())
    if ours.get(name) != theirs.get(name)
  ]
  if wrong:
    raise UsageError(
      f'--init-from {source}: its parameters do not fit this agent in this environment:\n  '
      + '\n  '.join(wrong)
    )
