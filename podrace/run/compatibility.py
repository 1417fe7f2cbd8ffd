"""Compatibility of a checkpoint with the program that continues from it."""

from __future__ import annotations

from collections.abc import Collection
from fractions import Fraction
from pathlib import Path
from typing import Any

import jax

from podrace.architectures.hashes import shapes_sha256
from podrace.architectures.protocol import Architecture
from podrace.envs.logs.share import parse_share
from podrace.errors import CheckpointError, UsageError
from podrace.run.directory import completed_record, read_record
from podrace.run.metric_sums import with_sums
from podrace.settings.config import Basics
from podrace.settings.record import changes, option, to_json
from podrace.topology import data_size, model_size

# The origin of a changed state if the record is the same.
UNRECORDED = 'nothing in config.json: another podrace, or another number of processes, made it'
RANDOM_SETTINGS = ('jax_default_prng_impl', 'jax_threefry_partitionable')


def _check_entries(meta: dict[str, Any], *names: str) -> None:
  if lacking := [name for name in names if meta.get(name) is None]:
    raise CheckpointError(f'its meta has no {", ".join(lacking)}')


def random_settings() -> dict[str, Any]:
  """Return the settings of JAX that its random numbers depend on, by their names there."""
  return {name: getattr(jax.config, name) for name in RANDOM_SETTINGS}


def _check_random(meta: dict[str, Any]) -> None:
  now = random_settings()
  for name, was in (meta.get('random') or {}).items():  # an older podrace saved none
    if name in now and was != now[name]:
      raise UsageError(
        f'the checkpoint at step {meta["step"]:,} was made with {name.upper()}={was}, and now it '
        f'is {now[name]}, which makes other random numbers: set the variable as it was, or begin '
        'another run with --init-from'
      )


class Fit:
  """Checks that a checkpoint fits the program of a run."""

  def __init__(
    self, config: Basics, program: Architecture, run_dir: Path, log_sha256: str | None = None
  ) -> None:
    self._config, self._program, self._run_dir = config, program, run_dir
    self._log: dict[str, str] = {}  # the data set that the run replays, in a share of environments
    if log_sha256 is not None:
      share = Fraction(*parse_share(to_json(config)['log_share']))
      self._log = {'log_sha256': log_sha256, 'log_share': str(share)}

  def record(self) -> dict[str, Any]:
    """Return the entries of a checkpoint's meta that `check` reads."""
    return {
      'mesh': data_size(self._program.mesh),
      'model': model_size(self._program.mesh),
      'steps_per_update': self._config.steps_per_update,
      'shapes': self.shapes(),
      'replay': self.replay(),
      'random': random_settings(),
      **self._log,
    }

  def shapes(self, sums: Collection[str] | None = None) -> str:
    """Return a hash over the shapes of the state, with `sums` of these metrics."""
    return shapes_sha256(with_sums(self._program.shapes, sums))

  def check(self, meta: dict[str, Any], sums: Collection[str] | None) -> None:
    """Raise UsageError if a checkpoint holds the state of another program.

    Args:
      meta: of the checkpoint.
      sums: names of the metrics with sums in it, which may differ; None: as in the program.

    Raises:
      CheckpointError: if the meta lacks an entry.
    """
    _check_entries(meta, 'step', 'mesh')
    self._check_devices(meta)
    _check_random(meta)
    _check_entries(meta, 'steps_per_update', 'shapes', 'machine')
    if meta['steps_per_update'] != self._config.steps_per_update:
      raise UsageError(
        f'the checkpoint at step {meta["step"]:,} counts {meta["steps_per_update"]} steps an '
        f'update, this run has {self._config.steps_per_update}: --num-envs and --unroll-length '
        "can't change in a run; start afresh in another --run-dir"
      )
    self._check_log(meta)
    was, now = meta.get('replay'), self.replay()  # an older podrace saved none
    if was and now and was != now:
      changed = [f'{k} {was.get(k)} -> {x}' for k, x in now.items() if was.get(k) != x]
      raise UsageError(
        f"the checkpoint at step {meta['step']:,} holds a replay of other settings, which can't "
        'change in a run:\n  ' + '\n  '.join(changed) + '\nstart afresh in another --run-dir'
      )
    if meta['shapes'] != self.shapes(sums):
      old = read_record(self._run_dir)
      now = to_json(self._config)
      changed = [str(c) for c in changes(completed_record(old, self._config), now)] if old else []
      raise UsageError(
        f'the checkpoint at step {meta["step"]:,} holds another kind of state: the agent, its '
        'network, the environment, --num-envs, or what Sebulba keeps of its actors (--lag, '
        "--actor-threads, --actor-groups) has changed, which can't be in a run:\n  "
        + '\n  '.join(changed or [UNRECORDED])
        + '\nstart afresh in another --run-dir'
      )

  def _check_log(self, meta: dict[str, Any]) -> None:
    was, now = meta.get('log_sha256'), self._log.get('log_sha256')  # an older podrace saved none
    if was and now and was != now:
      raise UsageError(
        f'the checkpoint at step {meta["step"]:,} learned from another data set than --log has now '
        f'(SHA-256 {str(was)[:12]}, not {now[:12]}): restore it, or start afresh in another '
        '--run-dir'
      )
    was, now = meta.get('log_share'), self._log.get('log_share')  # likewise
    if was and now and was != now:
      raise UsageError(
        f'the checkpoint at step {meta["step"]:,} has environments and replay of --log-share {was},'
        f" this run has {now}, which can't change in a run: start afresh in another --run-dir"
      )

  def _check_devices(self, meta: dict[str, Any]) -> None:
    data, model = data_size(self._program.mesh), model_size(self._program.mesh)
    was = meta.get('model', 1)  # an older podrace had no model axis
    if (was > 1) != (model > 1):
      raise UsageError(
        f'the checkpoint at step {meta["step"]:,} was made with --model-devices {was}, this run '
        f"has {model}: the optimiser's state is one vector with 1, and split as the parameters are "
        f"with more, which can't change in a run; give --model-devices {was}, or begin another run "
        'with --init-from'
      )
    if meta['mesh'] != data:
      groups = f' groups of --model-devices {was}' if was > 1 else ' device(s)'
      raise UsageError(
        f'the checkpoint at step {meta["step"]:,} was made on {meta["mesh"]}{groups} that learn, '
        f'this run has {data}: {self._devices_advice(meta["mesh"] * model)}'
      )

  def replay(self) -> dict[str, float] | None:
    """Return the settings that the contents of replay depend on; None without replay."""
    return self._program.windows.record() if self._program.windows else None

  def _devices_advice(self, mesh: int) -> str:
    """Return the options that give as many learning devices as a checkpoint was made on."""
    now = to_json(self._config)  # of `discover` it names neither
    if now.get('architecture', 'anakin') == 'anakin':
      own = ', as each device of a gossip run has parameters of its own'
      return f'give --devices {mesh} --override{own if now.get("agree") == "gossip" else ""}'
    old = completed_record(read_record(self._run_dir) or {}, self._config)
    given = {name: old.get(name) for name in ('devices', 'actor_devices', 'learner_devices')}
    had = ' '.join(f'{option(name)} {value}' for name, value in given.items() if value)
    return (
      f'give --learner-devices with {mesh}, of all processes together, and --override; the run had '
      f'{had or "no options for its devices"}'
    )
