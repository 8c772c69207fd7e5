"""Serving: the OpenAI-compatible HTTP face of one engine replica, and the worker that holds both."""
