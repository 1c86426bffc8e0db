"""The worker pool: processes, messages, deadlines."""
