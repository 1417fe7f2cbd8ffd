"""podrace train: train an agent, or resume a run."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Any

from podrace.commands import config_files, configure, help
from podrace.commands import shared_options as shared
from podrace.errors import UsageError
from podrace.run.directory import check_directory
from podrace.run.new_directory import choose_run_dir, name_run, run_directory
from podrace.run.progress import format_return
from podrace.settings import user_code
from podrace.settings.agents import agent_name
from podrace.settings.config import Config
from podrace.settings.record import check_recorded, to_json
from podrace.system.logs import log_to_stderr
from podrace.system.options import Command, Option, Options
from podrace.system.output import Lasting, lasting_results, print_text, results, results_alone

if TYPE_CHECKING:
  from podrace.distributed.net.announce import Announcement
  from podrace.run.processes import Place

COORDINATOR = 'coordinator'  # name of its address in announcements
OF_LISTEN = ('--keys', '--insecure', '--peer-timeout', '--announce')


class Train(Command):
  """The command with help that depends on the arguments."""

  def help(self, args: list[str]) -> str:
    """Return the help for the run that `args` make."""
    plain = [a for a in args if a != help.ALL]
    preset = configure.take_preset(plain)
    options = Options(plain, self, lenient=True)
    file = options.path('--config')
    if file is not None and not config_files.is_run(file):
      in_file = config_files.read_options(file)
      preset = configure.take_preset(in_file) or preset
      options = Options([*in_file, *plain], self, lenient=True)
    return help.train_help(self.options, options, preset, help.ALL in args)


COMMAND = Train(
  'train',
  '[PRESET] [OPTIONS]',
  'train an agent',
  (  # the fields of Config are further options
    Option('--run-dir', 'DIR', 'the run directory; an existing run resumes'),
    shared.AGENT,
    shared.NO_COMPILE_CACHE,
    shared.ALLOW_CODE,
    Option('--config', 'FILE', 'begin with the settings of a TOML file or of another run'),
    Option('--save-config', 'FILE', 'write all settings to a new file, .toml or .json'),
    shared.OVERRIDE,
    shared.SINKS,
    Option('--metrics-listen', 'HOST:PORT', 'serve the newest metrics to Prometheus, at /metrics'),
    Option('--metrics-insecure', '', 'for --metrics-listen beyond this machine: no keys'),
    shared.QUIET_RUN,
    Option('--listen', 'ADDRESS', 'for --envs remote: tcp://HOST:PORT or unix:PATH, see '
      'docs/distributed.md'),
    Option('--connect-replay', 'ADDRESSES', 'for --replay service: addresses of `podrace replay`, '
      'one for each shard, with commas; `podrace act` then gets parameters at --listen'),
    shared.SERVER_KEYS,
    shared.SERVER_INSECURE,
    shared.PEER_TIMEOUT,
    shared.ANNOUNCE,
    Option('--coordinator', 'HOST:PORT', 'address of process 0 of several, or auto'),
    Option('--num-processes', 'N', 'number of processes of the run'),
    Option('--process-id', 'I', 'index of this process, from 0'),
  ),
  others_pass=True,
  jax=True,
)  # fmt: skip


@results_alone()
def run(args: list[str]) -> int:
  """Train."""
  preset, options, of_run = _read_settings(args)
  run_dir, allowed = options.path('--run-dir'), configure.allowed_modules(options)
  if run_dir is not None:
    check_directory(run_dir)
  base = of_run or configure.base_config(preset, run_dir, options, allowed)
  if options.passed('--envs') == 'remote':  # which changes the default of --lag
    base = dataclasses.replace(base, envs='remote', lag='async')
  base = configure.with_architecture(base, options)
  config = _parse(base, options)
  place = _place(options)
  peers, metrics_at, quiet = _peers(options, place), metrics_address(options), '--quiet' in options
  if place is not None:
    with log_to_stderr('podrace train', quiet):
      _join(options, place)
  if of_run is None and configure.needs_defaults(preset, run_dir, options):
    config = configure.parse_with_defaults(base, config, options.arguments)
  check_recorded(config)
  if (file := options.path('--save-config')) is not None:
    config_files.write(file, config)
    print_text(f'settings: {file}', file=results())
    return 0

  if run_dir is not None and of_run is None and not quiet:
    configure.tell_of_new_run(preset, run_dir, options)

  import jax

  from podrace.run import loop as runs
  from podrace.topology import from_first

  sinks: tuple[Any, ...] = tuple(s for s in options.text('--sinks').split(',') if s)
  name = name_run(preset, config.env, config.log)
  with contextlib.ExitStack() as stack:
    if run_dir is None and '--coordinator' in options:  # all processes need the same directory
      run_dir = Path(from_first(str(choose_run_dir(name))))
    run_dir = stack.enter_context(run_directory(run_dir, name))
    stack.enter_context(log_to_stderr('podrace train', quiet))
    shared.enable_compile_cache(options)
    if metrics_at is not None and jax.process_index() == 0:  # it writes the metrics
      sinks += (_endpoint(metrics_at, stack),)
    summary = runs.train(
      config, run_dir, override='--override' in options, sinks=sinks, quiet=quiet, **peers
    )
  _report(run_dir, summary, config)
  from podrace.run.processes import leave_processes

  leave_processes()  # some exits of Python skip JAX's exit handlers
  return 0


def _read_settings(args: list[str]) -> tuple[str | None, Options, Config | None]:
  """Return the preset, the options (of --config first) and the settings of another run."""
  preset = configure.take_preset(args)
  options = Options(args, COMMAND)
  file = options.path('--config')
  if file is None:
    return preset, options, None
  of_run = config_files.read_run(file, configure.allowed_modules(options))
  if of_run is None:
    in_file = config_files.read_options(file)
    named = configure.take_preset(in_file)
    if preset is not None and named is not None:
      raise UsageError(f'{file} has the preset {named}: leave out {preset}')
    return preset or named, Options([*in_file, *args], COMMAND), None
  agent = configure.requested_agent(options)
  if preset is not None or agent not in (None, agent_name(of_run.agent)):
    raise UsageError(f'--config {file} has an agent: leave out {preset or f"--agent {agent}"}')
  return None, options, of_run


def _parse(base: Config, options: Options) -> Config:
  """Return a configuration with the options; an error names the file of --config."""
  try:
    return configure.parse(base, options.arguments)
  except UsageError as e:
    if (file := options.path('--config')) is None:
      raise
    raise UsageError(f'{e} (with the settings of --config {file})') from e


def _peers(options: Options, place: Place | None) -> dict[str, Any]:
  """Return the arguments of a run about remote environments, or about a replay service."""
  replay = '--connect-replay' in options
  if '--listen' not in options:
    if replay:
      raise UsageError('--connect-replay needs --listen, the address for `podrace act`')
    unused = [
      o for o in OF_LISTEN if o in options and not (o == '--announce' and _is_first(options, place))
    ]
    if unused:
      raise UsageError(f'{", ".join(unused)} needs --listen')
    return {}
  from podrace.distributed import net

  net.require()
  from podrace.distributed.net.listener import Listen
  from podrace.distributed.run_identity import Addresses

  common = (
    options.text('--listen'),
    options.path('--keys'),
    '--insecure' in options,
    options.number('--peer-timeout'),
    _announcement(options, 'params' if replay else 'envs', place),
  )
  if not replay:
    return {'listen': Listen(*common)}
  return {'addresses': Addresses(tuple(options.text('--connect-replay').split(',')), *common)}


def _announcement(options: Options, name: str, place: Place | None) -> Announcement | None:
  """Return the announcement of the address for environments or acting processes."""
  announcement = shared.announcement(options, name)
  if announcement is None or place is None:
    return announcement
  if name == 'envs' and place.num_processes > 1 and not place.is_announced:
    # All processes may have the same --announce, and environments connect to each of them.
    return announcement.numbered(place.process_id)
  if not _is_first(options, place):
    return announcement
  return announcement.with_other(COORDINATOR, f'tcp://{place.coordinator}')


def _is_first(options: Options, place: Place | None) -> bool:
  """Return whether this process is the coordinator, at an explicit or chosen address."""
  return place is not None and not place.process_id and options.text('--coordinator') != 'auto'


def metrics_address(options: Options) -> str | None:
  """Return the address of the metrics; None without --metrics-listen.

  Raises:
    UsageError: for a bad address, or one that needs --metrics-insecure.
  """
  insecure = '--metrics-insecure' in options
  if '--metrics-listen' not in options:
    if insecure:
      raise UsageError('--metrics-insecure needs --metrics-listen')
    return None
  from podrace.run import prometheus

  return prometheus.check_listen_address(options.text('--metrics-listen'), insecure)


def _endpoint(address: str, stack: contextlib.ExitStack) -> Any:
  """Return a sink that serves the metrics at `address`."""
  from podrace.run.prometheus import Endpoint

  endpoint = Endpoint(address)
  stack.callback(endpoint.close)
  logging.getLogger('podrace').info('metrics are at %s', endpoint.url)
  return endpoint


def _place(options: Options) -> Place | None:
  """Return the place of this process in a distributed run, or None."""
  names = [o for o in ('--coordinator', '--num-processes', '--process-id') if o in options]
  if not names:
    return None
  from podrace.run.processes import Place, detect_place

  coordinator = options.text('--coordinator')
  if coordinator == 'auto':
    if names[1:]:
      raise UsageError(f'--coordinator auto sets {" and ".join(names[1:])} itself; leave it out')
    return detect_place()
  if len(names) < 3:
    raise UsageError('--coordinator, --num-processes and --process-id go together')
  place = Place(coordinator, *(options.whole(name) for name in names[1:]))
  place.check()
  place = place.with_port()
  if place.bind and '--announce' not in options:
    raise UsageError(
      f'--coordinator {coordinator} chooses a port; add --announce FILE, for its peers to read'
    )
  return place


def _join(options: Options, place: Place) -> None:
  """Join the other processes of the run; announce the coordinator for --announce."""
  from podrace.run.processes import join_processes

  announcement = shared.announcement(options, COORDINATOR)
  if announcement is not None and _is_first(options, place):
    announcement.make(f'tcp://{place.coordinator}')
  join_processes(place)


def print_summary(run_dir: Path, summary: dict[str, Any], suffix: str = '') -> Lasting:
  """Print the results of a run; returns the output, for more lines."""
  is_known = summary['episode_return'] is not None
  returned = f'{format_return(summary)}{suffix}' if is_known else 'no episode ended'
  out = lasting_results()
  rate = summary['steps_per_s']
  speed = '' if rate is None else f', {rate:,.0f} steps/s'
  print_text(f'done: step {summary["step"]:,}, {returned}{speed}', file=out)
  print_text(f'run directory: {run_dir}', file=out)
  return out


def _report(run_dir: Path, summary: dict[str, Any], config: Config) -> None:
  from podrace.hooks import can_be_greedy
  from podrace.run.saved_params import best_step
  from podrace.settings.log_settings import replays_only

  out = print_summary(run_dir, summary, ' of the log' if replays_only(config) else '')
  diagnoses = summary.get('diagnostics', ())
  if summary['episode_return'] is None and 'no-episodes' not in {x['name'] for x in diagnoses}:
    steps = summary['step'] // config.num_envs
    print_text(
      f'No episode ended in the {steps:,} steps of each environment. Train for longer than an '
      'episode takes (--total-steps); only episodes that never end need a time limit.',
      file=out,
    )
  for entry in diagnoses:
    print_text(f'from step {entry["step"]:,}: {entry["message"]}', file=out)
  allow = user_code.options(user_code.named_modules(to_json(config)))
  env = '' if config.env else '--env LIB:NAME '
  sample = '' if can_be_greedy(config.agent) else '--sample '
  command = f'podrace eval {shlex.quote(str(run_dir))} --episodes 100 {sample}{env}{allow}'
  if config.eval_every and (step := best_step(run_dir)) is not None:
    print_text(f'best evaluation: step {step:,}; add --checkpoint best', file=out)
  print_text(f'next: {command.rstrip()}', file=out)
