"""Machines that start processes: Ray, SLURM, Kubernetes and SkyPilot."""
