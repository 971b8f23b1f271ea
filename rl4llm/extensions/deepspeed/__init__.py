"""Training on DeepSpeed, ZeRO 0 to 3, as `backend.name=deepspeed`. Only `backend.py` imports deepspeed."""
