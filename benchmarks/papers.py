"""Results and pictures of examples/papers: each file measures its effect over seeds, and draws it.

    python benchmarks/papers.py cca --seeds 10
    python benchmarks/papers.py nas --first 10 --seeds 5    (more seeds, in addition to the recorded ones)

A file has `measure(seeds)`, a dict of numbers by method and seed, and `draw(results, figure)`. Writes
benchmarks/results/papers/NAME.json and docs/papers/NAME.svg.
"""

from __future__ import annotations

import importlib
import sys
import time

import common

NAMES = ('cca', 'himo', 'causal', 'avril', 'nas')
FOLDER = common.ROOT / 'examples' / 'papers'
PICTURES = common.ROOT / 'docs' / 'papers'


def main() -> None:
  args = common.arguments(
    __doc__, NAMES, first=(0, 'the first seed; other seeds that are recorded stay'),
    seeds=(10, 'number of seeds'), draw=(False, 'draw the recorded results'),
  )  # fmt: skip
  sys.path.insert(0, str(FOLDER))
  for name in args.cases:
    paper = importlib.import_module(name)
    if not args.draw:
      began = time.perf_counter()
      results = paper.measure(range(args.first, args.first + args.seeds))
      wall_s = round(time.perf_counter() - began)
      if args.first:
        known = common.known(f'papers/{name}')
        wall_s += known['wall_s']
        results = {m: known[m] | {str(s): x for s, x in results[m].items()} for m in results}
      common.record(f'papers/{name}', results | {'wall_s': wall_s})
    results = common.known(f'papers/{name}')
    picture(name, paper, {k: x for k, x in results.items() if k != 'wall_s'})


def picture(name: str, paper: object, results: dict[str, object]) -> None:
  """Draws results into docs/papers/NAME.svg."""
  import matplotlib
  from matplotlib.figure import Figure

  matplotlib.rcParams['svg.hashsalt'] = name
  figure = Figure(layout='constrained')
  paper.draw(results, figure)
  figure.savefig(PICTURES / f'{name}.svg', metadata={'Date': None})


if __name__ == '__main__':
  main()
