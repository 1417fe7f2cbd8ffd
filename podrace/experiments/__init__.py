"""Many runs: listing, curves, plots, reports, benchmarks and sweeps."""
