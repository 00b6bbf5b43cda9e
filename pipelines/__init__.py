"""Fournee: answer every row of a very large data set with a language model, exactly once, and say what it cost."""
