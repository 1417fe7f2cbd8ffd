"""The command line. Each command is a file in podrace/commands. Help does not import jax."""

from __future__ import annotations

import contextlib
import gc
import importlib
import os
import pkgutil
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from podrace import commands
from podrace.commands import completion
from podrace.errors import RunError, Stopped, UsageError, unknown
from podrace.settings import user_code
from podrace.system.files import WRONG_PATHS
from podrace.system.jax_settings import check_jax
from podrace.system.logs import escape_logs
from podrace.system.output import (
  flush_standard,
  open_standard,
  print_text,
  tell,
  tell_exception,
  unwritten,
)
from podrace.system.process import end_at_once, end_on_signals, leave, on_signals, tell_of_faults

USAGE = """\
podrace: reinforcement learning at scale in JAX

  podrace train [PRESET] [OPTIONS]    train an agent; without arguments, IMPALA on Catch
  podrace discover [PRESET] ...       train a rule by which agents learn
  podrace sweep [PRESET] --vary ...   train with many settings and show the best
  podrace reproduce NAME              train a suite of published experiments, and compare
  podrace eval DIR [--episodes N]     evaluate the newest checkpoint of a run
  podrace record RUN --to DIR ...     record episodes as a data set, for train --log
  podrace watch RUN                   write videos of its policy
  podrace export RUN DIR              write its policy, for use without training code
  podrace runs [DIR]                  list runs with their progress, return and state
  podrace follow RUN                  show a run with small curves until it ends
  podrace plot RUN...                 draw learning curves, and scores over tasks
  podrace report RUN...               write runs as one HTML page: curves, speed, faults, videos
  podrace rm RUN...                   delete runs
  podrace launch [PRESET] --as ...    start all processes of a distributed run
  podrace envs --connect ADDRESS ...  environments for a learner on another machine
  podrace act [PRESET] ...            acting processes for a learner with a replay service
  podrace reanalyse [PRESET] ...      newer targets for the contents of a replay service
  podrace label [PRESET] ...          targets for a learner that learns from labels
  podrace replay --listen ADDRESS ... serve replay tables
  podrace keys new DIR                make keys for learners, services and their clients
  podrace top ADDRESS                 show the clients of a learner or a service
  podrace list                        list presets, agents and environments
  podrace devices [OPTIONS]           list the devices, and their roles under Sebulba
  podrace init KIND NAME              write a working agent, env, cenv or network, and its test
  podrace completion bash|zsh|fish    print a script for completion in a shell
  podrace bench sebulba [PRESET] ...  measure the stages alone and together
  podrace plan RATES --as A ...       estimate speed, cost and bottleneck of a distributed run

`podrace COMMAND --help` has the details.
"""


def _commands() -> dict[str, Any]:
  """Return the modules of podrace.commands that declare a command, by its name."""
  names = (f'{commands.__name__}.{m.name}' for m in pkgutil.iter_modules(commands.__path__))
  modules = [importlib.import_module(name) for name in names]
  return {m.COMMAND.name: m for m in modules if hasattr(m, 'COMMAND')}


COMMANDS = _commands()
FOREIGN = {  # a command, with other names for it
  'train': 'run learn fit',
  'eval': 'test evaluate rollout',
  'watch': 'enjoy play render video',
  'sweep': 'tune optimize hpo search',
  'reproduce': 'suite benchmark experiment',
  'runs': 'ls status ps',
  'follow': 'tail log logs',
  'report RUN or podrace plot RUN': 'tensorboard dashboard compare diff',
  'export': 'save convert onnx',
  'rm': 'delete remove clean',
  '--version': 'version',
}
HELP = {'-h', '--help', '--help-all'}
# Commands that continue if nothing reads their output.
LASTING = (
  'train',
  'discover',
  'sweep',
  'reproduce',
  'act',
  'reanalyse',
  'label',
  'envs',
  'replay',
  'launch',
)
LEAVE_SECONDS = 2.0  # grace for the other processes of a run, if this one could not save all
UNREAD = 141  # exit code of the remaining commands on a closed pipe, as a shell reports SIGPIPE


def main(argv: Sequence[str] | None = None) -> None:
  """Run a command and exit: 0 done, 2 bad usage or input, 1 failed, 128 + n on signal n."""
  args = list(sys.argv[1:] if argv is None else argv)
  open_standard()
  tell_of_faults()
  escape_logs()
  user_code.leave_here()
  user_code.ALLOWED.clear()
  if args[1:] and args[0] in HELP:  # podrace --help train
    args[:2] = args[1::-1]
  lasting = bool(args) and args[0] in LASTING
  # Until the command installs its handlers, nothing is saved, and an exception could be swallowed.
  handlers = on_signals(end_at_once) if lasting else contextlib.nullcontext()
  with handlers:
    try:
      code = _guarded(args)
    except Exception:
      if not _has_peers():
        raise
      tell(traceback.format_exc())
      code = 1
  error = flush_standard()
  if error is not None and not lasting and not code:
    code = UNREAD
    if isinstance(error, OSError) and not isinstance(error, BrokenPipeError):
      code = _complain(unwritten(error), 1)
  # A thread may still compile, and nothing can stop it. A process of a distributed run would wait
  # for its peers at a regular exit: they learn of the failure only when JAX aborts them.
  if code > 128 or (code in (1, 2) and _has_peers()):
    os._exit(code)
  sys.exit(code)


def entry() -> None:
  """Run `main` as a process, and exit with its code even if threads still run."""
  end_on_signals()
  gc.set_threshold(100_000, 20, 100)  # by default it takes a fifth of a start
  sys.excepthook = tell_exception
  try:
    main()
  except SystemExit as e:
    if not isinstance(e.code, int):
      raise
    leave(e.code)


def _has_peers() -> bool:
  """Return whether this process shares its run with other processes."""
  coordinator = sys.modules.get('podrace.run.processes')
  return coordinator is not None and coordinator.has_joined()


def _unknown_command(name: str) -> UsageError:
  ours = next((ours for ours, names in FOREIGN.items() if name.lower() in names.split()), '')
  if ours:
    return UsageError(f'unknown command {name!r}: use podrace {ours}')
  return unknown('command', name, COMMANDS)


def _guarded(args: list[str]) -> int:
  try:
    if not args or args in (['-h'], ['--help']):
      print_text(USAGE, end='')
      return 0
    if args[0] == '--version':
      from podrace.version import __version__

      print_text(__version__)
      return 0
    name, *rest = args
    if name not in COMMANDS:
      raise _unknown_command(name)
    if name == 'completion' and rest[:1] == ['words']:  # a shell calls this at each TAB
      print_text('\n'.join(completion.words(rest[1:] or [''], COMMANDS)))
      return 0
    command = COMMANDS[name]
    if not HELP.isdisjoint(rest):
      print_text(command.COMMAND.help([a for a in rest if a not in ('-h', '--help')]))
      return 0
    if command.COMMAND.jax:
      check_jax()
    return command.run(rest)
  except ValueError as e:  # UsageError among them
    if not is_ours(e) and not _is_of_jax(e, 'config.py'):
      raise
    return _complain(e, 2)
  except KeyboardInterrupt:
    return 130
  except BrokenPipeError:  # the reader has closed its end, as in `podrace list | head`
    return UNREAD
  except OSError as e:
    return _complain_of_path(e)
  except Stopped as e:
    return _end_stopped(e, args[0])
  except RunError as e:
    return _complain(e, 1)
  except (RuntimeError, AssertionError) as e:
    if not _is_of_jax(e, 'xla_bridge.py'):
      raise
    # For some names JAX says no more than that an assertion failed.
    named = f'JAX has no devices of JAX_PLATFORMS={os.environ.get("JAX_PLATFORMS", "")}'
    return _complain(e if str(e) else UsageError(f'{named}; unset it, or install them for JAX'), 2)


def _end_stopped(stopped: Stopped, command: str) -> int:
  """Tell of a run that a signal stopped; returns the exit code."""
  from podrace.run.processes import leave_processes

  option = '--dir' if command in ('sweep', 'reproduce') else '--run-dir'
  advice = (
    f'start again with the same {option} to go on'
    if stopped.kept
    else 'no step was made, and nothing is kept'
  )
  tell(f'stopped by {stopped}; {advice}')
  # Peers that were not signalled keep running, so leaving must not wait for them without limit.
  leave_processes(LEAVE_SECONDS if stopped.unsaved else None)
  return 128 + stopped.signum


def _complain_of_path(error: OSError) -> int:
  """Tell of a path that cannot be read or written; raise `error` if it is of other code."""
  if error.filename is None and _is_nowhere():
    return _complain(UsageError('the working directory was removed: change to another one'), 2)
  if error.filename is None and _file(error).name == 'tempfile.py':
    return _complain(RunError(f'{error.strerror}: free some space, or set TMPDIR'), 1)
  if error.filename is None or not _is_of_files(error):
    raise error
  text = f'{error.filename} cannot be read or written: {error.strerror}'
  code = 2 if error.errno in WRONG_PATHS else 1
  return _complain(RunError(text).with_traceback(error.__traceback__), code)


def _is_nowhere() -> bool:
  """Return whether the working directory does not exist any more."""
  try:
    os.getcwd()
  except FileNotFoundError:
    return True
  return False


def is_ours(error: Exception) -> bool:
  """Return whether podrace raised the error, and not the user's code or a library."""
  return _file(error).is_relative_to(Path(__file__).parent)


def _is_of_files(error: Exception) -> bool:
  """Return whether podrace raised the error, or called a library function for files that did."""
  modules = [f.f_globals['__name__'] for f, _ in traceback.walk_tb(error.__traceback__)]
  own = [m for m in modules if m.partition('.')[0] not in ('pathlib', 'tempfile', 'shutil', 'os')]
  return bool(own) and own[-1].partition('.')[0] == 'podrace'


def _is_of_jax(error: Exception, file: str) -> bool:
  """Return whether a file of JAX raised it: config.py for variables, xla_bridge.py for devices."""
  return _file(error).parts[-3:] == ('jax', '_src', file)


def _file(error: Exception) -> Path:
  """Return the file that raised the error."""
  *_, (frame, _) = traceback.walk_tb(error.__traceback__)
  return Path(frame.f_code.co_filename)


def _complain(error: Exception, code: int) -> int:
  if os.environ.get('PODRACE_TRACEBACK'):
    raise error
  tell(f'podrace: {error}')
  return code


if __name__ == '__main__':
  entry()
