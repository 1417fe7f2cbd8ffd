"""podrace completion: completes commands, options and names in a shell."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from podrace.agents import AGENTS
from podrace.commands import help, train
from podrace.commands.options import Command
from podrace.errors import UsageError
from podrace.presets import PRESETS

SHELLS = {
  'bash': """\
_podrace() {
  local IFS=$'\\n' word=${COMP_WORDS[COMP_CWORD]}
  COMPREPLY=($(compgen -W "$(podrace completion words "${COMP_WORDS[@]:1:COMP_CWORD}" 2>/dev/null)" -- "$word"))
}
complete -o default -F _podrace podrace
""",
  'zsh': """\
_podrace() {
  local -a found
  found=(${(f)"$(podrace completion words "${(@)words[2,CURRENT]}" 2>/dev/null)"})
  compadd -a found || _files
}
compdef _podrace podrace
""",
  'fish': """\
complete -c podrace -a '(podrace completion words (commandline -opc)[2..] (commandline -ct) 2>/dev/null)'
""",
}
COMMAND = Command(
  'completion',
  'bash|zsh|fish',
  "prints a shell's completion of commands, options, presets and agents",
  notes="""
bash:  podrace completion bash >> ~/.bashrc
zsh:   podrace completion zsh >> ~/.zshrc      (after compinit)
fish:  podrace completion fish > ~/.config/fish/completions/podrace.fish
""",
)
TAKE_PRESETS = ('train', 'act', 'bench')


def run(args: list[str]) -> int:
  """Prints a script. It calls `podrace completion words ...`, which the command line answers by `words`."""
  if len(args) != 1 or args[0] not in SHELLS:
    raise UsageError(f'completion takes {", ".join(SHELLS)}, not {" ".join(args) or "nothing"}')
  print(SHELLS[args[0]], end='')
  return 0


def words(typed: list[str], commands: Mapping[str, Any]) -> list[str]:
  """What the last of the typed arguments, which may be empty, can become; none where a path is to come."""
  *before, last = typed
  if not before:
    found = list(commands)
  elif before[-1] == '--agent':
    found = list(AGENTS)
  elif before[0] in commands and last.startswith('-'):
    found = _options(before, commands)
  elif before[0] in TAKE_PRESETS and len(before) == 1:
    found = list(PRESETS)
  else:
    found = []
  return [x for x in found if x.startswith(last)]


def _options(before: list[str], commands: Mapping[str, Any]) -> list[str]:
  name, *rest = before
  found = [o.name for o in commands[name].COMMAND.options] + ['--help']
  if name in TAKE_PRESETS:
    preset = rest[0] if rest and rest[0] in PRESETS else None
    agent = rest[rest.index('--agent') + 1] if '--agent' in rest[:-1] else None
    agent = agent if agent in AGENTS else None
    text = help.train_help(train.COMMAND.options, agent, preset, everything=not (agent or preset))
    found += [line.split()[0] for line in text.splitlines() if line.startswith('  --')]
  return sorted(set(found))
