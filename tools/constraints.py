"""Writes constraints.txt from `pip freeze` of fresh environments, one for each range of Pythons.

    python tools/constraints.py 'python_version < "3.12"'=FREEZE 'python_version >= "3.12"'=FREEZE

Each FREEZE is the output of `pip freeze --exclude-editable` in an environment that has just had
`pip install -e '.[dev]'`. Pins on which all of them agree have no marker.
"""

from __future__ import annotations

import sys
from pathlib import Path


def pins(path: str) -> dict[str, str]:
  """Package -> version."""
  lines = [line.strip() for line in Path(path).read_text().splitlines()]
  return dict(line.split('==') for line in lines if '==' in line)


def main() -> None:
  """Prints nothing; writes the file."""
  ranges = [argument.rpartition('=')[::2] for argument in sys.argv[1:]]
  found = {marker: pins(path) for marker, path in ranges}
  names = sorted({name for versions in found.values() for name in versions}, key=str.lower)
  lines = ['# Exact versions, made by tools/constraints.py.']
  for name in names:
    versions = {marker: versions[name] for marker, versions in found.items() if name in versions}
    if len(versions) == len(found) and len(set(versions.values())) == 1:
      lines.append(f'{name}=={versions.popitem()[1]}')
    else:
      lines += [f'{name}=={version}; {marker}' for marker, version in versions.items()]
  Path('constraints.txt').write_text('\n'.join(lines) + '\n')


if __name__ == '__main__':
  main()
