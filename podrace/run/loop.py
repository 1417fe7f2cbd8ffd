"""One run on the host: start or resume, step, log, checkpoint, stop."""

from __future__ import annotations

import contextlib
import functools
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from podrace import hooks
from podrace.architectures.hashes import machine, params_sha256
from podrace.architectures.protocol import Architecture
from podrace.errors import CheckpointError, UnreadableFile
from podrace.run import metrics
from podrace.run.build import assemble, build_discovery, describe_devices, make_server
from podrace.run.callbacks import Callback, Callbacks
from podrace.run.directory import changes_of, continued, last_line, read_record, saved_steps
from podrace.run.log import Log as RunLog
from podrace.run.opening import Console, RunOptions, open_directory, open_run, read_finished
from podrace.run.periodic_evaluation import Evaluations, check_evaluations
from podrace.run.run_end import note_end
from podrace.run.save_and_resume import Saves
from podrace.run.saved_params import best_step
from podrace.run.setting_changes import last_change, note_changes
from podrace.run.summary import final_return
from podrace.run.updates import UpdateLoop, count_updates, diverged_of_sweep
from podrace.run.warm_start import WarmStart
from podrace.settings.agents import agent_name
from podrace.settings.config import Basics, Config
from podrace.settings.log_settings import SPACES
from podrace.settings.record import to_json
from podrace.settings.resolved import Resolved, resolve
from podrace.system.files import write_json
from podrace.system.signals import GRACE_SECONDS, Stop
from podrace.topology import everyones

if TYPE_CHECKING:
  from podrace.distributed.environments.server import Server
  from podrace.distributed.net.listener import Listen
  from podrace.distributed.run_identity import Addresses
  from podrace.envs.logs.recorded import Log
  from podrace.settings.discovery import Discovery

log = logging.getLogger('podrace')
EVALUATION = {'eval_env', 'eval_episodes'}  # settings that change the meaning of a score


def train(
  config: Config,
  run_dir: Path | str,
  override: bool = False,
  sinks: tuple[str | metrics.Sink, ...] = (),
  quiet: bool = False,
  listen: Listen | None = None,
  addresses: Addresses | None = None,
  callbacks: Sequence[Callback] = (),
) -> dict[str, Any]:
  """Train from the beginning, or from the newest undamaged checkpoint; returns the summary.

  Args:
    config: the configuration of the run.
    run_dir: keeps the run; called again with it, the run goes on.
    override: go on although the configuration has changed.
    sinks: names of sinks (see `podrace.run.sinks`), or sinks, which the caller closes.
    quiet: silences progress, not warnings.
    listen: where remote environments connect, for `config.envs` remote.
    addresses: of a replay service and for acting processes, for `config.replay` service.
    callbacks: called with each line of metrics, see `podrace.run.callbacks`.

  Raises:
    UsageError, ValueError: if the config is wrong, or differs from that of the run in `run_dir`.
    RunError: if the run cannot go on: the loss is not finite, or the disk is full.
    Stopped: on SIGTERM, SIGINT or SIGHUP, after saving.
  """
  config = continued(config, Path(run_dir))
  resolved = resolve(config)
  options = RunOptions(Path(run_dir), override, sinks, quiet, Callbacks(callbacks, override))
  options.callbacks.check(config)
  with open_run(config, options) as console:
    server = make_server(config, listen)
    warm_start = WarmStart(resolved) if config.init_from else None
    if warm_start and not saved_steps(options.run_dir):
      warm_start.params  # noqa: B018, refuses parameters that do not fit
    program = assemble(resolved, server, addresses, options.run_dir)
    check_evaluations(resolved)
    warn_if_too_short(config, program, console.warn)
    run = Run(config, program, options, console, config.seeds, server)
    if addresses is not None:
      run.announcement = _addresses_text(addresses)
    run.use_log(resolved.log)
    if config.eval_every and run.leader:
      run.evaluates = resolved
    if warm_start:
      run.warm_start = warm_start
    return run.carry_out()


def discover(
  config: Discovery,
  run_dir: Path | str,
  override: bool = False,
  sinks: tuple[str | metrics.Sink, ...] = (),
  quiet: bool = False,
) -> dict[str, Any]:
  """Train a rule, as `train` trains an agent; the rule is `rule.npz` in the run directory."""
  from podrace.architectures.discovery.program import write_rule

  config = continued(config, Path(run_dir))
  options = RunOptions(Path(run_dir), override, sinks, quiet, Callbacks((), override))
  program = build_discovery(config)
  with open_run(config, options) as console:
    run = Run(config, program, options, console)
    run.after_save = write_rule
    return run.carry_out()


def warn_if_too_short(config: Config, program: Architecture, warn: Callable[[str], None]) -> None:
  """Warn if a run ends before its replay holds enough to learn from."""
  if program.windows is None:
    return
  schedule = program.windows.schedule
  if schedule.ready >= config.total_updates:
    warn(
      f'this run learns nothing: with min_size {schedule.buffer.min_size:,} and windows of '
      f'{schedule.length:,} steps of an environment it begins to learn at step '
      f'{(schedule.ready + 1) * config.steps_per_update:,}, and ends at step '
      f'{config.total_updates * config.steps_per_update:,} (--total-steps)'
    )


def _addresses_text(addresses: Addresses) -> str:
  from podrace.distributed.net.address import reachable

  return (
    f'parameters for `podrace act` are at {reachable(addresses.parameters)}; its experience comes '
    f'from `podrace replay` at {", ".join(addresses.replay)}'
  )


class Run:
  """One life of a run, from opening its directory to its summary.

  Attributes:
    warm_start: the parameters that a new run begins with, or None.
    after_save: called with the run directory and the state after each checkpoint is begun.
    log_sha256: hash of the data set that the run replays; None if there is none.
    spaces: the spaces of this data set as JSON.
    announcement: a message for the beginning, of addresses for example.
    evaluates: the run to evaluate periodically; None if this process evaluates nothing.
  """

  def __init__(
    self,
    config: Basics,
    program: Architecture,
    options: RunOptions,
    console: Console,
    seeds: int = 1,
    server: Server | None = None,
  ) -> None:
    self.config, self.program, self.options, self.console = config, program, options, console
    self.seeds, self.server = seeds, server
    self.run_dir, self.callbacks = options.run_dir, options.callbacks
    self.warn, self.say = console.warn, console.say
    self.leader = jax.process_index() == 0
    self.stop = Stop()
    self.warm_start: WarmStart | None = None
    self.after_save: Callable[[Path, Any], None] = lambda run_dir, state: None
    self.log_sha256: str | None = None
    self.spaces: Mapping[str, str] = {}
    self.announcement = ''
    self.evaluates: Resolved | None = None
    self.evaluations: Evaluations | None = None
    self.compile_s, self.has_begun = 0.0, False

  def use_log(self, data: Log | None) -> None:
    """Replay a data set, if there is one."""
    if data is None and agent_name(self.config.agent) == 'bc':
      self.warn('bc imitates recorded actions, and there is no --log: it imitates itself')
    if data is not None:
      self.log_sha256, self.spaces = data.sha256, data.spaces
      self.say(
        f'log {data.name}: {data.episodes:,} episodes, {data.steps:,} steps, '
        f'{data.nbytes / 2**20:.1f} MiB in memory'
      )

  def carry_out(self) -> dict[str, Any]:
    """Begin the run, or go on with it, to its end; returns the summary."""
    with contextlib.ExitStack() as stack:
      is_ours = stack.enter_context(open_directory(self.run_dir))
      if (summary := self._read_finished()) is not None:
        return summary
      self._listen(stack)
      self._open(stack, is_ours)
      noted = note_end(self.run_dir, is_ours, lambda: self.has_begun)
      with noted if self.leader else contextlib.nullcontext():
        self._compile(stack)
        state, keys = self._restore_or_init()
        self._start(stack, state, keys)
        state = self._loop_and_wait(state)
        self._complete(state)
        return self._write_summary(state)

  def _read_finished(self) -> dict[str, Any] | None:
    summary = read_finished(self.config, self.run_dir, self.options.override, self.warn)
    if summary is not None:
      step, value = summary['step'], summary['episode_return']
      self.warn(
        f'{self.run_dir} is finished: step {step:,}, return {value}; for more, give a larger '
        '--total-steps'
      )
    return summary

  def _listen(self, stack: contextlib.ExitStack) -> None:
    """Handle signals from now on, and accept remote environments."""
    stack.enter_context(self.stop)
    if self.server is not None:
      stack.enter_context(self.server)
      say = self.say if self.leader else log.info
      say(f'listening for environments at {self.server.address}')
    if self.announcement:
      self.say(self.announcement)

  def _open(self, stack: contextlib.ExitStack, is_ours: Callable[[], bool]) -> None:
    """Open the log and the checkpoints."""
    self.is_ours = is_ours
    self.log = RunLog(
      self.config,
      self.run_dir,
      self.callbacks,
      self.options.sinks,
      self.console.terminal,
      self.warn,
    )
    parts = {**self.program.parts, **self.log.parts}
    self.saves = Saves(
      self.config, self.program, self.run_dir, is_ours, self.warn, self.say, parts, self.after_save,
      self.log_sha256,
    )  # fmt: skip
    stack.callback(self.saves.checkpoints.close)

  def _compile(self, stack: contextlib.ExitStack) -> None:
    """Compile, unless the newest checkpoint is of another program."""
    self.saves.check_newest()
    # Written before compilation, so that a run that is killed meanwhile continues with it.
    if self.leader and read_record(self.run_dir) is None:
      self._record()
    if opening := hooks.opening(self.config.agent):
      self.say(opening)
    devices = describe_devices(self.config, self.program.mesh)
    self.say(f'compiling {self.config.env or "a log"} for {devices} ...')
    stack.callback(self.program.close)
    self._timed(self.program.compile, 'compilation')

  def _record(self) -> None:
    """Write the configuration. Without an environment, evaluation needs the spaces of the log."""
    if self.spaces and not self.config.env:
      write_json(self.run_dir / SPACES, self.spaces)
    write_json(self.run_dir / 'config.json', to_json(self.config))

  def _timed(self, work: Callable[[], Any], name: str) -> Any:
    """Do work that counts as compilation; a signal ends it."""
    # All processes compile together. If one exits, JAX aborts the rest.
    grace = 0.0 if jax.process_count() == 1 else GRACE_SECONDS
    started = time.perf_counter()
    result = self.stop.during(work, name, self.warn, grace)
    self.compile_s += time.perf_counter() - started
    return result

  def _restore_or_init(self) -> tuple[Any, Any]:
    """Return the state that the run continues from, or a first one, and the keys of the seeds."""
    state = self._restore()
    each = self.seeds // hooks.settings(self.config.agent)
    seeds = np.uint32(self.config.seed) + np.arange(self.seeds, dtype=np.uint32) % np.uint32(each)
    keys = jax.vmap(jax.random.key)(seeds)
    if state is None:
      init = self.program.init
      state = self._timed(
        lambda: jax.block_until_ready(init(jax.random.clone(keys))), 'initialisation'
      )
      if self.warm_start is not None:
        state = self.warm_start.apply(state)
        self.say(f'parameters of {self.warm_start.origin}')
    self.say(f'compiled in {self.compile_s:.1f} s')
    return state, keys

  def _restore(self) -> Any | None:
    """Restore the state that the run continues from; None if it begins."""
    state = self.saves.restore()
    if state is None and self.leader:
      line: metrics.Line = {}
      with contextlib.suppress(UnreadableFile):  # such as a link, which the log replaces by a file
        line, _ = last_line(self.run_dir / 'metrics.jsonl')
      if line.get('step', 0):
        self.warn(
          f'{self.run_dir} has no checkpoint, though its metrics reach step {line["step"]:,}: it '
          'begins again at step 0'
        )
    return state

  def _start(self, stack: contextlib.ExitStack, state: Any, keys: Any) -> None:
    """Open the files of metrics and evaluations, and begin to act."""
    saved = max(self.saves.saved, 0)
    if self.leader:
      self.log.open(stack, saved)
    if self.evaluates:
      args = self.evaluates, self.run_dir, saved, self.warn
      self.evaluations = Evaluations(*args, lambda: self.log.wall_s, self._oldest_checkpoint)
      stack.callback(self.evaluations.close)
      self.log.check_lines('eval.jsonl', self.evaluations.lines)
      self.evaluations.resume(state.train.params)
    if self.leader:  # now nothing can refuse the run, which goes on
      self._note_changes()
      (self.run_dir / 'summary.json').unlink(missing_ok=True)
    self.program.start(state, keys)
    self.has_begun = True

  def _note_changes(self) -> None:
    """Record each setting that differs from the one in the run's record."""
    changed = changes_of(self.config, self.run_dir)
    note_changes(self.run_dir, max(self.saves.saved, 0), changed)
    if self.callbacks.ended and self.saves.saved == last_change(self.run_dir):
      self.callbacks.ended = ''  # the run goes on from there
    for change in changed:
      self.say(f'changed: {change}')
    if EVALUATION & {change.path for change in changed} and best_step(self.run_dir) is not None:
      self.warn(
        'evaluations are not as before, and the best checkpoint is chosen among all: the larger '
        'return may be that of the easier evaluation'
      )
    self._record()

  def _oldest_checkpoint(self) -> int:
    return min(saved_steps(self.run_dir), default=-1)

  def _loop_and_wait(self, state: Any) -> Any:
    """Make all updates, and wait until the last checkpoint is on disk."""
    try:
      state = UpdateLoop(
        self.config, self.program, self.seeds, self.saves, self.log, self.evaluations, self.stop
      ).run(state)
    except BaseException:
      if self.is_ours():
        with contextlib.suppress(CheckpointError):
          self.saves.checkpoints.wait()
      raise
    self.saves.check_directory()
    return state

  def _complete(self, state: Any) -> None:
    """Evaluate for the last time and release the other processes.

    There is no summary yet, so a run that dies here is not finished, and does this again.
    """
    update = count_updates(state)
    with self.saves.failing(update, state):
      if self.evaluations:
        last = functools.partial(
          self.evaluations.finish, update * self.config.steps_per_update, state.train.params
        )
        self.stop.during(last, 'the last evaluation', self.warn, GRACE_SECONDS)
      self.program.finish(state)
      # JAX aborts processes that leave 30 s after the first, which may have evaluated for longer.
      together = functools.partial(everyones, [update])
      self.stop.during(together, 'waiting for the other processes', self.warn, GRACE_SECONDS)

  def _write_summary(self, state: Any) -> dict[str, Any]:
    """Write the summary and return it. The last checkpoint is on disk."""
    summary = {
      'step': count_updates(state) * self.config.steps_per_update,
      **final_return(self.run_dir / 'metrics.jsonl'),
      'steps_per_s': round(self.log.clock.rate, 1),
      'compile_s': round(self.compile_s, 3),
      'wall_s': round(self.log.wall_s, 3),
      'params_sha256': params_sha256(state.train.params),
      'machine': machine(),
    }
    at_times = {
      'ended': self.callbacks.ended,
      'missing_lines': {name: n for name, n in self.log.missing.items() if n},
      'diagnostics': self.log.diagnostics.made,
      'diverged': diverged_of_sweep(self.config, self.program, state),
    }
    summary |= {name: value for name, value in at_times.items() if value}
    if self.leader:
      write_json(self.run_dir / 'summary.json', summary)
    return summary
