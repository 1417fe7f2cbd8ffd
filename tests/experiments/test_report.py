"""The report: what it gathers, and the page in a real browser."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from children import until
from shorthand import Capture, slow_after

import podrace
from podrace import cli
from podrace.errors import UsageError
from podrace.experiments import report
from podrace.experiments.curves import read_runs
from podrace.experiments.plot import COLOURS
from podrace.experiments.report_groups import POINTS, collect_groups, index_runs
from podrace.experiments.runs import find
from podrace.run import metrics
from podrace.system.files import write_json

HOSTILE = '</script><img src=x onerror="window.hurt=1"><b>'


@pytest.fixture(scope='module')
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
  """Two runs, one of them under Sebulba with evaluations and a video; a broken one; and one with a hostile record."""
  folder = tmp_path_factory.mktemp('runs')
  config = podrace.configure('catch', total_steps=20_480, log_every=2_048, devices=1)
  podrace.train(config, folder / 'a', quiet=True)
  sebulba = dataclasses.replace(
    config, architecture='sebulba', eval_every=10_240, eval_episodes=4, eval_video=True
  )
  podrace.train(sebulba, folder / 'b', quiet=True)
  (folder / 'broken').mkdir()
  (folder / 'broken/config.json').write_text('{')
  shutil.copytree(folder / 'a', folder / HOSTILE.replace('/', '-'))
  theirs = folder / HOSTILE.replace('/', '-')
  record = json.loads((theirs / 'config.json').read_text())
  record['agent'][HOSTILE] = HOSTILE
  record['agent']['name'] = HOSTILE
  (theirs / 'config.json').write_text(json.dumps(record))
  return folder


@pytest.fixture(scope='module')
def browser(runs: Path) -> Iterator[Any]:
  """Chromium, for all pages. The runs are made before it: they need a loop of asyncio for themselves."""
  from playwright.sync_api import sync_playwright

  path = shutil.which('chromium')
  assert path, 'this test needs a browser: apt-get install chromium'
  with sync_playwright() as p:
    found = p.chromium.launch(executable_path=path, args=['--no-sandbox'])
    yield found
    found.close()


@contextlib.contextmanager
def opened(browser: Any, out: Path) -> Iterator[Any]:
  """A page in Chromium, with what it said, and what it asked of a network."""
  found = browser.new_page(viewport={'width': 1200, 'height': 900})
  found.said, found.asked = [], []
  found.on('console', lambda m: found.said.append(m.text))
  found.on('pageerror', lambda e: found.said.append(str(e)))
  found.on('request', lambda r: found.asked.append(r.url))
  found.goto(out.as_uri())
  yield found
  found.close()


@pytest.fixture(scope='module')
def page(runs: Path, browser: Any) -> Iterator[Any]:
  """The report in Chromium; nothing may be asked of a network."""
  out = runs.parent / 'report.html'
  report.write_report(sorted(p for p in runs.iterdir()), out)
  with opened(browser, out) as found:
    yield found


def groups_of(run: Path) -> list[dict[str, Any]]:
  return collect_groups(read_runs([run]).runs, {run: metrics.read(run / 'eval.jsonl')})


def test_each_environment_has_its_panels(runs: Path, browser: Any, tmp_path: Path) -> None:
  """Returns of two environments cannot be compared. A group has one colour in all panels."""
  envs = {'catch': 'podrace:catch', 'own': 'python:m.f,x=<b>'}
  for name, env in envs.items():
    shutil.copytree(runs / 'a', tmp_path / name)
    record = json.loads((tmp_path / name / 'config.json').read_text())
    (tmp_path / name / 'config.json').write_text(json.dumps({**record, 'env': env}))
  paths = [tmp_path / 'catch', runs / 'b', tmp_path / 'own']
  report.write_report(paths, tmp_path / 'r.html')
  with opened(browser, tmp_path / 'r.html') as page:
    assert page.said == []
    panels = page.locator('.panel')
    titles = page.locator('.panel h3').all_text_contents()
    assert titles[:5] == [
      'Return: podrace:catch', 'Return: python:m.f,x=<b>', 'Evaluations, greedy: podrace:catch',
      'Any metric: podrace:catch', 'Any metric: python:m.f,x=<b>',
    ]  # fmt: skip
    assert [panels.nth(i).locator('.line').count() for i in range(5)] == [2, 1, 1, 2, 1]
    legends = [panels.nth(i).locator('.legend .entry').all_text_contents() for i in range(3)]
    assert legends == [
      ['architecture anakin (n=1)', 'architecture sebulba (n=1)'], ['impala (n=1)'],
      ['architecture sebulba (n=1)'],
    ]  # fmt: skip
    colours = [panels.nth(1).locator('.line').get_attribute('stroke')]
    colours += [p.get_attribute('stroke') for p in panels.nth(0).locator('.line').all()]
    assert len(set(colours)) == 3
    page.get_by_label('metric', exact=True).select_option('loss')
    assert all('loss' in panels.nth(i).locator('svg').inner_html() for i in (3, 4))
    page.locator('.controls button').nth(2).click()
    assert panels.nth(1).locator('.readout').inner_text() == 'its runs are hidden'
    assert (
      panels.nth(1).locator('.line').count() == 0 and panels.nth(0).locator('.line').count() == 2
    )
    page.locator('.controls button').nth(2).click()
    assert panels.nth(1).locator('.readout').inner_text() == ''
    head = page.locator('#scores th[scope=col]').all_text_contents()
    assert head == ['line', 'seeds', 'return, last tenth', 'last evaluation']
    page.set_viewport_size({'width': 360, 'height': 700})
    assert page.evaluate('document.documentElement.scrollWidth <= innerWidth')


def write_run(path: Path, returns: list[float], seed: int, agent: str = 'ppo', **more: Any) -> Path:
  """A finished run with a return, an entropy and an evaluation at each 10 steps."""
  path.mkdir(parents=True)
  config = {
    'version': 1, 'agent': {'name': agent}, 'env': more.get('env', 'podrace:catch'),
    'architecture': 'anakin', 'total_steps': 10 * len(returns), 'seed': seed, 'seeds': 1,
  }  # fmt: skip
  write_json(path / 'config.json', config)
  write_json(path / 'summary.json', {
    'step': 10 * len(returns), 'episode_return': returns[-1], 'steps_per_s': 100.0,
    'params_sha256': more.get('sha256', f'{agent}{seed}'),
  })  # fmt: skip
  lines = [
    {'step': 10 * (i + 1), 'wall_s': i + 0.5 * seed, 'gradient_steps': 2, 'steps_per_s': 90.0}
    | {'episode_return': y, 'loss': -y, more.get('metric', 'entropy'): 0.5 * y}
    for i, y in enumerate(returns)
  ]
  (path / 'metrics.jsonl').write_text(''.join(json.dumps(x) + '\n' for x in lines))
  evaluation = {'step': 10 * len(returns), 'wall_s': 1.0, 'episode_return_mean': returns[-1] + 1}
  (path / 'eval.jsonl').write_text(json.dumps(evaluation) + '\n')
  return path


@pytest.mark.slow
def test_the_seeds_of_a_setting_are_one_line_with_an_interval(browser: Any, tmp_path: Path) -> None:
  for seed in range(3):
    write_run(tmp_path / f'ppo{seed}', [0.0, 1.0 + seed, 4.0 + 2 * seed], seed)
  write_run(tmp_path / 'again', [0.0, 1.0, 4.0], 0)  # seed 0 to the bit
  write_run(tmp_path / 'dqn', [0.0, 0.5, 1.0], 0, agent='dqn', metric='value')
  result = report.write_report(find(tmp_path), tmp_path / 'r.html')
  assert result['runs'] == 4 and 'counted once' in ' '.join(result['left_out'])
  with opened(browser, tmp_path / 'r.html') as page:
    first = page.locator('.panel').first
    legend = first.locator('.legend .entry').all_text_contents()
    assert sorted(legend) == ['dqn (n=1)', 'ppo (n=3)']
    assert first.locator('.line').count() == 2 and first.locator('.band').count() == 1
    first.locator('svg').focus()
    page.keyboard.press('End')
    assert 'ppo (n=3) 6 (4 to 8)' in first.locator('.readout').inner_text()
    rows = page.locator('#scores tbody tr')
    cells = {r.locator('th').inner_text(): r.locator('td').all_text_contents() for r in rows.all()}
    assert cells['ppo'] == ['3', '6 (4 to 8)', '7 (5 to 9)'] and cells['dqn'] == ['1', '1', '2']
    assert page.locator('#runs tbody tr').count() == 4
    head = page.locator('#configuration thead th').all_text_contents()
    assert sorted(head[1:]) == ['dqn (n=1)', 'ppo (n=3)']
    seeds = page.locator('#configuration tr').filter(has_text='seed').first
    assert '0, 1, 2' in seeds.inner_text()


def test_each_setting_of_a_sweep_in_one_program_is_a_group(tmp_path: Path) -> None:
  path = write_run(tmp_path / 'run', [0.0, 1.0], 0)
  config = json.loads((path / 'config.json').read_text())
  agent = {
    'name': 'podrace.agents.population:Varied', 'agent': {'class': 'podrace.agents.ppo:PPO'},
    'fields': ['clip'], 'values': [0.1, 0.2],
  }  # fmt: skip
  write_json(path / 'config.json', {**config, 'agent': agent, 'seeds': 2})
  lines = [
    line | {'episode_return_by_seed': [1.0, 2.0]} for line in metrics.read(path / 'metrics.jsonl')
  ]
  (path / 'metrics.jsonl').write_text(''.join(json.dumps(x) + '\n' for x in lines))
  evaluation = {'step': 20, 'episode_return_mean': 3.5, 'episode_return_mean_by_seed': [3.0, 4.0]}
  (path / 'eval.jsonl').write_text(json.dumps(evaluation) + '\n')
  groups = groups_of(path)
  assert [(g['name'], g['agent'], g['n']) for g in groups] == [
    ('clip 0.1', 'ppo', 1), ('clip 0.2', 'ppo', 1),
  ]  # fmt: skip
  assert [(g['final']['mean'], g['evaluated']['mean']) for g in groups] == [(1.0, 3.0), (2.0, 4.0)]
  assert 'loss' not in groups[0]['bands'] and 'steps_per_s' in groups[0]['bands']
  assert index_runs(groups, [{'path': str(path)}]) == [None]


def test_the_return_of_a_log_is_no_score(tmp_path: Path) -> None:
  path = write_run(tmp_path / 'run', [0.0, 1.0], 0, env='')
  config = json.loads((path / 'config.json').read_text())
  write_json(path / 'config.json', config | {'log': 'mixed'})
  (group,) = groups_of(path)
  assert (group['env'], group['log'], group['final'], group['n']) == ('log mixed', 'mixed', None, 1)
  assert group['evaluated']['mean'] == 2.0  # the agent's own


def titles(page: Any, start: str) -> list[str]:
  """The titles of visible panels that begin so."""
  shown = page.locator('.panel h3:visible').all_text_contents()
  return [title for title in shown if title.startswith(start)]


@pytest.mark.slow
def test_a_panel_without_values_is_left_out(browser: Any, tmp_path: Path) -> None:
  """Of two environments only one has the metric that is chosen."""
  write_run(tmp_path / 'ppo', [0.0, 1.0], 0)
  write_run(tmp_path / 'dqn', [0.0, 1.0], 0, agent='dqn', metric='value', env='podrace:maze')
  report.write_report(find(tmp_path), tmp_path / 'r.html')
  with opened(browser, tmp_path / 'r.html') as page:
    assert page.get_by_label('metric', exact=True).input_value() == 'loss'  # both have it
    assert titles(page, 'Any') == [
      'Any metric: podrace:maze', 'Any metric: podrace:catch'
    ]  # fmt: skip
    page.get_by_label('metric', exact=True).select_option('value')
    assert titles(page, 'Any') == ['Any metric: podrace:maze']
    assert 'Mean predicted value' in page.locator('.meaning').inner_text()
    assert titles(page, 'Lag') == titles(page, 'Actor threads') == []


@pytest.mark.parametrize(
  'agent, metric', slow_after(1, ('dqn', 'value'), ('ppo', 'entropy'), ('mine', 'loss'))
)
def test_the_metric_shown_first_is_the_agents(
  agent: str, metric: str, browser: Any, tmp_path: Path
) -> None:
  write_run(tmp_path / 'run', [0.0, 1.0], 0, agent=agent, metric=metric)
  report.write_report([tmp_path / 'run'], tmp_path / 'r.html')
  with opened(browser, tmp_path / 'r.html') as page:
    assert page.get_by_label('metric', exact=True).input_value() == metric


@pytest.mark.slow
def test_scores_of_atari(browser: Any, tmp_path: Path) -> None:
  run = write_run(tmp_path / 'pong', [14.6] * 20, 0, env='ale:pong')
  other = write_run(tmp_path / 'catch', [1.0], 0)
  (group,) = groups_of(run)
  assert group['anchors'] == 'random play -20.7, human 14.6'
  assert group['normalized'] == pytest.approx(1.0)
  report.write_report([other, run], tmp_path / 'r.html')
  with opened(browser, tmp_path / 'r.html') as page:
    cells = [r.locator('td').all_text_contents() for r in page.locator('#scores tbody tr').all()]
    assert cells[0][-2:] == ['none known', '–']
    assert cells[1][-2:] == ['random play -20.7, human 14.6', '1']


def test_actor_threads_have_a_legend_in_colours_of_their_own(page: Any) -> None:
  panel = page.locator('.panel').filter(has_text='Actor threads: ')
  assert panel.locator('.legend .entry').all_text_contents() == [
    'env', 'inference', 'transfer', 'waiting',
  ]  # fmt: skip
  assert panel.locator('.legend').is_visible()
  strokes = [p.get_attribute('stroke') for p in panel.locator('.line').all()]
  assert len({x.lower() for x in strokes} - {x.lower() for x in COLOURS}) == 4


def test_large_numbers_are_written_alike(page: Any, runs: Path) -> None:
  """As `podrace runs` has them: 50,364 and 492,915; not 50360 and 492,915."""
  rows = page.locator('#runs tbody tr')
  cells = rows.nth(2).locator('td.number').all_text_contents()
  summary = json.loads((runs / 'b/summary.json').read_text())
  assert f'{summary["steps_per_s"]:,.0f}' in cells and '20,480' in cells
  for half in (7742.5, 7743.5):
    assert page.evaluate(f'number({half})') == f'{half:,.0f}'
  for text in page.locator('td.number').all_text_contents():
    assert re.fullmatch(r'-?(\d{1,3}(,\d{3})*|\d{1,3}\.\d+|\d\.\d+e-\d+)|–', text), text


def test_the_page_has_its_charts_and_no_error(page: Any) -> None:
  assert page.said == []
  assert page.locator('section').count() == 7
  titles = page.locator('.panel h3').all_text_contents()
  assert titles[:3] == ['Return', 'Evaluations, greedy', 'Any metric'] and 'Speed' in titles
  assert len([t for t in titles if t.startswith('Actor threads')]) == 1
  assert page.locator('.panel').first.locator('.line').count() == 3
  d = page.locator('.panel').first.locator('.line').first.get_attribute('d')
  assert d.count('L') == 9 and 'NaN' not in d
  assert page.locator('video').count() == 2


def test_nothing_is_asked_of_a_network(page: Any) -> None:
  assert all(url.startswith(('file:', 'data:')) for url in page.asked)


def test_the_pointer_shows_values(page: Any, runs: Path) -> None:
  panel = page.locator('.panel').first
  box = panel.locator('svg').bounding_box()
  page.mouse.move(box['x'] + box['width'] - 16, box['y'] + 50)
  text = panel.locator('.readout').inner_text()
  last = json.loads((runs / 'a/metrics.jsonl').read_text().splitlines()[-1])
  assert 'environment steps 20,480' in text
  assert f'(n=1) {float(format(last["episode_return"], ".4g")):g}' in text
  page.mouse.move(5, 5)
  assert panel.locator('.readout').inner_text() == ''


def test_the_keyboard_shows_values(page: Any) -> None:
  panel = page.locator('.panel').first
  panel.locator('svg').focus()
  page.keyboard.press('Home')
  assert 'environment steps 2,048' in panel.locator('.readout').inner_text()
  page.keyboard.press('ArrowRight')
  assert 'environment steps 4,096' in panel.locator('.readout').inner_text()
  page.keyboard.press('End')
  assert 'environment steps 20,480' in panel.locator('.readout').inner_text()
  page.keyboard.press('Escape')
  assert panel.locator('.readout').inner_text() == ''


def test_other_axes_metrics_and_runs(page: Any) -> None:
  panel = page.locator('.panel').first
  page.get_by_label('horizontal axis').select_option('wall_s')
  assert 'wall time (s)' in panel.locator('svg').inner_html()
  page.get_by_label('horizontal axis').select_option('step')
  page.get_by_label('metric', exact=True).select_option('entropy')
  assert 'entropy' in page.locator('.panel').nth(2).locator('svg').inner_html()
  button = page.locator('.controls button').first
  button.click()
  assert panel.locator('.line').count() == 2 and button.get_attribute('aria-pressed') == 'false'
  button.click()
  assert panel.locator('.line').count() == 3


def test_hostile_names_are_text(page: Any) -> None:
  assert page.evaluate('window.hurt') is None
  assert page.locator('img').count() == 0
  assert HOSTILE in page.locator('#configuration').inner_text()
  assert 'broken: config.json is not JSON' in page.locator('#runs').inner_text()


def test_a_phone_and_the_dark(page: Any) -> None:
  page.set_viewport_size({'width': 360, 'height': 700})
  narrow = (
    'Array.from(document.querySelectorAll("svg")).every((s) => s.viewBox.baseVal.width < 340)'
  )
  until(lambda: page.evaluate(narrow))  # the page's policy forbids the eval of wait_for_function
  assert page.evaluate('document.documentElement.scrollWidth <= innerWidth')
  page.emulate_media(color_scheme='dark')
  dark = page.evaluate('getComputedStyle(document.body).backgroundColor')
  page.emulate_media(color_scheme='light')
  assert page.evaluate('getComputedStyle(document.body).backgroundColor') != dark
  page.set_viewport_size({'width': 1200, 'height': 900})


def test_what_differs_comes_first(page: Any) -> None:
  names = page.locator('#configuration tr.differs th').all_text_contents()
  assert 'architecture' in names and 'eval_every' in names and 'env' not in names
  assert page.locator('#configuration tbody tr').first.get_attribute('class') == 'differs'


def test_the_data_of_a_run(runs: Path) -> None:
  from podrace.experiments.runs import inspect_run

  found = report.collect_run(inspect_run(runs / 'b'))
  assert found['state'] == 'finished' and found['faults'] == {
    'env_restarts': 0,
    'dropped_steps': 0,
    'damaged': 0,
  }
  assert [v['kind'] for v in found['videos']] == ['mp4', 'mp4']
  (group,) = groups_of(runs / 'b')
  x, _, low, high = group['bands']['episode_return']['step']
  assert x == list(range(2_048, 20_481, 2_048)) and low == high == [None] * 10
  assert group['bands']['loss']['gradient_steps_total'][0][-1] == 20
  assert group['evaluations'][0] == [10_240, 20_480]


def test_large_videos_and_links_are_left_out(runs: Path, tmp_path: Path) -> None:
  from podrace.experiments.runs import inspect_run

  run = shutil.copytree(runs / 'a', tmp_path / 'run')
  folder = run / 'videos'
  shutil.rmtree(folder, ignore_errors=True)
  folder.mkdir()
  (folder / 'long.mp4').write_bytes(bytes(report.VIDEO_BYTES + 1))
  (folder / 'short.gif').write_bytes(b'GIF89a')
  (folder / 'link.mp4').symlink_to('/etc/hostname')
  found = report.collect_run(inspect_run(run))
  assert [v['name'] for v in found['videos']] == ['short']
  (left_out,) = found['videos_left_out']
  assert left_out.startswith('long.mp4: 8.0 MiB')
  folder.rename(tmp_path / 'other')
  folder.symlink_to(tmp_path / 'other')
  found = report.collect_run(inspect_run(run))
  assert found['videos'] == found['videos_left_out'] == []


def test_long_curves_are_thinned_and_keep_their_end(runs: Path, tmp_path: Path) -> None:
  run = shutil.copytree(runs / 'a', tmp_path / 'run')
  lines = [{'step': i, 'loss': float(i), 'gradient_steps': 2} for i in range(1, 2_502)]
  (run / 'metrics.jsonl').write_text(''.join(json.dumps(line) + '\n' for line in lines))
  (group,) = groups_of(run)
  by_axis = group['bands']['loss']
  assert by_axis.keys() == {'step', 'gradient_steps_total'}  # no line has wall_s
  assert len(by_axis['step'][0]) <= POINTS + 1 and by_axis['step'][0][-1] == 2_501
  assert by_axis['gradient_steps_total'][0][-1] == 5_002


def test_the_command(runs: Path, tmp_path: Path, capsys: Capture) -> None:
  out = tmp_path / 'r.html'
  with pytest.raises(SystemExit) as end:
    cli.main(['report', str(runs), '--out', str(out)])
  said = capsys.readouterr()
  assert end.value.code == 0 and json.loads(said.out.splitlines()[-1])['runs'] == 3
  assert 'left out' in said.err and 'broken' in said.err
  text = out.read_text()
  assert not re.search(r'https?://(?!www\.w3\.org/2000/svg)', text)
  assert text.count('</script>') == 2


@pytest.mark.parametrize(
  'args, message',
  [([], 'report needs runs'), (['none'], 'none'), (['.', '--out', 'x.pdf'], 'must end with .html')],
)
def test_what_the_command_refuses(
  args: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
  monkeypatch.chdir(tmp_path)
  with pytest.raises(SystemExit) as end:
    cli.main(['report', *args])
  assert end.value.code == 2 and message in capsys.readouterr().err


def test_nothing_to_report(tmp_path: Path) -> None:
  with pytest.raises(UsageError, match='no runs'):
    report.write_report([], tmp_path / 'r.html')


def test_it_imports_no_jax() -> None:
  code = 'import sys, podrace.experiments.report; print("jax" in sys.modules, "matplotlib" in sys.modules)'
  found = subprocess.run([sys.executable, '-c', code], capture_output=True, text=True, check=True)
  assert found.stdout.split() == ['False', 'False']
