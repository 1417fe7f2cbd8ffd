"""podrace list: print the names of presets, agents and environments."""

from __future__ import annotations

import textwrap

from podrace.commands.option_table import table
from podrace.envs.libraries import HOST_LIBRARIES
from podrace.errors import UsageError
from podrace.settings.presets import PRESETS
from podrace.system.options import Command
from podrace.system.output import print_text

COMMAND = Command('list', '', 'presets, agents and environments')

HOST_EXAMPLES = {
  'ale': 'ale:pong, ale:breakout, ale:ms_pacman,sticky=0.25',
  'envpool': 'envpool:CartPole-v1, envpool:Pong-v5, envpool:HalfCheetah-v4',
  'c': 'c:my_env.c; of podrace itself c:cartpole, c:breakout, c:grid',
  'gymnasium': 'gymnasium:CartPole-v1, gymnasium:your_module:YourEnv-v0',
}


def run(args: list[str]) -> int:
  """Print the names."""
  if args:
    raise UsageError(f'list takes no arguments, not {" ".join(args)}')
  from podrace import envs

  print_text('presets:')
  for name, preset in PRESETS.items():
    print_text(f'  {name:24}{preset.about}')
  print_text('\nagents:')
  for name, about in table().agents.items():
    print_text(f'  {name:24}{about}')
  print_text('\nenvironments (LIB:NAME):')
  for library, names in envs.names().items():
    _print_filled(' '.join(f'{library}:{n}' for n in names or ('MODULE.FUNCTION',)))
  print_text('\nenvironments on the host, under sebulba only:')
  for library, known in HOST_LIBRARIES.items():
    _print_filled(f'{library}:NAME  {known.description}; {HOST_EXAMPLES[library]}')
  return 0


def _print_filled(text: str) -> None:
  print_text(textwrap.fill(f'  {text}', 100, subsequent_indent=' ' * 4, break_on_hyphens=False))
