"""One run on the host: start or resume, step, log, checkpoint, stop."""

from __future__ import annotations

import contextlib
import functools
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from podrace import hooks
from podrace.architectures.hashes import params_sha256
from podrace.architectures.protocol import Architecture
from podrace.errors import CheckpointError, RunError, Stopped, UnreadableFile, UsageError
from podrace.run import metrics, progress
from podrace.run.build import build, build_discovery, make_server
from podrace.run.callbacks import Callback, Callbacks
from podrace.run.checkpointing import Saves
from podrace.run.directory import (
  changes_of,
  check_directory,
  continued,
  has_lock,
  last_line,
  locked,
  machine,
  noting_end,
  read_record,
  read_summary,
  saved_steps,
)
from podrace.run.evaluate import bind_eval_env
from podrace.run.log import Log
from podrace.run.periodic_evaluation import Evaluations
from podrace.run.sinks import check_sinks
from podrace.run.summary import final_return
from podrace.run.warm_start import check_start, warm_started
from podrace.settings.config import Config
from podrace.settings.record import to_json
from podrace.settings.validation import validate
from podrace.system.blame import label
from podrace.system.files import check_folder, make_user_folder, write_json
from podrace.system.signals import GRACE_SECONDS, Stop
from podrace.topology import everyones

if TYPE_CHECKING:
  from podrace.distributed.environments.server import Server
  from podrace.distributed.net.listener import Listen
  from podrace.distributed.run_identity import Addresses
  from podrace.settings.discovery import Discovery

log = logging.getLogger('podrace')
CALL_SECONDS = 0.5  # how long one call of the compiled program may take: signals wait for it
CHECKPOINT_SECONDS = 60.0  # between checkpoints, where the user doesn't say
FIRST_CHECKPOINT_SECONDS = 10.0  # until a run's first one, so that little is lost if it dies early


class Pace:
  """How many updates a call may make so that it takes about CALL_SECONDS; at most twice the last's."""

  def __init__(self) -> None:
    self._seconds = 0.0  # of one update
    self._most = 1

  def updates(self) -> int:
    return min(max(1, int(CALL_SECONDS / self._seconds)), self._most) if self._seconds else 1

  def observe(self, updates: int, seconds: float) -> None:
    self._seconds, self._most = seconds / updates, 2 * updates


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
  """Trains, from the beginning or from the newest good checkpoint; returns the summary.

  `listen` is where remote environments come to, if the config has them; `addresses` as in `build`.
  `quiet` silences the progress, not the warnings. `sinks` are names, see `podrace.run.metrics`, or sinks.

  Raises:
    UsageError, ValueError: if the config is wrong, or not that of the run in `run_dir`.
    RunError: if the run can't go on: the loss is not finite, or the disk is full.
    Stopped: on SIGTERM, SIGINT or SIGHUP, after saving.
  """
  config = continued(config, Path(run_dir))
  validate(config)

  def assemble(warn: Callable[[str], None]) -> tuple[Architecture, Server | None]:
    server = make_server(config, listen)
    if config.init_from and not saved_steps(Path(run_dir)):  # else it goes on from a checkpoint
      check_start(config)
    program = build(config, server, addresses, Path(run_dir))
    if config.eval_env and jax.process_index() == 0:
      bind_eval_env(config)
    warn_if_too_short(config, program, warn)
    return program, server

  def opening(say: Callable[[str], None]) -> None:
    if addresses is not None:
      from podrace.distributed.net.address import reachable

      say(
        f'parameters for `podrace act` are at {reachable(addresses.parameters)}; its experience comes from '
        f'`podrace replay` at {", ".join(addresses.replay)}'
      )

  return carry_out(config, assemble, run_dir, override, sinks, quiet, callbacks, opening)


def discover(
  config: Discovery,
  run_dir: Path | str,
  override: bool = False,
  sinks: tuple[str | metrics.Sink, ...] = (),
  quiet: bool = False,
  callbacks: Sequence[Callback] = (),
) -> dict[str, Any]:
  """Trains a rule, as `train` trains an agent; the rule is in the run directory, `rule.npz`."""
  config = continued(config, Path(run_dir))

  def assemble(warn: Callable[[str], None]) -> tuple[Architecture, None]:
    return build_discovery(config), None

  return carry_out(config, assemble, run_dir, override, sinks, quiet, callbacks)


def carry_out(
  config: Config | Discovery,
  assemble: Callable[[Callable[[str], None]], tuple[Architecture, Server | None]],
  run_dir: Path | str,
  override: bool,
  sinks: tuple[str | metrics.Sink, ...],
  quiet: bool,
  callbacks: Sequence[Callback],
  opening: Callable[[Callable[[str], None]], None] = lambda say: None,
) -> dict[str, Any]:
  """Begins a run or goes on with it, to its end; returns the summary. Raises as `train`.

  Args:
    assemble: the program, and the server that remote environments come to. It is given what warns.
    opening: says what there is to say once the run begins.
  """
  check_sinks(sinks, Path(run_dir))
  called, run_dir = Callbacks(callbacks, override), Path(run_dir)
  if called.transforms and jax.process_count() > 1:
    raise UsageError('a callback with transform is for runs of one process')
  if called.transforms and config.agree == 'gossip':
    raise UsageError(
      'a callback with transform changes one TrainState, and each device of --agree gossip has its own'
    )
  leader = jax.process_index() == 0
  terminal = progress.make_progress(config.total_updates * config.steps_per_update, config.seeds)
  warn = terminal.say if leader else _nothing
  say = _nothing if quiet else warn
  with _as_run_errors(run_dir), contextlib.ExitStack() as stack:
    stack.callback(terminal.close)
    refuse(config, run_dir, override)
    program, server = assemble(warn)
    # Now that it can be a run: what is refused leaves no directory.
    try:
      make_user_folder(run_dir)
    except OSError as e:
      raise UsageError(f'--run-dir {run_dir} cannot be a directory: {e.strerror}') from e
    is_ours = stack.enter_context(locked(run_dir)) if leader else lambda: True
    if (summary := finished(config, run_dir, override, warn)) is not None:
      warn(f'{run_dir} is finished: step {summary["step"]:,}, return {summary["episode_return"]}')
      return summary
    stop = stack.enter_context(Stop())
    if server is not None:
      stack.enter_context(server)
      (say if leader else log.info)(f'listening for environments at {server.address}')
    opening(say)
    run = _Run(config, program, run_dir, stop, terminal, warn, sinks, quiet, is_ours, called)
    with noting_end(run_dir, Stopped, is_ours) if leader else contextlib.nullcontext():
      return run.go(stack)


def warn_if_too_short(config: Config, program: Architecture, warn: Callable[[str], None]) -> None:
  """Says that a run ends before there is enough in its replay to learn from."""
  if program.windows is None:
    return
  schedule = program.windows.schedule
  if schedule.ready >= config.total_updates:
    warn(
      f'this run learns nothing: with min_size {schedule.buffer.min_size:,} of the buffer it begins to learn at '
      f'step {(schedule.ready + 1) * config.steps_per_update:,}, and ends at step '
      f'{config.total_updates * config.steps_per_update:,} (--total-steps)'
    )


def refuse(config: Config | Discovery, run_dir: Path, override: bool) -> None:
  """Raises UsageError for a run directory that can't be that of this run, before anything is made."""
  check_directory(run_dir)
  if run_dir.is_dir():
    check_folder(run_dir, '--run-dir')
    if jax.process_index() == 0 and has_lock(run_dir):  # of several processes the first one has it
      raise UsageError(f'{run_dir} is in use by another run that is still going')
    finished(config, run_dir, override, _nothing)


def finished(
  config: Config | Discovery, run_dir: Path, override: bool, warn: Callable[[str], None]
) -> dict[str, Any] | None:
  """The summary of the run that is there, if it is finished; None if it begins or goes on.

  Raises:
    UsageError: if it has another configuration, which may not be or would not be used.
  """
  changed = changes_of(config, run_dir)
  if changed and not override:
    raise UsageError(
      f'{run_dir} holds a run with another configuration:\n  '
      + '\n  '.join(changed)
      + '\ngive --override to go on with the new one, or another --run-dir'
    )
  summary = read_summary(run_dir / 'summary.json', warn)
  if summary is None or not is_over(summary, config.total_steps, changed):
    return None
  if changed:
    raise UsageError(
      f'{run_dir} is finished at step {summary["step"]:,}, and what changed would not be used:\n  '
      + '\n  '.join(changed)
      + '\ngive a larger --total-steps as well, or another --run-dir'
    )
  return summary


def is_over(summary: dict[str, Any], total_steps: int, changed: Sequence[str]) -> bool:
  """Whether a run with this summary is finished; one that a callback ended goes on if its configuration changed."""
  return summary['step'] >= total_steps or ('ended' in summary and not changed)


def _nothing(message: str) -> None:
  pass


@contextlib.contextmanager
def _as_run_errors(run_dir: Path) -> Iterator[None]:
  """What the machine can do to a run, as RunError."""
  try:
    yield
  except OSError as e:
    raise RunError(f'{run_dir}: {e}; what was saved before is kept') from e
  except CheckpointError as e:
    raise RunError(f'{e}; the checkpoints before it are kept') from e
  except jax.errors.JaxRuntimeError as e:
    raise RunError(f'JAX failed, on this device or with another process: {e}') from e


class _Run:
  """The loop of `train`, and what it keeps an eye on."""

  def __init__(
    self,
    config: Config | Discovery,
    program: Architecture,
    run_dir: Path,
    stop: Stop,
    terminal: progress.Progress,
    warn: Callable[[str], None],
    sinks: tuple[str | metrics.Sink, ...],
    quiet: bool,
    is_ours: Callable[[], bool],  # the directory, still
    callbacks: Callbacks,
  ) -> None:
    self.callbacks = callbacks
    self.log = Log(config, run_dir, callbacks, sinks, None if quiet else terminal, warn)
    self.evaluations: Evaluations | None = None
    self.config, self.program, self.run_dir, self.stop = config, program, run_dir, stop
    self.is_ours = is_ours
    self.warn, self.say = warn, _nothing if quiet else warn
    self.leader = jax.process_index() == 0
    self.compile_s = 0.0
    self.saves = Saves(config, program, run_dir, is_ours, self.warn, self.say, self.notes)
    self.statistics: dict[str, Any] = {}  # by the architecture, before that checkpoint

  def go(self, stack: contextlib.ExitStack) -> dict[str, Any]:
    config = self.config
    stack.callback(self.saves.checkpoints.close)
    # Before anything that takes long: who is killed then goes on as this run.
    if self.leader and read_record(self.run_dir) is None:
      write_json(self.run_dir / 'config.json', to_json(config))
    self.saves.check_newest()
    started = time.perf_counter()
    # Several processes compile together: who leaves takes the others down.
    alone = 0.0 if jax.process_count() == 1 else GRACE_SECONDS
    if opening := hooks.opening(config.agent):
      self.say(opening)
    self.say(f'compiling {config.env} for {self.program.mesh.size} device(s) ...')
    stack.callback(self.program.close)
    self.stop.during(self.program.compile, 'compilation', self.warn, alone)
    self.compile_s = time.perf_counter() - started
    state = self.restored()
    if self.leader:
      write_json(self.run_dir / 'config.json', to_json(config))
    each = config.seeds // hooks.settings(config.agent)
    seeds = np.uint32(config.seed) + np.arange(config.seeds, dtype=np.uint32) % np.uint32(each)
    keys = jax.vmap(jax.random.key)(seeds)
    if state is None:
      started = time.perf_counter()
      state = self.stop.during(
        lambda: jax.block_until_ready(self.program.init(jax.random.clone(keys))),
        'initialisation', self.warn, alone,
      )  # fmt: skip
      self.compile_s += time.perf_counter() - started
      if isinstance(config, Config) and config.init_from:
        state = warm_started(config, state)
    self.say(f'compiled in {self.compile_s:.1f} s')
    if self.leader:
      self.log.open(stack, max(self.saves.saved, 0))
    self.open_evaluations(stack, state)
    self.program.start(state, keys, self.statistics)
    try:
      state = self.loop(state)
    except BaseException:
      if self.is_ours():
        with contextlib.suppress(CheckpointError):
          self.saves.checkpoints.wait()
      raise
    self.saves.check_directory()
    self.saves.checkpoints.wait()
    self.saves.check_directory()
    self.complete(state)
    return self.finish(state)

  def complete(self, state: Any) -> None:
    """What follows the last update, before the summary is there: a run that dies here is not finished, and does it again."""
    update = self.updates_done(state)
    with self.saves.failing(update, state):
      if self.evaluations:
        last = functools.partial(
          self.evaluations.finish, update * self.config.steps_per_update, state.train.params
        )
        self.stop.during(last, 'the last evaluation', self.warn, GRACE_SECONDS)
      self.program.finished(state)
      # JAX waits 30 s for those that leave later, and then ends all: the first one may have evaluated for longer.
      together = functools.partial(everyones, [update])
      self.stop.during(together, 'waiting for the other processes', self.warn, GRACE_SECONDS)

  def restored(self) -> Any | None:
    """The state that the run goes on from, and its notes; None if it begins."""
    found = self.saves.restore()
    if found is None:
      line: metrics.Line = {}
      with contextlib.suppress(
        UnreadableFile
      ):  # such as a link, in whose place the log puts a file
        line, _ = last_line(self.run_dir / 'metrics.jsonl')
      if self.leader and line.get('step', 0):
        self.warn(
          f'{self.run_dir} has no checkpoint, though its metrics reach step {line["step"]:,}: it begins again at step 0'
        )
      return None
    state, notes = found
    self.statistics = notes['statistics']
    self.log.restore(notes)
    return state

  def notes(self) -> dict[str, Any]:
    """What a checkpoint keeps of the run besides its state."""
    notes = self.log.notes()
    if self.evaluations:
      notes['lines']['eval.jsonl'] = self.evaluations.lines.on_disk()
    return notes

  def open_evaluations(self, stack: contextlib.ExitStack, state: Any) -> None:
    if not (isinstance(self.config, Config) and self.config.eval_every and self.leader):
      return
    saved = max(self.saves.saved, 0)
    self.evaluations = Evaluations(
      self.config, self.run_dir, saved, self.warn, lambda: self.log.wall_s
    )
    stack.callback(self.evaluations.close)
    self.log.check_lines('eval.jsonl', self.evaluations.lines)
    self.evaluations.resume(state.train.params)

  # --- the loop ---------------------------------------------------------------------------------

  def loop(self, state: Any) -> Any:
    config, pace = self.config, Pace()
    per_line = config.updates(config.log_every or -(-config.total_steps // 100))
    per_save = config.updates(config.checkpoint_every) if config.checkpoint_every else 0
    per_eval = config.updates(config.eval_every) if config.eval_every else 0
    update, total = self.updates_done(state), config.total_updates
    last_save = time.perf_counter()
    while update < total:
      self.saves.check_directory()
      began = time.perf_counter()
      goals = [total, *(_next(update, n) for n in (per_line, per_save, per_eval) if n)]
      if update < self.program.ready:
        goals.append(self.program.ready)
      n, stop, save, ended = self.agree(
        min(min(goals) - update, pace.updates()),
        self.stop.signum,
        self.save_due(time.perf_counter() - last_save),
        bool(self.callbacks.ended),
      )
      if ended:
        break
      with self.saves.failing(update, state):
        state, n, broken, finite = self.stop.during(
          functools.partial(self.call, state, n), 'a call of the program', self.warn, GRACE_SECONDS
        )
      seconds = time.perf_counter() - began
      update += n
      self.log.add(n * config.steps_per_update * config.seeds, seconds)
      self.check_health(broken, finite, update)
      if n:
        pace.observe(n, seconds)
        if update == self.program.ready:  # from here on updates take longer
          pace = Pace()
        if update % per_line == 0 or update == total:
          with self.saves.failing(update, state):
            summary, state = self.program.read_log(state)
          saving = self.saves.failing(update, state)
          state = self.log.write(update * config.steps_per_update, summary, state, saving)
        else:
          self.log.progress(update * config.steps_per_update)
      if self.evaluations and n and update % per_eval == 0:
        with self.saves.failing(update, state):
          self.evaluations.begin(update * config.steps_per_update, state.train.params)
      if save or stop or (per_save and update % per_save == 0):
        self.saves.save(update, state)
        last_save = time.perf_counter()
      if stop and update < total:
        self.saves.checkpoints.wait()
        raise Stopped(stop)
    self.saves.save(update, state)
    return state

  def call(self, state: Any, updates: int) -> tuple[Any, int, Any, Any]:
    """Makes updates: the state after them, their number, and what `health` says of it."""
    after, n = self.program.advance(state, updates, lambda: bool(self.stop.signum))
    return after, n, *self.program.health(after)

  def save_due(self, seconds: float) -> bool:
    """Whether a checkpoint is due so long after the last one, or after the beginning."""
    if self.saves.saved < 0:
      return seconds > FIRST_CHECKPOINT_SECONDS
    return seconds > CHECKPOINT_SECONDS and not self.config.checkpoint_every

  def agree(
    self, updates: int, signum: int, save: bool, ended: bool
  ) -> tuple[int, int, bool, bool]:
    """The same decisions on all processes: the first one's, and anybody's signal."""
    found = everyones([updates, signum, save, ended])
    return int(found[0, 0]), int(found[:, 1].max()), bool(found[0, 2]), bool(found[0, 3])

  def check_health(self, broken: Any, finite: Any, update: int) -> None:
    """Ends the run if the loss or the parameters are not finite any more."""
    bad = [int(b) for b in np.atleast_1d(broken) if b >= 0]
    if not bad and np.all(finite):
      return
    per_update = self.config.steps_per_update
    if bad:
      what = f'the loss is NaN or infinite at step {(min(bad) + 1) * per_update:,}'
    else:
      what = f'a parameter is NaN or infinite at step {update * per_update:,}'
    kept = 'there is no checkpoint yet'
    if self.saves.saved >= 0:
      self.saves.checkpoints.wait()  # so that it is there
      kept = f'the last good checkpoint is step {self.saves.saved:,}'
    learn = label(hooks.innermost(self.config.agent), 'learn')
    raise RunError(
      f'{what}; {kept}, in {self.run_dir / "checkpoints"}\n'
      f'What is learned is made by {learn}. A lower learning rate often helps; else look for a logarithm, a root '
      'or a division at 0 there: jax.debug.print shows values from within it.'
    )

  def updates_done(self, state: Any) -> int:
    return int(np.atleast_1d(jax.device_get(state.update))[0])

  def finish(self, state: Any) -> dict[str, Any]:
    """The summary, written once the last checkpoint is on disk."""
    summary = {
      'step': self.updates_done(state) * self.config.steps_per_update,
      **final_return(self.run_dir / 'metrics.jsonl'),
      'steps_per_s': round(self.log.clock.rate, 1),
      'compile_s': round(self.compile_s, 3),
      'wall_s': round(self.log.wall_s, 3),
      'params_sha256': params_sha256(state.train.params),
      'machine': machine(),
    }
    if self.callbacks.ended:
      summary['ended'] = self.callbacks.ended
    if missing := {name: n for name, n in self.log.missing.items() if n}:
      summary['missing_lines'] = missing
    if self.leader:
      write_json(self.run_dir / 'summary.json', summary)
    return summary


def _next(update: int, every: int) -> int:
  return (update // every + 1) * every
