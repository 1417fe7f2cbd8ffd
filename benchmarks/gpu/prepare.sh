#!/bin/sh
# Prepares the measurements on a GPU machine that has JAX but no network. Run it in the root of the project's checkout:
#
#     sh benchmarks/gpu/prepare.sh
#
# Afterwards .whl has the packages that the machine lacks. Git ignores it, so it must be carried by name.
set -eu
test -f podrace/cli.py || { echo 'run this in the root of the project' >&2; exit 1; }
exclude=$(git rev-parse --git-path info/exclude)
mkdir -p "$(dirname "$exclude")" .whl
for name in /.whl/ /benchmarks/gpu/commit; do
  grep -qx "$name" "$exclude" 2>/dev/null || echo "$name" >> "$exclude"
done
changed=$(git status --porcelain -- podrace 'benchmarks/*.py')
echo "$(git rev-parse HEAD)${changed:+ dirty}" > benchmarks/gpu/commit

# What podrace and these measurements need beyond the machine's packages, and what these packages need themselves.
# six, seaborn and matplotlib (gymnax), cloudpickle (gymnasium), chex (mctx) are there.
names='tyro docstring_parser typeguard gymnasium Farama-Notifications gymnax mctx ale-py zstandard'
python=${PYTHON:-python3}
for name in $names ${MORE:-}; do
  pin=$(sed -n "s/^\($name==[^; ]*\).*python_version >= \"3.12\".*/\1/p; s/^\($name==[^; ]*\)\$/\1/p" constraints.txt | head -n 1)
  stem=$(echo "${pin:-$name}" | sed 's/==/-/' | tr 'A-Z-' 'a-z_' | sed 's/_\([0-9][^_]*\)$/-\1/')
  if ls .whl | tr 'A-Z' 'a-z' | grep -q "^$stem-"; then continue; fi
  rm -f .whl/"$(echo "$name" | tr - _)"-*.whl
  "$python" -m pip download --quiet --disable-pip-version-check --no-deps --only-binary=:all: \
    --python-version 3.12 --implementation cp \
    --platform manylinux_2_28_x86_64 --platform manylinux_2_27_x86_64 --platform manylinux_2_17_x86_64 \
    --platform manylinux2014_x86_64 --platform manylinux1_x86_64 -d .whl "${pin:-$name}"
done
twice=$(ls .whl | sed 's/-.*//' | sort | uniq -d)
test -z "$twice" || { echo "two versions in .whl of: $twice" >&2; exit 1; }

tree=$(git ls-files -z --cached --others --exclude-standard | xargs -0 du -ck 2>/dev/null | awk '$2 == "total" {s += $1} END {print s}')
wheels=$(du -sk .whl | cut -f 1)
total=$(((tree + wheels) / 1024))
ls -l .whl
echo "tree $tree KiB, wheels $wheels KiB: $total MiB of at most 64; commit $(cat benchmarks/gpu/commit)"
test "$total" -lt 60 || { echo 'too much to carry: 60 MiB is the most' >&2; exit 1; }
