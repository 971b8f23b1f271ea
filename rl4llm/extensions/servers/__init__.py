"""Inference servers: start them, speak with SGLang and vLLM, use many as one engine, and send weights to them."""
