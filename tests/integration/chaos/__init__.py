"""The fault harness: run the real job on a real cluster of several nodes, break it, resume it, and count the rows.

`case` draws a run and its faults from a seed, `job` runs the command as often as it takes, `faults` break it, `check` counts
what came out, `play` puts them together; `cluster` is the Ray cluster they run on. `python -m tests.integration.chaos` plays
as many runs as it takes for so many faults.
"""
