"""The documentation site: it builds, has every page, and needs no network."""

from __future__ import annotations

import dataclasses
import importlib.util
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import sync_playwright

from podrace.agents import AGENTS, metrics
from podrace.commands.option_table import CHOSEN_BY_AGENTS
from podrace.fields import flag
from podrace.hooks import BOUND
from podrace.settings.agents import default_agent
from podrace.settings.defaults import TABLE
from podrace.settings.presets import PRESETS

ROOT = Path(__file__).parents[1]


def script(path: str) -> Any:
  """A module that is no part of the package."""
  spec = importlib.util.spec_from_file_location(Path(path).stem, ROOT / path)
  assert spec and spec.loader
  module = importlib.util.module_from_spec(spec)
  sys.modules[spec.name] = module  # dataclasses look it up
  spec.loader.exec_module(module)
  return module


@pytest.fixture(scope='module')
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
  """The site, built as `make docs` builds it."""
  out = tmp_path_factory.mktemp('site')
  command = [sys.executable, '-m', 'mkdocs', 'build', '--strict', '--quiet', '--site-dir', str(out)]
  env = os.environ | {'NO_MKDOCS_2_WARNING': '1'}
  done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True)
  assert done.returncode == 0, done.stdout + done.stderr
  return out


def test_every_page_is_in_the_navigation(site: Path) -> None:
  pages = {p.relative_to(ROOT / 'docs').as_posix() for p in (ROOT / 'docs').rglob('*.md')}
  nav = (ROOT / 'mkdocs.yml').read_text().partition('\nnav:\n')[2]
  named = set(re.findall(r': ([\w/-]+\.md)$', nav, re.MULTILINE))
  assert pages <= named
  for page in named:
    html = page.removesuffix('.md') + '.html'
    assert (site / html.replace('README.html', 'index.html')).exists(), page


def test_nothing_is_loaded_from_a_network(site: Path) -> None:
  for page in site.rglob('*.html'):
    text = page.read_text()
    loaded = re.findall(r'<(?:script|img|iframe)[^>]* src="?([^"\s>]+)', text)
    loaded += re.findall(
      r'<link[^>]*rel="?(?:stylesheet|icon|preconnect)[^>]*href="?([^"\s>]+)', text
    )
    assert loaded and not [u for u in loaded if '//' in u], page
    assert 'class="mermaid"' not in text, page  # its script would come from a network


def test_the_reference_has_docstrings_and_fields(site: Path) -> None:
  agents = (site / 'api' / 'agents.html').read_text()
  assert 'id="podrace.agents.impala.Impala"' in agents
  assert 'largest importance weight in the value targets' in agents  # a comment behind a field
  assert 'mix of n-step targets' in agents  # and one below it
  assert 'needs an n-step of 2 or more' in agents  # in two lines
  assert 'total_updates' not in agents  # which the runner fills in
  returns = (site / 'api' / 'returns.html').read_text()
  assert 'generalised advantages' in returns


def test_links_out_of_docs_lead_somewhere_on_the_site(site: Path) -> None:
  pages = script('tools/site_pages.py')
  rewritten = pages.rewritten
  assert rewritten('[x](../benchmarks/notes.md#a)', 'own.md') == '[x](benchmarks/notes.md#a)'
  assert rewritten('[x](../../README.md)', 'agents/ppo.md') == '[x](../README.md)'
  assert rewritten('[x](own.md#a-b)', 'runs.md') == '[x](own.md#a-b)'
  assert rewritten('![x](../docs/pong.png)', 'benchmarks/notes.md') == '![x](../pong.png)'
  assert rewritten('[x](#here) [y](https://a.org/b)', 'a.md') == '[x](#here) [y](https://a.org/b)'
  assert (site / 'benchmarks' / 'results' / 'scores.json').exists()
  assert (site / 'examples' / 'minimal_client.py').exists()


def test_the_paths_through_the_code_name_files_of_the_package() -> None:
  text = (ROOT / 'docs' / 'design.md').read_text().partition('## Two paths')[2]
  files = re.findall(r'^[^\w`]*([\w/]+\.py) ', text.partition('\n## ')[0], re.MULTILINE)
  assert len(files) == 22
  assert [f for f in files if not (ROOT / 'podrace' / f).is_file()] == []


@pytest.mark.parametrize('agent', AGENTS)
def test_the_page_of_an_agent_has_all_its_settings(site: Path, agent: str) -> None:
  assert f'\n<!-- settings: {agent} -->\n' in (ROOT / 'docs' / 'agents' / f'{agent}.md').read_text()
  page = (site / 'agents' / f'{agent}.html').read_text()
  shown = re.findall(r'<td><code>(--[\w.[\]-]+)</code></td>', page)
  shown = [name.replace('[no-]', '') for name in shown]
  options = set(options_of(default_agent(agent), '--agent.')) - {f'--agent.{b}' for b in BOUND}
  assert {o for o in shown if o.startswith('--agent.')} == options
  assert {'--num-envs', '--unroll-length'} <= set(shown)


def options_of(settings: Any, prefix: str) -> Iterator[str]:
  """Yields the options of a dataclass and its parts, without fields that agents set themselves."""
  for field in dataclasses.fields(settings):
    value = getattr(settings, field.name)
    if 'Suppress' in str(field.type):
      continue
    if field.name in CHOSEN_BY_AGENTS.get(type(settings).__name__, ()):
      continue
    if dataclasses.is_dataclass(value):
      yield from options_of(value, f'{prefix}{flag(field.name)}.')
    else:
      yield prefix + flag(field.name)


def test_a_default_that_depends_on_the_environment_is_shown_by_kind() -> None:
  tables = script('tools/settings_tables.py')
  line = next(x for x in tables.expand('dqn').splitlines() if '`--agent.target-period`' in x)
  values = {
    k: e.agent.get('target_period', default_agent('dqn').target_period)
    for (a, k), e in TABLE.items()
    if a == 'dqn'
  }
  assert f'| {values["vector"]} (pixels {values["pixels"]}) |' in line
  assert tables.expand('--lag --max-lag').count('\n') == 3
  assert tables.expand('ppo --agent.tuning.fields --agent.clip').count('\n') == 3
  for unknown in ('ppo2', '--lagg', '--agent.learning-rate', 'dqn --agent.clip'):
    with pytest.raises(ValueError, match=unknown.split()[-1]):
      tables.expand(unknown)


def test_the_page_of_an_agent_has_its_metrics(site: Path) -> None:
  for agent in AGENTS:
    page = (site / 'agents' / f'{agent}.html').read_text()
    listed = set(re.findall(r'<td><code>(\w+)</code></td>', page))
    assert {row.name for row in metrics.rows_of(agent)} <= listed, agent


@pytest.mark.slow
def test_the_cheat_sheet_is_one_page_of_a4(site: Path, tmp_path: Path) -> None:
  path = shutil.which('chromium')
  assert path, 'this test needs a browser: apt-get install chromium'
  out = tmp_path / 'sheet.pdf'
  with sync_playwright() as p:
    browser = p.chromium.launch(executable_path=path, args=['--no-sandbox'])
    page = browser.new_page()
    page.goto((site / 'cheatsheet.html').as_uri())
    page.pdf(path=out, prefer_css_page_size=True)
    browser.close()
  pages = re.findall(rb'/Type\s*/Page\b', out.read_bytes())
  assert len(pages) == 1 and re.search(rb'/MediaBox\s*\[0 0 59\d\.\d+ 84\d', out.read_bytes())


def test_the_presets_have_a_table_of_all_settings(site: Path) -> None:
  tables = script('tools/settings_tables.py').presets_table().splitlines()
  assert len(tables) == 2 + len(PRESETS)
  (line,) = (x for x in tables if x.startswith('| `cartpole` |'))
  assert '| ppo | `gymnax:CartPole-v1` | 600,000 | 64 | 32 |' in line
  assert '`--agent.normalize-rewards`' in line and '`--agent.learning-rate 0.001`' in line
  page = (site / 'presets.html').read_text()
  assert all(f'<td><code>{name}</code></td>' in page for name in PRESETS)


@pytest.mark.slow
def test_pictures_are_those_of_the_scripts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
  pictures = script('tools/pictures.py')
  monkeypatch.setattr(pictures, 'FOLDER', tmp_path / 'pictures')
  pictures.main()
  monkeypatch.syspath_prepend(str(ROOT / 'benchmarks'))
  scores = script('benchmarks/scores.py')
  (tmp_path / 'agents').mkdir()
  scores.draw_agents(tmp_path / 'agents')
  for folder in ('pictures', 'agents'):
    drawn = {p.name for p in (tmp_path / folder).glob('*.svg')}
    assert drawn == {p.name for p in (ROOT / 'docs' / folder).glob('*.svg')}
  text = ''.join(p.read_text() for p in (ROOT / 'docs').rglob('*.md'))
  for picture in (ROOT / 'docs').rglob('*.svg'):
    assert f'{picture.name})' in text, f'{picture.name} is on no page'


@pytest.fixture
def browser() -> Iterator[Any]:
  from playwright.sync_api import sync_playwright

  path = shutil.which('chromium')
  assert path, 'this test needs a browser: apt-get install chromium'
  with sync_playwright() as p:
    found = p.chromium.launch(executable_path=path, args=['--no-sandbox'])
    yield found
    found.close()


def test_in_a_browser_from_a_file(site: Path, browser: Any) -> None:
  """Pages open without a server: search finds things, and nothing is wider than a narrow window."""
  page = browser.new_page(viewport={'width': 400, 'height': 800})
  said, asked = [], []
  page.on('console', lambda m: said.append(m.text))
  page.on('pageerror', lambda e: said.append(str(e)))
  page.on('request', lambda r: asked.append(r.url))
  for name in ('start', 'agents/ppo', 'architectures', 'tips', 'migration', 'api/agents'):
    page.goto(f'file://{site}/{name}.html')
    assert page.evaluate('document.documentElement.scrollWidth') <= 400, name
    broken = 'Array.from(document.images).filter(i => !i.complete || !i.naturalWidth).length'
    assert page.evaluate(broken) == 0, name
  page.set_viewport_size({'width': 1300, 'height': 900})
  page.goto(f'file://{site}/index.html')
  page.click('input.md-search__input')
  page.keyboard.type('epsilon ladder')
  page.wait_for_selector('.md-search-result__item a[href*="glossary"]', state='attached')
  assert said == []
  assert [u for u in asked if not u.startswith(('file:', 'data:', 'blob:'))] == []
