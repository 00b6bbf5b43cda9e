"""Our batch job beside raw vLLM, Ray Data's LLM processor and `vllm run-batch`: same rows, same engine options, in turn.

`python -m tests.benchmarks.throughput --help`. Each arm is a process of its own, which writes what it measured into a file.
"""
