"""A run that begins with the parameters of another run (--init-from)."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import jax

from podrace import hooks
from podrace.errors import UsageError
from podrace.run.build import agreement
from podrace.run.directory import load_config
from podrace.run.saved_params import restore_params
from podrace.settings import user_code
from podrace.settings.agents import agent_name
from podrace.settings.config import Config
from podrace.settings.record import changes, option, to_json
from podrace.settings.resolved import Resolved


class WarmStart:
  """The parameters that a run begins with, of a checkpoint of `config.init_from`."""

  def __init__(self, resolved: Resolved) -> None:
    self._config, self._agent = resolved.config, resolved.agent
    self.origin = ''  # of `params`, once they are read

  @functools.cached_property
  def params(self) -> Any:
    """Parameters with a leading axis of seeds, [seeds, ...] or [1, ...]. They are read once.

    Raises:
      UsageError: if there is no such run or checkpoint, or if its parameters have other shapes.
    """
    config, source = self._config, Path(self._config.init_from)
    allowed = user_code.ALLOWED.union(user_code.named_modules(to_json(config)))
    other = load_config(source, allowed)
    member = config.init_member
    if member is None and other.seeds not in (1, config.seeds):
      raise UsageError(
        f'--init-from {source} has {other.seeds} seeds, this run {config.seeds}: give '
        f'--init-member 0 to {other.seeds - 1}, or --seeds {other.seeds}'
      )
    _check_units(source, other, config)
    saved = restore_params(Resolved(other, source).acting, source, config.init_checkpoint, member)
    seed = '' if member is None else f', seed {member}'
    self.origin = f'{source} at step {saved.step:,}{seed}'
    params = saved.params
    if other.seeds == 1 or member is not None:
      params = jax.tree.map(lambda x: x[None], params)
    expected = jax.eval_shape(self._agent.init, jax.random.key(0)).params
    names = [agent_name(hooks.innermost(c.agent)) for c in (other, config)]
    hint = '' if names[0] == names[1] else f'the run is of {names[0]}, this one of {names[1]}: '
    _check_shapes(source, jax.tree.map(lambda x: x[0], params), expected, hint)
    return params

  def apply(self, state: Any) -> Any:
    """Return a new run's state with these parameters. Parameters of one seed go to all seeds."""
    seeds, agent, agree = self._config.seeds, self._config.agent, agreement(self._config)

    def fit_seeds(x: Any) -> Any:
      return jax.numpy.broadcast_to(x, (seeds, *x.shape[1:])) if seeds > 1 else x[0]

    def start(train: Any, params: Any) -> Any:
      return agree.begin_from(train, lambda new: hooks.warm_start(agent, new, params))

    params = jax.tree.map(fit_seeds, self.params)
    train = (jax.vmap(start) if seeds > 1 else start)(state.train, params)
    # Updates donate each leaf, so no two leaves may share memory. Here target networks still have
    # the parameters' arrays.
    placed = jax.tree.map(
      lambda new, old: jax.device_put(new, old.sharding, may_alias=False), train, state.train
    )
    return state._replace(train=placed)


def _check_units(source: Path, other: Config, config: Config) -> None:
  """Raise UsageError if observations were scaled otherwise when the parameters were learned."""
  was, now = (to_json(c, whole=True) for c in (other, config))
  for path, there, here in changes(was, now):
    if path.endswith('.scaling') and None not in (there, here):
      raise UsageError(
        f'--init-from {source}: its network has {option(path)} {there}, this one {here}, which are '
        f'other units of numbers: give {option(path)} {there}'
      )


def _check_shapes(source: Path, params: Any, expected: Any, hint: str) -> None:
  """Raise UsageError, with a hint, if parameters differ in their names, shapes or dtypes."""
  ours, theirs = (
    {jax.tree_util.keystr(p): f'{x.dtype}{list(x.shape)}' for p, x in leaves}
    for leaves in map(jax.tree_util.tree_leaves_with_path, (expected, params))
  )
  wrong = [
    f'{name}: {theirs.get(name, "none")} there, {ours.get(name, "none")} here'
    for name in sorted(ours.keys() | theirs.keys())
    if ours.get(name) != theirs.get(name)
  ]
  if wrong:
    raise UsageError(
      f'--init-from {source}: its parameters do not fit this agent in this environment, '
      f'{len(wrong)} arrays differ:\n  {"; ".join(wrong[:3])}{", ..." if wrong[3:] else ""}\n'
      f'{hint}give its agent and settings of the network, and an environment with its spaces'
    )
