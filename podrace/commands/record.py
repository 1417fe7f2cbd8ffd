"""podrace record: record episodes as a Minari data set."""

from __future__ import annotations

from podrace.commands.shared_options import (
  ALLOW_CODE,
  CHECKPOINT,
  NO_COMPILE_CACHE,
  allowed_modules,
  enable_compile_cache,
)
from podrace.errors import UsageError
from podrace.system.logs import log_to_stderr
from podrace.system.options import Command, Option, Options
from podrace.system.output import print_json, results_alone, tell

COMMAND = Command(
  'record',
  'RUN|PRESET --episodes N --to DIRECTORY [OPTIONS]',
  'record episodes as a Minari data set, for --log of podrace train',
  (
    Option('--episodes', 'N', 'number of episodes', 100),
    Option('--to', 'DIRECTORY', 'the new directory of the data set, such as cartpole-medium-v0'),
    Option('--env', 'LIB:NAME', "another environment than the run's, with the same spaces"),
    Option('--scripted', '', 'act by the scripted policy of the environment'),
    Option('--random', '', 'act at random'),
    Option('--greedy', '', 'take the best action (default: sampled, as in training)'),
    Option('--noise', 'P', 'share of actions that are drawn at random instead', 0),
    Option('--seed', 'S', 'seed of the first episode; the next have the next numbers', 0),
    Option('--max-steps', 'N', 'truncate longer episodes', 1_000_000),
    Option('--member', 'I', 'index of the seed, from 0, in a run with --seeds', 0),
    CHECKPOINT,
    NO_COMPILE_CACHE,
    ALLOW_CODE,
  ),
  """
A preset, or --env alone, names the environment for --scripted or --random. The last line printed is
JSON: episodes, steps, episode_return_mean, episode_return_std, bytes, dataset.
""",
  jax=True,
  foreign={
    '--to DIRECTORY': 'output out output-dir dataset-id dataset',
    '--episodes': 'n-episodes num-episodes',
    '--noise': 'epsilon eps',
  },
)  # fmt: skip


@results_alone()
def run(args: list[str]) -> int:
  """Record."""
  options = Options(args, COMMAND)
  folder = options.path('--to')
  if folder is None:
    raise UsageError('record needs --to DIRECTORY, a new directory for the data set')
  ways = [name for name in ('--scripted', '--random') if name in options]
  if len(ways) > 1:
    raise UsageError('--scripted and --random: give one of them')
  if ways and (unused := sorted({'--checkpoint', '--greedy', '--member'} & {*options.names})):
    raise UsageError(f'{ways[0]} does not use {", ".join(unused)}: leave it out')
  env, allowed = options.text('--env'), allowed_modules(options)
  name = _name(options, bool(ways and env))
  from podrace.run import record

  recording = record.Recording(
    options.whole('--episodes'),
    options.whole('--seed'),
    ways[0][2:] if ways else record.POLICY,
    options.number('--noise'),
    '--greedy' in options,
    options.whole('--max-steps'),
    options.whole('--member'),
  )
  with log_to_stderr('podrace record'):
    enable_compile_cache(options)
    result = record.record(name, recording, folder, env, options.text('--checkpoint'), allowed)
  tell(
    f'recorded {result["episodes"]:,} episodes, {result["steps"]:,} steps, return '
    f'{result["episode_return_mean"]:.2f} ± {result["episode_return_std"]:.2f}, in {folder}'
  )
  print_json(result)
  return 0


def _name(options: Options, is_optional: bool) -> str:
  """Return the run or preset that is named; '' if there is none and none is needed."""
  if is_optional and not options.arguments:
    return ''
  return options.one_argument('run directory or preset')
