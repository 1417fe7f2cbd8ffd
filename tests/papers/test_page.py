"""docs/papers.md has the numbers of benchmarks/results/papers."""

import json
import pathlib
from collections.abc import Iterator
from typing import Any

import cca
import numpy as np
import pytest
from scipy import stats

ROOT = pathlib.Path(__file__).parents[2]
PAGE = (ROOT / 'docs' / 'papers.md').read_text()
FINAL = -1


def results(name: str) -> Any:
  return json.loads((ROOT / 'benchmarks/results/papers' / f'{name}.json').read_text())['results']


def interval(values: Any, digits: int) -> str:
  """The mean of a value by seed, and half of its 95% interval, as the page has them."""
  values = np.asarray(values, float)
  assert len(values) >= 10
  half = stats.t.ppf(0.975, len(values) - 1) * values.std(ddof=1) / len(values) ** 0.5
  return f'{round(values.mean(), digits) + 0.0:.{digits}f} +- {half:.{digits}f}'


def nas_rows() -> Iterator[str]:
  runs = {name: [*x.values()] for name, x in results('nas').items() if name != 'wall_s'}
  for name, of in runs.items():
    last, best = (interval([x[key] for x in of], 3) for key in ('last', 'best'))
    if name == 'random search':
      yield f'{name} | {last} | {best} | 0 | |'
    else:
      cached = interval([x['cached'] for x in of], 0)
      busy = interval([100 * x['busy'] for x in of], 0)
      yield f'{name} | {last} | {best} | {cached} | {busy}% |'


def avril_rows() -> Iterator[str]:
  for task, methods in results('avril')['returns'].items():
    for name, title in {'AVRIL': 'AVRIL', 'bc': '`bc`'}.items():
      cells = ' | '.join(interval(returns, 1) for returns in methods[name].values())
      yield f'{task} | {np.mean(methods["expert"]):.0f} | {title} | {cells} |'


def himo_rows() -> Iterator[str]:
  regression, agent, _ = (x for name, x in results('himo').items() if name != 'wall_s')
  names = {'v+': 'v+', 'v_m': 'v_m', 'v': 'v, without hindsight', 'model-based': "by a model of x'"}
  for name, title in names.items():
    curves = agent.get(name)
    end = f' {interval([x[FINAL] for x in curves], 2)}' if curves else ''
    yield f'{title} | {interval([x[FINAL] for x in regression[name]], 3)} |{end} |'


def causal_rows() -> Iterator[str]:
  titles = {'non-causal': ('actions only', 'enter and hug'), 'causal': ('with z', 'stay')}
  for name, (sees, plan) in titles.items():
    belief = interval([x['belief: best plan'] for x in results('causal')[name]], 3)
    (value,) = {round(x['true value'], 3) for x in results('causal')[name]}
    yield f'{name}, {sees} | {belief}: {plan} | {value} in each seed |'


def cca_rows() -> Iterator[str]:
  recorded = results('cca')
  table = cca.table(recorded)
  for name in cca.LEARNERS:
    (variance, dv), (share, ds) = table.get(name, ((0, 0), (0, 0)))
    of_gradient = f'{variance:.3f} +- {dv:.3f} | {round(share, 2) + 0.0:.2f} +- {ds:.2f}'
    of_gradient = of_gradient.replace('1.000 +- 0.000', '1') if name in table else '|'
    ends = [recorded[task].get(name) for task in cca.TASKS]
    cells = [f' {interval(x[FINAL], n)}' if x else '' for x, n in zip(ends, (3, 2), strict=True)]
    yield f'{name} | {of_gradient} |{cells[0]} |{cells[1]} |'
  other = results('cca-settings')['key-to-door'].items()
  ends = {name: interval(lines[FINAL], 2) for name, lines in other}
  yield f'an entropy cost of 0.03, CCA ends at {ends.pop("CCA, weight 3")}'
  yield f'a weight of 10, CCA ends at {ends.pop("CCA, weight 10")}'
  advantage, reinforce = ends.values()  # with CCA's schedule
  yield f'the advantage ends at {advantage} and REINFORCE at {reinforce}'


@pytest.mark.parametrize('rows', [nas_rows, avril_rows, himo_rows, causal_rows, cca_rows])
def test_the_page_has_the_recorded_numbers(rows: Any) -> None:
  expected = [*rows()]
  assert len(expected) > 1
  assert not [row for row in expected if row not in PAGE]
