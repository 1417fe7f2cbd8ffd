"""Suites: published experiments as data, run again, recorded and written as pages."""
