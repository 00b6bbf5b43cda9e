"""vLLM: the engine of every real run. Nothing outside this package imports it, and nothing in it before an engine is built."""
