"""One short script per job: what `fournee <job>` and `ray job submit -- python jobs/<job>.py` run."""
