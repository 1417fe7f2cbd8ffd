"""podrace completion: completes commands, options and names in a shell."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from podrace.agents import AGENTS
from podrace.commands import init, train
from podrace.commands.option_table import table
from podrace.envs import libraries, registry
from podrace.errors import UsageError
from podrace.settings.discovery_presets import PRESETS as DISCOVERIES
from podrace.settings.presets import PRESETS
from podrace.system.options import Command, Options
from podrace.system.output import print_text

SHELLS = {
  'bash': """\
_podrace() {
  local IFS=$'\\n' word i cut
  local -a typed=()
  for ((i = 1; i <= COMP_CWORD; i++)); do  # bash splits at : and =, which are parts of words here
    word=${COMP_WORDS[i]}
    if ((i > 1)) && [[ $word == [:=]* || ${COMP_WORDS[i-1]} == [:=] ]]; then
      typed[${#typed[@]}-1]+=$word
    else
      typed+=("$word")
    fi
  done
  word=${typed[${#typed[@]}-1]}
  COMPREPLY=($(compgen -W "$(podrace completion words "${typed[@]}" 2>/dev/null)" -- "$word"))
  cut=${word%"${word##*[:=]}"}  # what stands before the last of them is there already
  COMPREPLY=("${COMPREPLY[@]#"$cut"}")
  [[ ${#COMPREPLY[@]} == 1 && ${COMPREPLY[0]} == *: ]] && compopt -o nospace 2>/dev/null
  return 0
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
  "prints a shell's completion of commands, options, their values, presets, agents and environments",
  notes="""
bash:  podrace completion bash >> ~/.bashrc
zsh:   podrace completion zsh >> ~/.zshrc      (after compinit)
fish:  podrace completion fish > ~/.config/fish/completions/podrace.fish
""",
)
TAKE_PRESETS = ('train', 'act', 'reanalyse', 'bench', 'sweep')
FIRST = {
  'init': tuple(init.KINDS),
  'completion': tuple(SHELLS),
  'discover': tuple(DISCOVERIES),
}  # arguments of other commands


def run(args: list[str]) -> int:
  """Prints a script. It calls `podrace completion words ...`, which the command line answers by `words`."""
  if len(args) != 1 or args[0] not in SHELLS:
    raise UsageError(f'completion takes {", ".join(SHELLS)}, not {" ".join(args) or "nothing"}')
  print_text(SHELLS[args[0]], end='')
  return 0


def words(typed: list[str], commands: Mapping[str, Any]) -> list[str]:
  """What the last of the typed arguments, which may be empty, can become; none where a path is to come."""
  *before, last = typed
  if before and last.startswith('--') and '=' in last:
    name, _, value = last.partition('=')
    return [f'{name}={x}' for x in words([*before, name, value], commands)]
  if not before:
    found = list(commands)
  elif values := _values(before, commands):
    found = values
  elif before[0] in commands and last.startswith('-'):
    found = _options(before, commands)
  elif before[0] in TAKE_PRESETS and len(before) == 1:
    found = list(PRESETS)
  elif len(before) == 1:
    found = list(FIRST.get(before[0], ()))
  else:
    found = []
  return [x for x in found if x.startswith(last)]


def _options(before: list[str], commands: Mapping[str, Any]) -> list[str]:
  name = before[0]
  return sorted({o.name for o in commands[name].COMMAND.options} | {'--help', *_fields(before)})


def _values(before: list[str], commands: Mapping[str, Any]) -> list[str]:
  """What the option can be that stands last; none if it is no option, or takes values without names."""
  name, option = before[0], before[-1]
  if name not in commands or not option.startswith('--'):
    return []
  if option == '--agent':
    return list(AGENTS)
  if option == '--env':
    return _environments(on_host_only=name == 'envs')
  declared = {o.name: o.choices for o in commands[name].COMMAND.options}
  return list(declared.get(option) or _fields(before).get(option, ()))


def _environments(on_host_only: bool) -> list[str]:
  """Names of environments; of libraries whose environments have no list here, the library."""
  found = [f'{library}:' for library in libraries.HOST_LIBRARIES]
  if on_host_only:
    return found
  inside = registry.names().items()
  return [f'{library}:{n}' for library, names in inside for n in names or ('',)] + found


def _fields(before: list[str]) -> dict[str, tuple[str, ...]]:
  """Return the settings of a run that a command takes as options, each with its named values."""
  name, *rest = before
  if name == 'discover':
    rows = table().of('discover', 'rule', 'value function')
  elif name in TAKE_PRESETS:
    agent: str | None = Options(rest, train.COMMAND, lenient=True).text('--agent')
    if agent not in AGENTS:
      agent = PRESETS[rest[0]].agent if rest and rest[0] in PRESETS else None
    rows = table().of('run', 'sebulba') + table().of_agent(agent)
  else:
    return {}
  fields: dict[str, tuple[str, ...]] = {}
  for r in rows:  # of all agents, an option may have several rows
    fields[r.name] = tuple(dict.fromkeys((*fields.get(r.name, ()), *r.choices)))
  return fields
