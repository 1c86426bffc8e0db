"""The pack's version, for the status, reports and files that users send; `pyproject.toml` says the same."""

VERSION = "0.1.0"
