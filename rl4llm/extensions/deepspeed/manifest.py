"""The backend of DeepSpeed."""

PROVIDES = {"rl4llm.backends": {"deepspeed": "rl4llm.extensions.deepspeed.backend:DeepSpeedBackend"}}
