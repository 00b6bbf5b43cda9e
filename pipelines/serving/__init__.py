"""The endpoint, apart from Ray: keys, quotas, requests and errors in OpenAI's shape, usage, files and batches."""
