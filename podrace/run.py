"""One run on the host: start or resume, step, log, checkpoint, stop."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import json
import math
import os
import queue
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
import numpy as np
from jax.experimental import multihost_utils

from podrace import __version__, metrics, own_code
from podrace.architecture import Architecture
from podrace.build import build, make_server
from podrace.checkpoint import CheckpointError, Checkpoints, read_json
from podrace.config import (
  Config,
  UsageError,
  changes,
  check_code,
  completed,
  differences,
  from_json,
  option,
  to_json,
  validate,
)
from podrace.errors import RunError
from podrace.files import write_whole
from podrace.process import is_locked, linked_folders, lock, on_signals
from podrace.replay.host import ReplayFailed
from podrace.sebulba import ActorFailed
from podrace.topology import cores

if TYPE_CHECKING:
  from podrace.distributed.handshake import Addresses
  from podrace.remote.hub import Listen

CALL_SECONDS = 0.5  # how long one call of the compiled program may take: signals wait for it
GRACE_SECONDS = 20.0  # after a signal: what a call has to end, before the run ends without it
SLOW_SECONDS = 60.0  # of one call: a warning says where it stands, and again after twice the time
CHECKPOINT_SECONDS = 60.0  # between checkpoints, where the user doesn't say
NEVER = {'architecture', 'num_envs', 'unroll_length'}  # with these a run's state is another's
FIRST_CHECKPOINT_SECONDS = 10.0  # until a run's first one, so that little is lost if it dies early


class Stopped(Exception):
  """A signal ended the run; all that there was to save is saved, but for what `unsaved` names."""

  def __init__(self, signum: int, unsaved: str = '') -> None:
    name = signal.Signals(signum).name
    super().__init__(f'{name}: {unsaved}' if unsaved else name)
    self.signum = signum


@dataclasses.dataclass
class Clock:
  """Where the time of a run went, over all its lives."""

  busy_s: float = 0.0  # in the compiled program
  steps: int = 0  # made in `busy_s`


class Stop:
  """Notices SIGTERM, SIGINT and SIGHUP while it is entered; a second Ctrl-C interrupts at once."""

  def __init__(self) -> None:
    self.signum = 0
    self._wake: queue.SimpleQueue[None] = queue.SimpleQueue()  # a handler may put into it
    self._entered = contextlib.ExitStack()

  def __enter__(self) -> Stop:
    self._entered.enter_context(on_signals(self._handle))
    return self

  def __exit__(self, *exc: object) -> None:
    self._entered.close()

  def _handle(self, signum: int, frame: Any) -> None:
    again = bool(self.signum)
    if again and signum == signal.SIGINT:
      self._tell('ended at once, without saving; the last checkpoint counts, if there is one')
      raise KeyboardInterrupt
    self.signum = signum
    self._wake.put(None)
    if not again:
      name = signal.Signals(signum).name
      self._tell(
        f'{name}: finishing what is under way, then saving; Ctrl-C now ends at once, without saving'
      )

  def _tell(self, text: str) -> None:
    with contextlib.suppress(OSError):  # print is not for handlers: it may be what was interrupted
      os.write(2, f'\npodrace: {text}\n'.encode())

  def during(
    self,
    work: Callable[[], Any],
    what: str,
    warn: Callable[[str], None],
    grace: float = 0.0,
  ) -> Any:
    """The result of `work`, which can't be interrupted and so runs in a thread of its own.

    Args:
      what: names the work in the warnings that come while it takes long.
      grace: seconds that it may go on after a signal.

    Raises:
      Stopped: if a signal came and `work` did not end in time; `work` is left to itself.
    """
    outcome: list[Any] = []
    error: list[BaseException] = []

    def target() -> None:
      try:
        outcome.append(work())
      except BaseException as e:
        error.append(e)
      finally:
        self._wake.put(None)

    thread = threading.Thread(target=target, daemon=True, name=what)
    thread.start()
    began, slow, deadline = time.monotonic(), SLOW_SECONDS, math.inf
    while not outcome and not error:
      now = time.monotonic()
      if self.signum:
        deadline = min(deadline, now + grace)
        if now >= deadline:
          unsaved = f'{what} did not end within {grace:g} s and is not saved' if grace else ''
          raise Stopped(self.signum, unsaved)
      if now - began >= slow:
        warn(f'{what} has taken {now - began:.0f} s so far, {_whereabouts(thread)}; Ctrl-C ends it')
        slow *= 2
      with contextlib.suppress(queue.Empty):
        self._wake.get(timeout=max(0.0, min(began + slow, deadline) - now))
    thread.join()
    if error:
      raise error[0]
    return outcome[0]


def _whereabouts(thread: threading.Thread) -> str:
  """Where a thread stands in Python, the innermost line of podrace's or of the user's."""
  frame = sys._current_frames().get(thread.ident or 0)
  lines = [] if frame is None else traceback.extract_stack(frame)
  lines = [line for line in lines if 'site-packages' not in line.filename]
  return f'in {lines[-1].name} ({lines[-1].filename}:{lines[-1].lineno})' if lines else 'ending'


class Pace:
  """How many updates a call may make so that it takes about CALL_SECONDS; at most twice the last's."""

  def __init__(self) -> None:
    self._seconds = 0.0  # of one update
    self._most = 1

  def updates(self) -> int:
    return min(max(1, int(CALL_SECONDS / self._seconds)), self._most) if self._seconds else 1

  def observe(self, updates: int, seconds: float) -> None:
    self._seconds, self._most = seconds / updates, 2 * updates


def params_sha256(params: Any) -> str:
  """A hash over the parameter leaves' paths, dtypes, shapes and bytes, in path order."""
  leaves = {
    jax.tree_util.keystr(path): x for path, x in jax.tree_util.tree_leaves_with_path(params)
  }
  digest = hashlib.sha256()
  for path, leaf in sorted(leaves.items()):
    array = np.asarray(leaf.addressable_data(0))
    digest.update(f'{path} {array.dtype} {array.shape}\n'.encode())
    digest.update(np.ascontiguousarray(array).tobytes())
  return digest.hexdigest()


def shapes_sha256(state: Any) -> str:
  """A hash over the paths, dtypes and shapes of a state."""
  leaves = jax.tree_util.tree_leaves_with_path(state)
  text = '\n'.join(f'{jax.tree_util.keystr(p)} {x.dtype} {x.shape}' for p, x in leaves)
  return hashlib.sha256(text.encode()).hexdigest()


def machine() -> dict[str, Any]:
  """What bitwise equality of a resumed run depends on."""
  return {
    'device': jax.devices()[0].device_kind,
    'devices': len(jax.devices()),
    'cores': cores(),
    'jax': jax.__version__,
    'podrace': __version__,
  }


@contextlib.contextmanager
def locked(run_dir: Path) -> Iterator[Callable[[], bool]]:
  """Keeps a second run out of the directory for as long as this one lives.

  Gives what says whether the directory is still the one: not removed, moved or replaced.
  """
  try:
    file = lock(run_dir)
  except BlockingIOError:
    raise UsageError(f'{run_dir} is in use by another run that is still going') from None
  except OSError as e:
    raise UsageError(f'--run-dir {run_dir} cannot be written to: {e.strerror}') from e
  with file:
    if links := linked_folders(run_dir):
      raise UsageError(
        f'--run-dir {run_dir}: {", ".join(links)} there is a symbolic link to a directory elsewhere, where a run '
        'would write and delete; move what it leads to in its place, or make the whole run directory a link'
      )
    yield functools.partial(is_locked, run_dir.absolute(), file)


def changes_of(config: Config, run_dir: Path) -> list[str]:
  """What the run directory's record and this configuration differ in, a line each.

  Raises:
    UsageError: if it is something that never changes in a run, which has a checkpoint.
  """
  old = read_record(run_dir)
  if old is None:
    return []
  records = _completed(old, config), to_json(config)
  changed = differences(*records)
  begun = any((run_dir / 'checkpoints').glob('*'))
  if begun and not NEVER.isdisjoint(path for path, _, _ in changes(*records)):
    raise UsageError(
      f'{run_dir} holds another run, which this one cannot be:\n  '
      + '\n  '.join(changed)
      + '\ngive another --run-dir'
    )
  return changed


def write_json(path: Path, value: Any) -> None:
  """Writes a JSON file whole or not at all, also if the power is cut."""
  write_whole(path, json.dumps(value, indent=2) + '\n')


def read_record(run_dir: Path) -> dict[str, Any] | None:
  """What config.json holds, or None if there is none."""
  record = read_json(run_dir / 'config.json')
  if not isinstance(record, dict | None):
    raise UsageError(f'{run_dir / "config.json"} is not the record of a run')
  return record


def read_summary(path: Path, warn: Callable[[str], None]) -> dict[str, Any] | None:
  """What summary.json holds; None if there is none, or if it is damaged: the run writes it again."""
  try:
    summary = read_json(path)
  except UsageError as e:
    warn(f'damaged: {e}; it will be written again')
    return None
  if summary is None:
    return None
  needed = {'step', 'episode_return', 'steps_per_s'}
  if not isinstance(summary, dict) or not needed <= set(summary):
    raise UsageError(f'{path} is not the summary of a run')
  return summary


def _completed(record: dict[str, Any], config: Config) -> dict[str, Any]:
  """A run directory's record with later fields; of code, it may name what this configuration has."""
  return completed(record, own_code.named(to_json(config)))


def load_config(run_dir: Path, allow_code: Iterable[str] = ()) -> Config:
  """The config that a run directory records.

  Args:
    allow_code: modules that it may name, besides podrace's own; naming one runs it.

  Raises:
    UsageError: if there is none, or it names other modules; nothing is imported then.
  """
  record = read_record(run_dir)
  if record is None:
    raise UsageError(f'{run_dir} is not a run directory: it has no config.json')
  check_code(record, allow_code)
  return from_json(record)


def train(
  config: Config,
  run_dir: Path | str,
  override: bool = False,
  sinks: tuple[str, ...] = (),
  quiet: bool = False,
  listen: Listen | None = None,
  addresses: Addresses | None = None,
) -> dict[str, Any]:
  """Trains, from the beginning or from the newest good checkpoint; returns the summary.

  `listen` is where remote environments come to, if the config has them; `addresses` as in `build`.
  `quiet` silences the progress, not the warnings.

  Raises:
    UsageError, ValueError: if the config is wrong, or not that of the run in `run_dir`.
    RunError: if the run can't go on: the loss is not finite, or the disk is full.
    Stopped: on SIGTERM, SIGINT or SIGHUP, after saving.
  """
  validate(config)
  metrics.check_sinks(sinks)
  run_dir = Path(run_dir)
  leader = jax.process_index() == 0
  terminal = metrics.Terminal(config.total_updates * config.steps_per_update, config.seeds)
  warn = terminal.say if leader else _nothing
  say = _nothing if quiet else warn
  with _told(run_dir), contextlib.ExitStack() as stack:
    stack.callback(terminal.close)
    server = make_server(config, listen)
    program = build(config, server, addresses, run_dir)
    # Now that it can be a run: what is refused leaves no directory.
    try:
      run_dir.mkdir(parents=True, exist_ok=True)
    except OSError as e:
      raise UsageError(f'--run-dir {run_dir} cannot be a directory: {e.strerror}') from e
    is_ours = stack.enter_context(locked(run_dir)) if leader else lambda: True
    changed = changes_of(config, run_dir)
    if changed and not override:
      raise UsageError(
        f'{run_dir} holds a run with another configuration:\n  '
        + '\n  '.join(changed)
        + '\ngive --override to go on with the new one, or another --run-dir'
      )
    summary = read_summary(run_dir / 'summary.json', warn)
    if summary is not None and summary['step'] >= config.total_steps:
      if changed:
        raise UsageError(
          f'{run_dir} is finished at step {summary["step"]:,}, and what changed would not be used:\n  '
          + '\n  '.join(changed)
          + '\ngive a larger --total-steps as well, or another --run-dir'
        )
      warn(f'{run_dir} is finished: step {summary["step"]:,}, return {summary["episode_return"]}')
      return summary
    stop = stack.enter_context(Stop())
    if server is not None:
      stack.enter_context(server)
      say(f'listening for environments at {server.address}')
    if addresses is not None:
      say(
        f'parameters for `podrace act` are at {addresses.parameters}; its experience comes from '
        f'`podrace replay` at {", ".join(addresses.replay)}'
      )
    return _Run(config, program, run_dir, stop, terminal, warn, sinks, quiet, is_ours).go(stack)


def _nothing(message: str) -> None:
  pass


@contextlib.contextmanager
def _told(run_dir: Path) -> Iterator[None]:
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
    config: Config,
    program: Architecture,
    run_dir: Path,
    stop: Stop,
    terminal: metrics.Terminal,
    warn: Callable[[str], None],
    sinks: tuple[str, ...],
    quiet: bool,
    is_ours: Callable[[], bool] = lambda: True,  # the directory, still
  ) -> None:
    self.config, self.program, self.run_dir, self.stop = config, program, run_dir, stop
    self.is_ours = is_ours
    self.terminal, self.sink_names, self.quiet = terminal, sinks, quiet
    self.warn, self.say = warn, _nothing if quiet else warn
    self.leader = jax.process_index() == 0
    self.clock = Clock()
    self.since_line = Clock()  # what the current line of metrics is about
    self.compile_s = 0.0
    self.saved = -1  # the step of the newest checkpoint
    self.statistics: dict[str, Any] = {}  # by the architecture, before that checkpoint
    self.wall_before = 0.0  # seconds, of earlier lives
    self.born = time.perf_counter()

  def go(self, stack: contextlib.ExitStack) -> dict[str, Any]:
    config = self.config
    self.checkpoints = Checkpoints(self.run_dir / 'checkpoints', config.keep)
    stack.callback(self.checkpoints.close)
    # Before anything that takes long: who is killed then goes on as this run.
    if self.leader and read_record(self.run_dir) is None:
      write_json(self.run_dir / 'config.json', to_json(config))
    self.check_newest()
    started = time.perf_counter()
    # Several processes compile together: who leaves takes the others down.
    alone = 0.0 if jax.process_count() == 1 else GRACE_SECONDS
    self.say(f'compiling {config.env} for {self.program.mesh.size} device(s) ...')
    stack.callback(self.program.close)
    self.stop.during(self.program.compile, 'compilation', self.warn, alone)
    self.compile_s = time.perf_counter() - started
    state = self.restore()
    if self.leader:
      write_json(self.run_dir / 'config.json', to_json(config))
    seeds = np.arange(config.seed, config.seed + config.seeds, dtype=np.uint32)
    keys = jax.vmap(jax.random.key)(seeds)
    if state is None:
      started = time.perf_counter()
      state = self.stop.during(
        lambda: jax.block_until_ready(self.program.init(jax.random.clone(keys))),
        'initialisation', self.warn, alone,
      )  # fmt: skip
      self.compile_s += time.perf_counter() - started
    self.say(f'compiled in {self.compile_s:.1f} s')
    self.open_sinks(stack)
    self.program.start(state, keys, self.statistics)
    try:
      state = self.loop(state)
    except BaseException:
      if self.is_ours():
        with contextlib.suppress(CheckpointError):
          self.checkpoints.wait()
      raise
    self.check_directory()
    self.checkpoints.wait()
    self.check_directory()
    # Others are told before the summary is there: a run that dies here is not finished, and tells them again.
    with self.saving(self.updates_done(state), state):
      self.program.finished(state)
    return self.finish(state)

  def check_directory(self) -> None:
    """Ends the run before it writes into a directory that is not its own any more."""
    if not self.is_ours():
      raise RunError(
        f'{self.run_dir} was removed, moved or replaced while this run was in it; the run ends, and '
        'writes nothing more there'
      )

  @property
  def wall_s(self) -> float:
    """Seconds that the run has taken, over all its lives, without the time between them."""
    return self.wall_before + time.perf_counter() - self.born

  def open_sinks(self, stack: contextlib.ExitStack) -> None:
    self.sinks: list[metrics.Sink] = []  # besides `lines`
    self.lines: metrics.JsonLines | None = None
    if not self.leader:
      return
    self.lines = metrics.JsonLines(self.run_dir / 'metrics.jsonl', max(self.saved, 0))
    stack.callback(self.lines.close)
    for name in self.sink_names:
      sink = metrics.SINKS[name](self.run_dir)
      stack.callback(sink.close)
      self.sinks.append(sink)
    if not self.quiet:
      self.sinks.append(self.terminal)

  # --- the loop ---------------------------------------------------------------------------------

  def loop(self, state: Any) -> Any:
    config, pace = self.config, Pace()
    per_line = config.updates(config.log_every or -(-config.total_steps // 100))
    per_save = config.updates(config.checkpoint_every) if config.checkpoint_every else 0
    update, total = self.updates_done(state), config.total_updates
    last_save = time.perf_counter()
    while update < total:
      self.check_directory()
      began = time.perf_counter()
      goals = [total, _next(update, per_line)] + ([_next(update, per_save)] if per_save else [])
      if update < self.program.ready:
        goals.append(self.program.ready)
      n, stop, save = self.agree(
        min(min(goals) - update, pace.updates()),
        self.stop.signum,
        self.save_due(time.perf_counter() - last_save),
      )
      with self.saving(update, state):
        state, n, broken, finite = self.stop.during(
          functools.partial(self.call, state, n), 'a call of the program', self.warn, GRACE_SECONDS
        )
      seconds = time.perf_counter() - began
      update += n
      self.account(n, seconds)
      self.check_health(broken, finite, update)
      if n:
        pace.observe(n, seconds)
        if update == self.program.ready:  # from here on updates are dearer
          pace = Pace()
        if update % per_line == 0 or update == total:
          with self.saving(update, state):
            summary, state = self.program.read_log(state)
          self.log(update, summary, state)
        elif not self.quiet:
          self.terminal.progress(update * config.steps_per_update, self.rate(self.since_line))
      if save or stop or update == total or (per_save and update % per_save == 0):
        self.save(update, state)
        last_save = time.perf_counter()
      if stop and update < total:
        self.checkpoints.wait()
        raise Stopped(stop)
    return state

  def call(self, state: Any, updates: int) -> tuple[Any, int, Any, Any]:
    """Makes updates: the state after them, their number, and what `health` says of it."""
    after, n = self.program.advance(state, updates, lambda: bool(self.stop.signum))
    return after, n, *self.program.health(after)

  def save_due(self, seconds: float) -> bool:
    """Whether a checkpoint is due so long after the last one, or after the beginning."""
    if self.saved < 0:
      return seconds > FIRST_CHECKPOINT_SECONDS
    return seconds > CHECKPOINT_SECONDS and not self.config.checkpoint_every

  def agree(self, updates: int, signum: int, save: bool) -> tuple[int, int, bool]:
    """The same decisions on all processes: the first one's, and anybody's signal."""
    if jax.process_count() == 1:
      return updates, signum, save
    told = multihost_utils.process_allgather(np.array([updates, signum, save], np.int32))
    return int(told[0, 0]), int(told[:, 1].max()), bool(told[0, 2])

  def account(self, updates: int, seconds: float) -> None:
    steps = updates * self.config.steps_per_update * self.config.seeds
    for clock in (self.clock, self.since_line):
      clock.busy_s += seconds
      clock.steps += steps

  @staticmethod
  def rate(clock: Clock) -> float:
    return clock.steps / clock.busy_s if clock.busy_s else 0.0

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
    if self.saved >= 0:
      self.checkpoints.wait()  # so that it is there
      kept = f'the last good checkpoint is step {self.saved:,}'
    raise RunError(f'{what}; {kept}, in {self.run_dir / "checkpoints"}')

  def log(self, update: int, summary: dict[str, Any], state: Any) -> None:
    """Writes a line of metrics; `state` is saved if a sink fails."""
    episodes = np.atleast_1d(summary['episodes']).astype(np.int64)
    total = int(episodes.sum())
    length = np.sum(summary['length_sum'], dtype=np.float64)
    line: metrics.Line = {
      'step': update * self.config.steps_per_update,
      'wall_s': round(self.wall_s, 3),
      'steps_per_s': round(self.rate(self.since_line), 1),
      **mean_and_std(episodes, summary['return_sum'], summary['return_deviation']),
      'episode_length': metrics.number(length / total) if total else None,
      'episodes': total,
    }
    if self.config.seeds > 1:
      sums = np.asarray(summary['return_sum'], np.float64)
      line['episode_return_by_seed'] = [
        metrics.number(s / n) if n else None for s, n in zip(sums, episodes, strict=True)
      ]
      line['episodes_by_seed'] = episodes.tolist()
    line |= {name: metrics.number(np.mean(x)) for name, x in summary['metrics'].items()}
    line |= summary.get('host', {})
    self.since_line = Clock()
    if self.lines:  # first, and not in `saving`: a checkpoint of this update needs the line
      self.lines.write(line)
    with self.saving(update, state):
      for sink in self.sinks:
        sink.write(line)

  # --- checkpoints ------------------------------------------------------------------------------

  def save(self, update: int, state: Any) -> None:
    self.check_directory()
    step = update * self.config.steps_per_update
    if step == self.saved or not update:  # a run that has not begun begins alike again
      return
    if self.lines:
      self.lines.sync()
    meta = {
      'update': update,
      'wall_s': self.wall_s,
      'clock': dataclasses.asdict(self.clock),
      'since_line': dataclasses.asdict(self.since_line),
      'machine': machine(),
      'mesh': self.program.mesh.size,
      'steps_per_update': self.config.steps_per_update,
      'shapes': shapes_sha256(self.program.shapes),
      'replay': self.replay_record(),
      'statistics': self.program.statistics(),
    }
    params, rest = _split(state)
    extra = self.program.save(self.checkpoints.extra(step))
    self.checkpoints.save(step, params, rest, meta, extra)
    self.saved = step

  @contextlib.contextmanager
  def saving(self, update: int, state: Any) -> Iterator[None]:
    """What fails elsewhere is an error of the run, which saves `state` if it still can."""
    try:
      yield
    except Stopped:
      raise
    except (ActorFailed, ReplayFailed, RunError) as e:
      raise RunError(f'{e}\n{self.save_at_failure(update, state)}') from e
    except Exception as e:
      what = 'the run failed'
      if isinstance(e, jax.errors.JaxRuntimeError):
        what = 'JAX failed, on this device or with another process'
      raise RunError(
        f'{traceback.format_exc()}\n{what}; {self.save_at_failure(update, state)}'
      ) from e

  def save_at_failure(self, update: int, state: Any) -> str:
    """Saves if that is possible, and says what there is; raises nothing."""
    if not self.is_ours():
      return f'nothing is saved: {self.run_dir} was removed, moved or replaced'
    gone = any(isinstance(x, jax.Array) and x.is_deleted() for x in jax.tree.leaves(state))
    try:
      # Of several processes, the others would have to save as well.
      if jax.process_count() == 1 and not gone:
        self.save(update, state)
      self.checkpoints.wait()
    except (CheckpointError, OSError, jax.errors.JaxRuntimeError) as e:
      why = str(e)
    except Exception as e:  # whatever it is, what failed before is what the user is to see
      why = f'{type(e).__name__}: {e}'
    else:
      return (
        f'the run is saved at step {self.saved:,}, and goes on from there with the same --run-dir'
        if self.saved >= 0
        else 'nothing was saved yet'
      )
    with contextlib.suppress(Exception):
      self.checkpoints.wait()  # the one before may be under way
    steps = [
      step for step in self.checkpoints.steps() if step < update * self.config.steps_per_update
    ]
    kept = f'the last checkpoint is step {max(steps):,}' if steps else 'there is no checkpoint'
    return f'and it could not be saved: {why}; {kept}'

  def restore(self) -> Any | None:
    """The newest checkpoint that is whole; None if there is none at all."""
    params, rest = _split(self.program.shapes)
    if self.checkpoints.half_written:
      self.warn(f'dropped what was half-written: {", ".join(self.checkpoints.half_written)}')
    damaged: list[int] = []
    for step in self.checkpoints.steps():
      try:
        self.check_fits(self.checkpoints.meta(step))
        found = self.checkpoints.restore(step, params, rest)
        self.program.restore(self.checkpoints.extra(step), found.meta.get('extra'))
      except CheckpointError as e:
        if jax.process_count() > 1:
          raise
        self.warn(f'damaged: {e}')
        damaged.append(step)
        continue
      for bad in damaged:
        self.warn(f'moved the damaged checkpoint {bad} to {self.checkpoints.set_aside(bad)}')
      meta = found.meta
      self.saved = step
      self.wall_before, self.statistics = meta['wall_s'], meta['statistics']
      self.clock, self.since_line = Clock(**meta['clock']), Clock(**meta['since_line'])
      self.say(f'resuming at step {step:,}')
      here = machine()
      if changed := [f'{k} {v} -> {here[k]}' for k, v in meta['machine'].items() if here[k] != v]:
        self.warn(
          f'this is not where the run was: {", ".join(changed)}; it goes on, not bit for bit'
        )
      return found.rest._replace(train=found.rest.train._replace(params=found.params))
    if damaged:
      raise RunError(
        f'none of the {len(damaged)} checkpoints in {self.run_dir} can be read; '
        'to begin again, take another --run-dir'
      )
    return None

  def check_newest(self) -> None:
    """Raises UsageError if the newest checkpoint is another program's: before anything is compiled."""
    for step in self.checkpoints.steps():
      try:
        meta = self.checkpoints.meta(step)
      except CheckpointError:  # `restore` will say so
        continue
      self.check_fits(meta)
      return

  def check_fits(self, meta: dict[str, Any]) -> None:
    """Raises UsageError if a checkpoint is whole but of another program's state."""
    if meta['mesh'] != self.program.mesh.size:
      raise UsageError(
        f'the checkpoint at step {meta["step"]:,} was made on {meta["mesh"]} device(s) that learn, '
        f'this run has {self.program.mesh.size}: {self.devices_advice(meta["mesh"])}'
      )
    if meta['steps_per_update'] != self.config.steps_per_update:
      raise UsageError(
        f'the checkpoint at step {meta["step"]:,} counts {meta["steps_per_update"]} steps an update, '
        f"this run has {self.config.steps_per_update}: --num-envs and --unroll-length can't change "
        'in a run; start afresh in another --run-dir'
      )
    was, now = meta.get('replay'), self.replay_record()  # of an older podrace it has none
    if was and now and was != now:
      changed = [f'{k} {was.get(k)} -> {x}' for k, x in now.items() if was.get(k) != x]
      raise UsageError(
        f"the checkpoint at step {meta['step']:,} holds a replay of other settings, which can't "
        'change in a run:\n  ' + '\n  '.join(changed) + '\nstart afresh in another --run-dir'
      )
    if meta['shapes'] != shapes_sha256(self.program.shapes):
      old = read_record(self.run_dir)
      changed = differences(_completed(old, self.config), to_json(self.config)) if old else []
      raise UsageError(
        f'the checkpoint at step {meta["step"]:,} holds another kind of state: the agent, its '
        'network, the environment, --num-envs, or what Sebulba keeps of its actors (--lag, '
        "--actor-threads) has changed, which can't be in a run:\n  "
        + '\n  '.join(changed or ['nothing that config.json tells of: another podrace made it'])
        + '\nstart afresh in another --run-dir'
      )

  def replay_record(self) -> dict[str, float] | None:
    """What the replay that a checkpoint holds depends on; None if it holds none."""
    return self.program.windows.record() if self.program.windows else None

  def devices_advice(self, mesh: int) -> str:
    """How to have as many devices that learn as a checkpoint was made on."""
    if self.config.architecture == 'anakin':
      return f'give --devices {mesh}'
    old = _completed(read_record(self.run_dir) or {}, self.config)
    given = {name: old.get(name) for name in ('devices', 'actor_devices', 'learner_devices')}
    had = ' '.join(f'{option(name)} {value}' for name, value in given.items() if value)
    return (
      f'give --learner-devices with {mesh}, of all processes together; the run had '
      f'{had or "no options for its devices"}'
    )

  def updates_done(self, state: Any) -> int:
    return int(np.atleast_1d(jax.device_get(state.update))[0])

  def finish(self, state: Any) -> dict[str, Any]:
    """The summary, written once the last checkpoint is on disk."""
    summary = {
      'step': self.updates_done(state) * self.config.steps_per_update,
      **final_return(self.run_dir / 'metrics.jsonl'),
      'steps_per_s': round(self.rate(self.clock), 1),
      'compile_s': round(self.compile_s, 3),
      'wall_s': round(self.wall_s, 3),
      'params_sha256': params_sha256(state.train.params),
      'machine': machine(),
    }
    if self.leader:
      write_json(self.run_dir / 'summary.json', summary)
    return summary


def mean_and_std(episodes: Any, return_sum: Any, deviation: Any) -> dict[str, float | None]:
  """The return of all episodes together, from each seed's sums, and its standard deviation.

  None where no episode ended, and for what is not finite.
  """
  n, sums, apart = (np.atleast_1d(x).astype(np.float64) for x in (episodes, return_sum, deviation))
  n, sums, apart = n[n > 0], sums[n > 0], apart[n > 0]
  if not len(n):
    return {'episode_return': None, 'episode_return_std': None}
  with np.errstate(all='ignore'):
    mean = sums.sum() / n.sum()
    variance = (apart + n * np.square(sums / n - mean)).sum() / n.sum()
    std = np.sqrt(np.maximum(variance, 0.0))
  return {'episode_return': metrics.number(mean), 'episode_return_std': metrics.number(std)}


def final_return(path: Path) -> dict[str, Any]:
  """The mean return of the episodes that ended in the last tenth of the run."""
  lines = metrics.read(path)
  start = 0.9 * lines[-1]['step'] if lines else 0
  lines = [
    line for line in lines if line['episode_return'] is not None
  ]  # null: not finite, or none
  tail = [line for line in lines if line['step'] > start] or lines[-1:]
  episodes = sum(line['episodes'] for line in tail)
  if not episodes:
    return {'episode_return': None, 'episodes': 0}
  total = sum(line['episode_return'] * line['episodes'] for line in tail)
  result: dict[str, Any] = {'episode_return': total / episodes, 'episodes': episodes}
  if 'episode_return_by_seed' in tail[-1]:
    result['episode_return_by_seed'] = [
      _mean([(line['episode_return_by_seed'][i], line['episodes_by_seed'][i]) for line in tail])
      for i in range(len(tail[-1]['episodes_by_seed']))
    ]
  return result


def _mean(told: list[tuple[float | None, int]]) -> float | None:
  """The mean of (mean, count)s; None if nothing was counted."""
  known = [(mean, count) for mean, count in told if mean is not None]
  total = sum(count for _, count in known)
  return sum(mean * count for mean, count in known) / total if total else None


def _next(update: int, every: int) -> int:
  return (update // every + 1) * every


def _split(state: Any) -> tuple[Any, Any]:
  """The parameters, and the state without them: what a checkpoint keeps apart."""
  return state.train.params, state._replace(train=state.train._replace(params=()))
