"""Checks manifests by the engines' own schemas; run by tests/endurance/manifests.py with another Python.

Needs `pip install kubernetes-validate jsonschema skypilot`. Reads JSON: the path of JobSet's CRD, and documents by name
({"kind": "jobset", "secret" or "task", "document": ...}). Prints JSON: versions, and the errors of each document.
"""

from __future__ import annotations

import importlib.metadata
import json
import sys
from typing import Any

import jsonschema
import kubernetes_validate
import yaml


def strict(schema: Any) -> Any:
  """A CRD's schema in which an unknown field is an error, as with kubectl's --validate=strict."""
  if isinstance(schema, list):
    return [strict(x) for x in schema]
  if not isinstance(schema, dict):
    return schema
  found = {k: strict(v) for k, v in schema.items()}
  if schema.get('x-kubernetes-int-or-string'):
    found = {'type': ['integer', 'string'], **found}
  if isinstance(schema.get('properties'), dict) and schema.get('type') == 'object':
    found.setdefault(
      'additionalProperties', bool(schema.get('x-kubernetes-preserve-unknown-fields'))
    )
  return found


def jobset_schema(path: str) -> Any:
  with open(path) as file:
    crd = yaml.safe_load(file)
  (version,) = (x for x in crd['spec']['versions'] if x['name'] == 'v1alpha2')
  schema = strict(version['schema']['openAPIV3Schema'])
  schema['properties']['metadata'] = {'type': 'object'}
  return schema


def of_kubernetes(document: dict[str, Any]) -> list[str]:
  try:
    kubernetes_validate.validate(document, kubernetes_validate.latest_version(), strict=True)
  except kubernetes_validate.ValidationError as e:
    return [str(e).splitlines()[0]]
  return []


def of_jobset(document: dict[str, Any], schema: Any) -> list[str]:
  """By JobSet's schema; and each job by that of Kubernetes."""
  found = [e.message[:200] for e in jsonschema.Draft202012Validator(schema).iter_errors(document)]
  for job in document['spec']['replicatedJobs']:
    one = {'apiVersion': 'batch/v1', 'kind': 'Job', 'metadata': {'name': job['name']}}
    found += of_kubernetes(one | job['template'])
  return found


def of_task(document: dict[str, Any]) -> list[str]:
  """By SkyPilot's schemas and its own reading; but whether there is such an accelerator, it asks the network."""
  import sky
  from sky.utils import schemas

  resources = dict(document['resources'])
  validator = jsonschema.Draft202012Validator(schemas.get_resources_schema())
  found = [e.message[:200] for e in validator.iter_errors(resources)]
  resources.pop('accelerators', None)
  try:
    sky.Task.from_yaml_config(document | {'resources': resources}).validate()
  except Exception as e:  # of many kinds
    found.append(f'{type(e).__name__}: {e}'[:300])
  return found


def main() -> None:
  given = json.load(sys.stdin)
  schema = jobset_schema(given['crd'])
  kinds = {'jobset': lambda d: of_jobset(d, schema), 'secret': of_kubernetes, 'task': of_task}
  errors = {name: kinds[x['kind']](x['document']) for name, x in given['documents'].items()}
  names = ('kubernetes-validate', 'jsonschema', 'skypilot')
  versions = {name: importlib.metadata.version(name) for name in names}
  print(json.dumps(dict(versions=versions, errors=errors)))


if __name__ == '__main__':
  main()
