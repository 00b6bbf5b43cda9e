"""Fournée: answer every row of a very large data set with a language model, exactly once, and say what it cost."""

from pipelines.telemetry import switch_off

switch_off()
