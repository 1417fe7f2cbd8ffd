"""One run on the host: start or resume, step, log, checkpoint, stop."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
import numpy as np
from jax.experimental import multihost_utils

from podrace import metrics
from podrace.architecture import Architecture
from podrace.build import build, make_server
from podrace.checkpoint import CheckpointError, Checkpoints
from podrace.config import (
  Config,
  UsageError,
  differences,
  option,
  to_json,
  validate,
)
from podrace.errors import RunError
from podrace.record import (
  changes_of,
  completed_record,
  final_return,
  locked,
  machine,
  mean_and_std,
  params_sha256,
  read_record,
  read_summary,
  shapes_sha256,
  write_json,
)
from podrace.replay.host import ReplayFailed
from podrace.sebulba import ActorFailed
from podrace.stop import GRACE_SECONDS, Stop, Stopped

if TYPE_CHECKING:
  from podrace.distributed.handshake import Addresses
  from podrace.remote.hub import Listen

CALL_SECONDS = 0.5  # how long one call of the compiled program may take: signals wait for it
CHECKPOINT_SECONDS = 60.0  # between checkpoints, where the user doesn't say
FIRST_CHECKPOINT_SECONDS = 10.0  # until a run's first one, so that little is lost if it dies early


@dataclasses.dataclass
class Clock:
  """Where the time of a run went, over all its lives."""

  busy_s: float = 0.0  # in the compiled program
  steps: int = 0  # made in `busy_s`


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
      changed = differences(completed_record(old, self.config), to_json(self.config)) if old else []
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
    old = completed_record(read_record(self.run_dir) or {}, self.config)
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


def _next(update: int, every: int) -> int:
  return (update // every + 1) * every


def _split(state: Any) -> tuple[Any, Any]:
  """The parameters, and the state without them: what a checkpoint keeps apart."""
  return state.train.params, state._replace(train=state.train._replace(params=()))
