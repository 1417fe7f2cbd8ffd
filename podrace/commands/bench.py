"""podrace bench: the speed of Sebulba's stages."""

from __future__ import annotations

import dataclasses

from podrace.commands import configure, train
from podrace.commands.shared_options import AGENT
from podrace.errors import UsageError
from podrace.system.options import Command, Option, Options
from podrace.system.output import print_json, results_alone

COMMAND = Command(
  'bench',
  'sebulba [PRESET] [OPTIONS of train] [--seconds S]',
  "measure the environments, the actors' inference and the learner alone, and the whole run, with "
  'the sizes of the run',
  (AGENT, Option('--seconds', 'S', 'seconds for each of the four measurements', 10)),
  """
The last line printed is JSON, in steps/s: environment, inference, learner, combined. `parallel` is
the speed of the three taking turns on the same cores, 1/(1/e + 1/i + 1/l). `minimum` is the slowest
stage, for actors and learners on separate devices. `actor_time` splits the time of actor threads,
`bytes` lists the contents of a device, `advice` proposes better settings.
""",
  others_pass=True,
  jax=True,
)


@results_alone()
def run(args: list[str]) -> int:
  """Measure the stages."""
  if not args or args.pop(0) != 'sebulba':
    raise UsageError('bench measures sebulba: podrace bench sebulba [PRESET] [OPTIONS]')
  preset = configure.take_preset(args)
  all_options = (*train.COMMAND.options, *COMMAND.options)
  options = Options(args, dataclasses.replace(COMMAND, options=all_options))
  if refused := set(options.names) - {'--agent', '--seconds'}:
    raise UsageError(f'bench keeps no run: {", ".join(sorted(refused))} has no meaning')
  if not (seconds := options.number('--seconds')):
    raise UsageError(f'--seconds must be more than 0, not {seconds:g}')
  config = configure.parse_config(preset, options, 'podrace train', architecture='sebulba')
  from podrace.experiments.bench import bench_sebulba

  print_json(bench_sebulba(config, seconds))
  return 0
