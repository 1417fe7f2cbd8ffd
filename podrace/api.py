"""The Python interface: configure a run, train, read its results."""

from __future__ import annotations

import dataclasses
import signal
import warnings
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from podrace.errors import Stopped, UsageError, unknown
from podrace.fields import check_types, mismatch
from podrace.run import loop, metrics
from podrace.run.callbacks import Callback
from podrace.run.directory import continued, load_config, read_summary
from podrace.run.new_directory import name_run, run_directory
from podrace.settings.agents import agent_name, default_agent
from podrace.settings.config import Config
from podrace.settings.defaults import reset_unused, with_defaults
from podrace.settings.presets import PRESETS
from podrace.settings.validation import needs_sebulba
from podrace.system.importing import why_not

if TYPE_CHECKING:
  import pandas as pd


@dataclasses.dataclass(frozen=True)
class Result:
  """A finished run.

  Example:
    result = podrace.train('catch')
    print(result.summary['episode_return'], result.frame.tail())
  """

  run_dir: Path
  config: Config
  summary: dict[str, Any]  # the contents of summary.json

  @classmethod
  def load(cls, run_dir: Path | str, allow_code: Iterable[str] = ()) -> Result:
    """Return a finished run of an earlier process.

    Args:
      run_dir: its directory.
      allow_code: modules of the user that the run may import, as `--allow-code`.

    Raises:
      UsageError: if there is no run, it is not finished, or it names other code.
    """
    path = Path(run_dir)
    config = load_config(path, allow_code)
    if (summary := read_summary(path / 'summary.json', warnings.warn)) is None:
      raise UsageError(f'{path} is not finished: podrace.train goes on with it')
    return cls(path, config, summary)

  @property
  def metrics(self) -> list[dict[str, Any]]:
    """The lines of metrics.jsonl."""
    return metrics.read(self.run_dir / 'metrics.jsonl')

  @property
  def evaluations(self) -> list[dict[str, Any]]:
    """The lines of eval.jsonl, which a run with `eval_every` writes."""
    return metrics.read(self.run_dir / 'eval.jsonl')

  @property
  def frame(self) -> pd.DataFrame:
    """The metrics as a pandas DataFrame, a row for each line.

    Raises:
      UsageError: if pandas is not installed.
    """
    try:
      import pandas as pd
    except Exception as e:
      raise UsageError(why_not('frame, unlike metrics,', 'pandas', e)) from e
    return pd.DataFrame(self.metrics)

  def evaluate(
    self,
    episodes: int = 100,
    seed: int = 0,
    checkpoint: str | int = 'newest',
    env: str = '',
    acting: str = '',
  ) -> dict[str, Any]:
    """Return the returns of a checkpoint, as `podrace eval` does.

    Args:
      episodes: number of episodes, for each seed and way of acting.
      seed: seed of the evaluation.
      checkpoint: newest, best or a step.
      env: another environment with the same spaces, for example after learning from a log alone.
      acting: greedy or sampled. Default: both, if the agent can act greedily.

    Raises:
      UsageError: if there is no such checkpoint, environment or way of acting, or an argument has a
        wrong type.
      RunError: if an environment fails, or does not end its episode.
    """
    from podrace.hooks import can_be_greedy
    from podrace.run.evaluate import ACTING, GREEDY, evaluate

    _check_arguments(int, episodes=episodes, seed=seed)
    _check_arguments(str, env=env, acting=acting)
    _check_arguments(str | int, checkpoint=checkpoint)
    greedy = can_be_greedy(self.config.agent)
    ways = [acting] if acting else [way for way in ACTING if greedy or way != GREEDY]
    return evaluate(
      self.run_dir, episodes, seed, ways, env=env, checkpoint=checkpoint, config=self.config
    )

  def export(
    self, folder: Path | str, member: int = 0, checkpoint: str | int = 'newest'
  ) -> dict[str, Any]:
    """Write the policy to a new directory for `podrace.load_policy`; return its policy.json.

    Args:
      folder: the new directory.
      member: index of the seed, in a run with several seeds.
      checkpoint: newest, best or a step.

    Raises:
      UsageError: if there is no such seed or checkpoint, the directory exists, or an argument has a
        wrong type.
    """
    from podrace.policy.export import export

    _check_arguments(int, member=member)
    _check_arguments(str | int, checkpoint=checkpoint)
    return export(self.run_dir, Path(folder), member, checkpoint=checkpoint, config=self.config)


def _check_arguments(declared: Any, **arguments: Any) -> None:
  """Raise UsageError for the first argument that does not have the type `declared`."""
  for name, value in arguments.items():
    if wrong := mismatch(value, declared):
      raise UsageError(f'{name} must be {wrong}, not {value!r:.100}')


def configure(preset: str | None = None, **settings: Any) -> Config:
  """Return the configuration of a preset, or of an environment and an agent, as `podrace train`.

  Args:
    preset: the name of a preset. None: the defaults of an agent in that kind of environment, or
      catch if neither an agent, an environment nor a log is named.
    **settings: fields of `Config`. `agent` is an agent, its name, or a dictionary of changes.

  Raises:
    UsageError: for an unknown name or an invalid value.

  Example:
    configure('cartpole', seeds=4, agent={'learning_rate': 3e-4, 'network': {'hidden': (64,)}})
  """
  if preset is not None and preset not in PRESETS:
    raise unknown('preset', preset, PRESETS)
  if names := settings.keys() - {f.name for f in dataclasses.fields(Config)}:
    raise unknown('setting', min(names), [f.name for f in dataclasses.fields(Config)])
  agent = settings.pop('agent', None)
  _check_kinds(agent, settings)
  own = None if isinstance(agent, str | dict | None) else agent
  changes = agent if isinstance(agent, dict) else {}
  if preset is None and isinstance(agent, dict | None) and not {'env', 'log'} & settings.keys():
    preset = 'catch'
  if preset is None:
    config = Config(agent=default_agent('impala'))
    if 'log' in settings:
      settings = {'env': ''} | settings  # the spaces are the log's
  else:
    config = PRESETS[preset]()
    config = dataclasses.replace(config, **reset_unused(config, settings))
  differs = isinstance(agent, str) and agent != agent_name(config.agent)
  if differs or own is not None:
    chosen = default_agent(agent) if differs else own
    config = dataclasses.replace(config, agent=chosen)
  if preset is None or differs:
    of = settings.get('env', config.env), settings.get('log', config.log)
    config = with_defaults(config, *of)
  if own is not None:
    config = dataclasses.replace(config, agent=own)
  if 'architecture' not in settings:
    needs = {name: settings.get(name, getattr(config, name)) for name in ('env', 'envs', 'replay')}
    settings |= {'architecture': 'sebulba'} if needs_sebulba(**needs) else {}
  try:
    agent = _replace_nested(config.agent, changes)
    config = _plain(dataclasses.replace(config, **settings, agent=agent))
    check_types(config)
  except ValueError as e:
    raise UsageError(str(e)) from e
  return config


def _check_kinds(agent: Any, settings: dict[str, Any]) -> None:
  """Raise UsageError for an agent or a name of a wrong type."""
  if isinstance(agent, type):
    raise UsageError(f'agent is the class {agent.__name__}, expected an agent: {agent.__name__}()')
  if not (agent is None or isinstance(agent, str | dict) or dataclasses.is_dataclass(agent)):
    raise UsageError(f'agent is {agent!r:.100}, expected an agent, its name or a dict of changes')
  for name in ('env', 'envs', 'replay', 'log'):
    if not isinstance(value := settings.get(name, ''), str):
      raise UsageError(f'{name} is {value!r:.100}, expected a text')


def _replace_nested(settings: Any, changes: dict[str, Any]) -> Any:
  """Return a dataclass with changes; a dictionary changes fields of the dataclass in a field."""
  names = [f.name for f in dataclasses.fields(settings)]
  if wrong := [name for name in changes if not isinstance(name, str)]:
    raise UsageError(f'a setting of {type(settings).__name__} has a text as name, not {wrong[0]!r}')
  if unknown_names := changes.keys() - set(names):
    name, (first, dot, rest) = min(unknown_names), min(unknown_names).partition('.')
    if dot and first in names:
      raise UsageError(f'unknown setting {name!r}: write {{{first!r}: {{{rest!r}: ...}}}}')
    raise unknown(f'setting of {type(settings).__name__}', name, names)
  values = {}
  for name, value in changes.items():
    old = getattr(settings, name)
    is_nested = isinstance(value, dict) and dataclasses.is_dataclass(old)
    values[name] = _replace_nested(old, value) if is_nested else _plain(value)
  return dataclasses.replace(settings, **values)


def _plain(value: Any) -> Any:
  """Return a value without lists, and without arrays and scalars of NumPy or JAX.

  They become tuples and numbers, also in settings within. Fields of a user's dataclass stay.
  """
  if dataclasses.is_dataclass(value) and not isinstance(value, type):
    is_ours = type(value).__module__.startswith('podrace.')
    old = {f.name: getattr(value, f.name) for f in dataclasses.fields(value) if f.init}
    new = {n: _plain(x) for n, x in old.items() if is_ours or dataclasses.is_dataclass(x)}
    changes = {n: x for n, x in new.items() if x is not old[n]}
    return dataclasses.replace(value, **changes) if changes else value
  if isinstance(value, tuple | list):
    return tuple(map(_plain, value))
  return _plain(value.tolist()) if hasattr(value, 'shape') and hasattr(value, 'tolist') else value


def train(
  config: Config | str,
  run_dir: Path | str | None = None,
  callbacks: Sequence[Callback] = (),
  override: bool = False,
  sinks: tuple[str, ...] = (),
  quiet: bool = False,
) -> Result:
  """Train, or resume a run, as `podrace train` does.

  Args:
    config: from `configure`, or the name of a preset.
    run_dir: the run directory; a second call with it resumes. None: a new one, runs/NAME-DATE.
    callbacks: see `podrace.run.callbacks.Callback`.
    override: resume although the configuration has changed.
    sinks: destinations of metrics besides metrics.jsonl: tensorboard, wandb.
    quiet: show no progress, only warnings.

  Returns:
    The finished run.

  Raises:
    UsageError: if the configuration is invalid, or not that of the run in `run_dir`.
    RunError: if the run cannot continue; it is saved as far as possible.
    KeyboardInterrupt: on SIGINT (Ctrl-C), after saving.
    podrace.errors.Stopped: on SIGTERM or SIGHUP, after saving.

  Example:
    result = podrace.train('cartpole', run_dir='runs/cartpole')
  """
  preset = config if isinstance(config, str) else None
  settings = configure(config) if isinstance(config, str) else config
  if not isinstance(settings, Config):
    raise UsageError(
      f'config is {type(config).__name__}, expected a Config, which podrace.configure returns, or '
      'the name of a preset'
    )
  settings = _plain(settings)
  with run_directory(run_dir, name_run(preset, settings.env, settings.log)) as path:
    try:
      summary = loop.train(settings, path, override, sinks, quiet, callbacks=callbacks)
    except Stopped as e:  # where in podrace a signal came says nothing to the caller
      error = KeyboardInterrupt(str(e)) if e.signum == signal.SIGINT else e
      raise error.with_traceback(None) from None
  return Result(path, continued(settings, path), summary)
