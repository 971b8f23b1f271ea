"""Clients of one server: SGLang and vLLM over HTTP."""
