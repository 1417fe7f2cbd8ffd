"""podrace completion: completes commands, options and names in a shell."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from podrace.agents import AGENTS
from podrace.commands import init, train
from podrace.commands.option_table import table
from podrace.envs import libraries, registry
from podrace.errors import UsageError
from podrace.experiments.suites import suite
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
  cut=${word%"${word##*[:=]}"}  # the line has the part up to the last of them
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
complete -c podrace \\
  -a '(podrace completion words (commandline -opc)[2..] (commandline -ct) 2>/dev/null)'
""",
}
COMMAND = Command(
  'completion',
  'bash|zsh|fish',
  'print a script by which a shell completes commands, options, values, presets and names',
  notes="""
bash:  podrace completion bash >> ~/.bashrc
zsh:   podrace completion zsh >> ~/.zshrc      (after compinit)
fish:  podrace completion fish > ~/.config/fish/completions/podrace.fish
""",
)
# Commands with options of train, and the number of arguments before their preset.
BEFORE_PRESET = dict.fromkeys(('train', 'act', 'reanalyse', 'label', 'sweep', 'launch'), 0)
BEFORE_PRESET['bench'] = 1
FIRST = {
  'bench': ('sebulba',),
  'record': tuple(PRESETS),
  'init': tuple(init.KINDS),
  'completion': tuple(SHELLS),
  'discover': tuple(DISCOVERIES),
  'reproduce': tuple(suite.names()),
}  # first arguments of the remaining commands


def run(args: list[str]) -> int:
  """Print a script. It calls `podrace completion words ...`, which `words` answers."""
  if len(args) != 1 or args[0] not in SHELLS:
    raise UsageError(f'completion takes {", ".join(SHELLS)}, not {" ".join(args) or "nothing"}')
  print_text(SHELLS[args[0]], end='')
  return 0


def words(typed: list[str], commands: Mapping[str, Any]) -> list[str]:
  """Return completions of the last typed argument, which may be empty; none for a path."""
  *before, last = typed
  if before and last.startswith('--') and '=' in last:
    name, _, value = last.partition('=')
    return [f'{name}={x}' for x in words([*before, name, value], commands)]
  candidates: Iterable[str] = ()
  if not before:
    candidates = commands
  elif values := _values(before, commands):
    candidates = values
  elif before[0] in commands and last.startswith('-'):
    candidates = _options(before, commands)
  elif BEFORE_PRESET.get(before[0]) == len(before) - 1:
    candidates = PRESETS
  elif len(before) == 1:
    candidates = FIRST.get(before[0], ())
  return [x for x in candidates if x.startswith(last)]


def _options(before: list[str], commands: Mapping[str, Any]) -> list[str]:
  name = before[0]
  return sorted({o.name for o in commands[name].COMMAND.options} | {'--help', *_fields(before)})


def _values(before: list[str], commands: Mapping[str, Any]) -> list[str]:
  """Return the named values of the last word if it is an option, else an empty list."""
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
  """Return names of environments, or LIB: for a library without a list of names."""
  on_host = [f'{library}:' for library in libraries.HOST_LIBRARIES]
  if on_host_only:
    return on_host
  in_jax = registry.names().items()
  return [f'{library}:{n}' for library, names in in_jax for n in names or ('',)] + on_host


def _fields(before: list[str]) -> dict[str, tuple[str, ...]]:
  """Return the settings of a run that a command takes as options, each with its named values."""
  name, *rest = before
  if name == 'discover':
    rows = table().of('discover', 'rule', 'value function')
  elif name in BEFORE_PRESET:
    rest = rest[BEFORE_PRESET[name] :]
    agent: str | None = Options(rest, train.COMMAND, lenient=True).text('--agent')
    if agent not in AGENTS:
      agent = PRESETS[rest[0]].agent if rest and rest[0] in PRESETS else None
    rows = table().of('run', 'sebulba') + table().of_agent(agent)
  else:
    return {}
  fields: dict[str, tuple[str, ...]] = {}
  for r in rows:  # of all agents, an option may have several rows
    for option in r.names:
      fields[option] = tuple(dict.fromkeys((*fields.get(option, ()), *r.choices)))
  return fields
