"""The code in the docs runs, page by page; commands are read as the command line reads them."""

from __future__ import annotations

import contextlib
import importlib
import json
import re
import shlex
import shutil
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest
import rule_files
from shorthand import Patch, slow_after

import podrace.hooks
from podrace.agents import AGENTS
from podrace.cli import COMMANDS
from podrace.commands import configure
from podrace.commands.help import train_help
from podrace.commands.train import COMMAND as TRAIN
from podrace.settings.presets import PRESETS
from podrace.settings.record import to_json
from podrace.system.files import write_json
from podrace.system.options import Options

ROOT = Path(__file__).parent.parent
ALL = [ROOT / 'README.md', *sorted((ROOT / 'docs').rglob('*.md'))]
PAGES = [p for p in ALL if '```python' in p.read_text()]

# Of which the code trains, or compiles much.
SLOW = {'docs/logs.md', 'docs/own.md', 'docs/planning.md', 'docs/python.md'}


def name_of(page: Path) -> str:
  return page.relative_to(ROOT).as_posix()


def blocks(page: Path, language: str = '') -> list[str]:
  """The blocks of code in a language; without one, what is typed in a shell."""
  found: list[str] = []
  within: str | None = None  # the language of the block that is open
  for line in page.read_text().splitlines():
    fence = line.strip().startswith('```')
    if fence and within is None:
      within = line.strip()[3:]
      if within == language:
        found.append('')
    elif fence:
      within = None
    elif within == language:
      found[-1] += line + '\n'
  return [textwrap.dedent(block) for block in found]


@pytest.mark.parametrize(
  'page',
  [pytest.param(p, marks=pytest.mark.slow) if name_of(p) in SLOW else p for p in PAGES],
  ids=name_of,
)
def test_page(page: Path, tmp_path: Path, monkeypatch: Patch) -> None:
  monkeypatch.chdir(tmp_path)
  monkeypatch.setenv('MINARI_DATASETS_PATH', str(tmp_path / 'datasets'))
  module = {'__name__': f'docs_{page.stem.replace("-", "_")}'}
  assert blocks(page, 'python')
  for block in blocks(page, 'python'):
    exec(compile(block, str(page), 'exec', dont_inherit=True), module)


class Begun(Exception):
  """A command has read its arguments and begins its work."""


DOORS = {  # command -> what it calls when it begins its work
  'train': 'podrace.run.loop.train',
  'discover': 'podrace.run.loop.discover',
  'sweep': 'podrace.experiments.sweep.plan.run_sweep',
  'reproduce': 'podrace.experiments.suites.reproduce.reproduce',
  'reproduce --page': 'podrace.experiments.suites.page.write_page',
  'bench': 'podrace.experiments.bench.bench_sebulba',
  'act': 'podrace.distributed.acting.act',
  'reanalyse': 'podrace.distributed.stage.run',
  'label': 'podrace.distributed.stage.run',
  'launch': 'podrace.commands.launch.LaunchRequest',
  'plan': 'podrace.commands.plan.read',
  'envs': 'podrace.distributed.environments.client.run',
  'replay': 'podrace.commands.replay.serve',
  'top': 'podrace.distributed.net.dashboard.run',
  'keys': 'podrace.distributed.net.keys.new_keys',
  'eval': 'podrace.run.evaluate.evaluate',
  'watch': 'podrace.run.video.film.watch',
  'export': 'podrace.policy.export.export',
  'record': 'podrace.run.record.record',
  'runs': 'podrace.commands.runs.find',
  'plot': 'podrace.commands.plot.find',
  'report': 'podrace.commands.report.find',
  'devices': 'podrace.topology.split_devices',
}
SMALL = {
  'list',
  'init',
  'completion',
}  # these run; follow and rm need a run, so their options are read
# Modules of the user's own that commands on a page name, and which of its blocks they are.
MODULES = {'docs/own.md': {'a2c': 0}, 'docs/planning.md': {'mine': 0}}


def test_no_command_is_passed_over() -> None:
  """Those in blocks whose language is not named are all lines that begin with podrace."""
  line = re.compile(r' *(?:\w+=\S+ )?(?:\.venv/bin/)?podrace ')
  for page in ALL:
    text = '\n'.join(re.split(r'\n *```', page.read_text())[1::2])  # what is within fences
    assert len(commands(page)) == sum(bool(line.match(x)) for x in text.splitlines()), page
  for name in MODULES:
    assert commands(ROOT / name), name


def commands(page: Path) -> list[list[str]]:
  """The arguments of all commands in the shell blocks of a page."""
  lines = [line for block in blocks(page) for line in block.splitlines()]
  found = [re.match(r'(?:\w+=\S+ )?(?:\.venv/bin/)?podrace (.*)', line) for line in lines]
  return [shlex.split(f.group(1), comments=True) for f in found if f]


# Pages of suites are written from the commands that test_suites reads.
MANY = ROOT / 'docs' / 'results.md'  # has a command for each run
GENERATED = [p for p in ALL if commands(p) and (p.parent.name == 'results' or p == MANY)]
WRITTEN = [p for p in ALL if commands(p) and p not in GENERATED]


@pytest.mark.parametrize(
  'page', slow_after(len(WRITTEN), *WRITTEN, *GENERATED), ids=map(name_of, WRITTEN + GENERATED)
)
def test_commands(page: Path, tmp_path: Path, monkeypatch: Patch) -> None:
  """Each is run until its work begins."""
  monkeypatch.chdir(tmp_path)
  monkeypatch.setattr(sys, 'path', [str(tmp_path), *sys.path])
  known = set(sys.modules)
  stub(monkeypatch)
  (tmp_path / 'runs' / 'rule').mkdir(parents=True)
  rule_files.write(tmp_path / 'disco_103.npz')  # which the pages say how to download
  for path in ('lpg.npz', 'runs/rule/rule.npz'):
    shutil.copy(rule_files.small_lpg(), tmp_path / path)
  shutil.copy(ROOT / 'examples' / 'own_agent.py', tmp_path)
  (tmp_path / 'mine.toml').write_text('preset = "cartpole"')
  (tmp_path / 'runs' / 'OTHER').mkdir()
  write_json(tmp_path / 'runs' / 'OTHER' / 'config.json', to_json(PRESETS['catch']()))
  for module, index in MODULES.get(name_of(page), {}).items():
    (tmp_path / f'{module}.py').write_text(blocks(page, 'python')[index])
  for args in commands(page):
    read(args)
  for module in set(sys.modules) - known:
    if str(getattr(sys.modules[module], '__file__', '')).startswith(str(tmp_path)):
      del sys.modules[module]


def stub(monkeypatch: Patch) -> None:
  """Nothing begins its work, joins other processes, or makes environments."""

  def begun(*_: Any, **__: Any) -> None:
    raise Begun

  for door in DOORS.values():
    module, _, name = door.rpartition('.')
    monkeypatch.setattr(importlib.import_module(module), name, begun)
  for door in ('processes.join_processes', 'processes.detect_place', 'compile_cache.enable'):
    monkeypatch.setattr(f'podrace.run.{door}', lambda *_: None)
  monkeypatch.setattr('podrace.commands.watch.window', lambda _: None)
  searching = podrace.configure('catch', agent='muzero')  # eval changes settings of its search
  monkeypatch.setattr('podrace.run.directory.load_config', lambda *_: searching)
  monkeypatch.setattr('podrace.commands.config_files.write', begun)
  # Below, suites have no defaults, which their records have.
  monkeypatch.setattr('podrace.experiments.suites.reproduce.check_settings', lambda *_: None)
  monkeypatch.setattr(
    configure,
    'parse_with_defaults',
    lambda base, _, args, prog='': configure.parse(base, args, prog),
  )


def read(args: list[str]) -> None:
  """Raises an error if a command refuses its arguments."""
  command = COMMANDS[args[0]]
  if '--help' in args:
    assert command.COMMAND.help([a for a in args[1:] if a != '--help'])
  elif args[0] in SMALL:
    assert command.run(args[1:]) == 0, args
  elif args[0] in DOORS:
    with contextlib.suppress(Begun):
      command.run(args[1:])
      raise AssertionError(f'did not begin: {args}')
  else:
    assert Options(args[1:], command.COMMAND).arguments


def test_a_command_that_is_wrong_is_found(tmp_path: Path, monkeypatch: Patch) -> None:
  monkeypatch.chdir(tmp_path)
  stub(monkeypatch)
  for wrong in ('train cartpol', 'train cartpole --agent.rate 1', 'plot runs --output x.png'):
    with pytest.raises((ValueError, SystemExit)):  # SystemExit: tyro's
      read(wrong.split())


EVERY_HELP = train_help(TRAIN.options, Options([], TRAIN, lenient=True), None, True)
EVERY_FLAG = set(re.findall(r'--[\w.-]+', EVERY_HELP.replace('[no-]', '')))


def flags_of(command: str) -> set[str]:
  """The options that a command knows."""
  found = {o.name for o in COMMANDS[command].COMMAND.options} | {'--help', '--help-all'}
  return found | EVERY_FLAG if COMMANDS[command].COMMAND.others_pass else found


@pytest.mark.parametrize('page', ALL, ids=name_of)
def test_names_in_the_text(page: Path) -> None:
  """Commands and options that sentences and tables name are there."""
  text = re.sub(r'^ *```.*?^ *```', '', page.read_text(), flags=re.DOTALL | re.MULTILINE)
  quoted = re.findall(r'`([^`\n]+)`', text)
  wrong = []
  for words in (q.split() for q in quoted):
    if words == ['podrace', 'parameters']:  # a name in the protocol
      continue
    if words[0] == 'podrace' and len(words) > 1 and words[1].isalpha():
      named = [w.partition('=')[0] for w in words[2:] if w.startswith('--')]
      ok = words[1] in COMMANDS and set(named) <= flags_of(words[1])
    elif words[0].startswith('--agent.'):
      # The name of an agent of one's own has fields that podrace does not know.
      flag = words[0].partition('=')[0].replace('.no-', '.')
      ok = flag in EVERY_FLAG or flag in ('--agent.FIELD', '--agent.NAME')
    else:
      continue
    if not ok:
      wrong.append(' '.join(words))
  assert not wrong


@pytest.mark.parametrize('agent', AGENTS)
def test_implementation_details_name_functions_of_the_code(agent: str) -> None:
  text = (ROOT / 'docs' / 'agents' / f'{agent}.md').read_text()
  details = text.partition('## Implementation details')[2].partition('\n## ')[0]
  named = re.findall(r'`([A-Za-z_]\w*)\.([A-Za-z_]\w*)`', details)
  assert named
  module = importlib.import_module(AGENTS[agent][0])
  for place, name in named:
    owner = getattr(module, place, None)
    if owner is None:
      package = 'podrace' if place in ('returns', 'distributions') else 'podrace.agents'
      owner = importlib.import_module(f'{package}.{place}')
    assert hasattr(owner, name), f'{place}.{name}'


@pytest.mark.parametrize('agent', AGENTS)
def test_the_page_of_an_agent(agent: str) -> None:
  """Its flags are that agent's, and its scores are the recorded ones."""
  text = (ROOT / 'docs' / 'agents' / f'{agent}.md').read_text()
  known = train_help(TRAIN.options, Options(['--agent', agent], TRAIN, lenient=True), None)
  known = known.replace('[no-]', '')
  flags = {f.replace('.no-', '.') for f in re.findall(r'`(--agent\.[\w.-]+)', text)}
  assert {f for f in flags if f'{f} ' not in known} == set()
  recorded: dict[str, Any] = {}
  for name in ('acting', 'pong', 'scores'):
    recorded |= json.loads((ROOT / 'benchmarks' / 'results' / f'{name}.json').read_text())[
      'results'
    ]
  rows = re.findall(r'^\| `([\w-]+)`([^|]*)\| ([-\d.]+) \+- ([\d.]+)', text, re.MULTILINE)
  of_suite = assert_scores_of_the_suite(text)
  assert rows or of_suite or 'not scored' in text
  for preset, more, mean, std in rows:
    name = 'rainbow-minatar-asterix' if 'Asterix' in more else preset
    greedy = recorded[name]['greedy']
    assert_rounded(mean, greedy['episode_return_mean'])
    assert_rounded(std, greedy['episode_return_std'])


def test_the_table_of_presets_has_the_recorded_scores() -> None:
  records = list((ROOT / 'benchmarks/results/suites/presets').glob('*.json'))
  assert assert_scores_of_the_suite((ROOT / 'docs/presets.md').read_text()) == len(records) == 17


def assert_scores_of_the_suite(text: str) -> int:
  """Compares mean, lowest and highest of the five seeds in tables; returns the number of rows."""
  score = r'([-\d.]+) \(([-\d.]+) to ([-\d.]+)\)'
  rows = re.findall(rf'^\| `([\w-]+)`[^|]*\|(?: [-\d.]+ \|)? {score} \|', text, re.MULTILINE)
  for preset, mean, low, high in rows:
    path = ROOT / 'benchmarks/results/suites/presets' / f'{preset}.preset.0.json'
    scores = json.loads(path.read_text())['evaluated']
    for shown, number in (
      (mean, sum(scores) / len(scores)),
      (low, min(scores)),
      (high, max(scores)),
    ):
      assert_rounded(shown, number)
  return len(rows)


def assert_rounded(text: str, number: float) -> None:
  digits = len(text.partition('.')[2])
  assert abs(float(text) - number) <= 0.51 * 10**-digits, (text, number)


def heading_anchors(page: Path) -> set[str]:
  """What GitHub makes of the headings."""
  text = re.sub(r'^```.*?^```', '', page.read_text(), flags=re.DOTALL | re.MULTILINE)
  headings = re.findall(r'^#+ (.*)$', text, re.MULTILINE)
  return {re.sub(r'[^\w\- ]', '', heading.lower()).replace(' ', '-') for heading in headings}


def test_links() -> None:
  """Relative links between pages lead somewhere, to the heading."""
  broken = []
  for page in [*ALL, *(ROOT / 'benchmarks').glob('*.md')]:
    for target, anchor in re.findall(r'\]\(([^)#\s]*)(?:#([^)\s]*))?\)', page.read_text()):
      if '://' in target:
        continue
      file = page.parent / target if target else page
      if not file.exists():
        broken.append(f'{page.name}: {target}')
      elif anchor and anchor not in heading_anchors(file):
        broken.append(f'{page.name}: {target}#{anchor}')
  assert not broken


def test_every_page_is_in_the_index() -> None:
  index = (ROOT / 'docs' / 'README.md').read_text()
  pages = {p.relative_to(ROOT / 'docs').as_posix() for p in (ROOT / 'docs').rglob('*.md')}
  assert pages - {'README.md'} <= set(re.findall(r'\]\(([\w/-]+\.md)\)', index))


def test_the_picture_of_sebulba_is_that_of_its_example() -> None:
  example = (ROOT / 'examples' / 'sebulba.py').read_text()
  (picture,) = re.findall(r'^    pools of .*?parameters.*?$', example, re.DOTALL | re.MULTILINE)
  page = (ROOT / 'docs' / 'architectures.md').read_text()
  assert textwrap.dedent(picture) in page


def test_every_hook_of_an_agent_is_in_the_guide() -> None:
  hooks = re.findall(r'^- (?:`(\w+)|fields with `(\w+))', str(podrace.hooks.__doc__), re.MULTILINE)
  names = [a or b for a, b in hooks]
  assert len(names) >= 6
  guide = (ROOT / 'docs' / 'own.md').read_text()
  assert [n for n in names if n not in guide] == []
