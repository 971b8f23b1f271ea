"""TRL's side of `step.py`: its GRPOTrainer as its documentation shows it, stopped between steps by a callback.

Runs in a separate environment (torch, trl, datasets); started by `step.py`, not by hand.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import datasets
import torch
import transformers
import trl
from peer import Channel, Memory, reward
from transformers import TrainerCallback
from trl import GRPOConfig, GRPOTrainer


class Turnstile(TrainerCallback):
    """Lets one optimizer step through for each line from the driver; a step is all that happens from line to answer."""

    def __init__(self, channel: Channel):
        self._channel = channel
        self._memory: Memory | None = None
        self._started = self._generated = self._cpu = 0.0
        self._tokens = 0

    def score(self, completions: list[str], completion_ids: list[list[int]], **columns: Any) -> list[float]:
        """The reward function; what came before it in the step is generation, what follows is the update."""
        self._generated = time.perf_counter()
        self._tokens += sum(map(len, completion_ids))
        return [reward(text) for text in completions]

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        # weights of a mapped file become resident
        sum(weight.sum().item() for weight in kwargs["model"].parameters())
        self._memory = Memory()
        versions = {
            "trl": trl.__version__,
            "transformers": transformers.__version__,
            "torch": torch.__version__,
        }
        self._channel.send(ready=True, versions=versions)
        self._wait(control)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        now = time.perf_counter()
        seconds = {
            "step": now - self._started,
            "generation": self._generated - self._started,
            "update": now - self._generated,
            "cpu": time.process_time() - self._cpu,
        }
        self._channel.send(seconds=seconds, tokens=self._tokens, **self._memory.report())
        self._wait(control)

    def _wait(self, control: Any) -> None:
        control.should_training_stop = not self._channel.wait()
        self._tokens = 0
        self._started, self._cpu = time.perf_counter(), time.process_time()


def config(job: dict[str, Any]) -> GRPOConfig:
    """Its fastest settings on a CPU: no gradient checkpointing, dynamic cache, no second forward for old log-probs."""
    samples = job["prompts"] * job["group_size"]
    return GRPOConfig(
        output_dir=job["output"],
        use_cpu=True,
        bf16=False,  # autocast; a model in bfloat16 needs none
        model_init_kwargs={"dtype": job["dtype"]},
        per_device_train_batch_size=job["micro_batch"],
        gradient_accumulation_steps=samples // job["micro_batch"],  # one optimizer step per generation
        gradient_checkpointing=False,
        num_generations=job["group_size"],
        max_completion_length=job["new_tokens"],
        shuffle_dataset=False,
        temperature=1.0,
        beta=0.0,
        loss_type="grpo",
        learning_rate=job["lr"],
        lr_scheduler_type="constant",
        weight_decay=0.0,
        max_grad_norm=1.0,
        max_steps=1_000_000,
        save_strategy="no",
        logging_strategy="no",
        report_to="none",
        disable_tqdm=True,
        dataloader_pin_memory=False,
    )


def main() -> None:
    channel = Channel()
    job = json.loads(sys.argv[1])
    torch.set_num_threads(job["threads"])
    transformers.utils.logging.set_verbosity_error()
    turnstile = Turnstile(channel)
    rows = [json.loads(line) for line in Path(job["data"]).read_text().splitlines()]
    trainer = GRPOTrainer(
        model=job["model"],
        reward_funcs=turnstile.score,
        args=config(job),
        train_dataset=datasets.Dataset.from_list([{"prompt": row["messages"][0]["content"]} for row in rows]),
        callbacks=[turnstile],
    )
    trainer.train()


if __name__ == "__main__":
    main()
