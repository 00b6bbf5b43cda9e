"""The configuration reference, docs/configuration.md."""
