"""Supervision of processes: start, watch, restart, end."""
