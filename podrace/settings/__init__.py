"""The settings of a run: dataclasses, their checks, records, presets and defaults."""
