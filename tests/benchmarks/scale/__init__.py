"""How the job behaves at scale, without a model: `python -m tests.benchmarks.scale <measurement> [options]`."""
