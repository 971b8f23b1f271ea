"""Full control: a custom loop over all episodes at once. Append messages; the sampled tokens stay exact.

    python examples/custom_loop.py [--model DIRECTORY] [--steps 30]

Every sample answers, then sees its neighbour's answer, then answers again: something that no single episode could do.
"""

import torch
from shared import arguments, print_progress, prompts

from rl4llm import BaseMDPEnv, ChatMessage, EnvState, GRPOTrainer


class SeesItsNeighbour(BaseMDPEnv):
    """Plays two rounds; between them each sample sees the answer of its neighbour."""

    @torch.inference_mode()
    def _run_interaction_loop(self, env_state: EnvState, llm, sampling_params, **kwargs) -> EnvState:
        samples = env_state.sample_states
        self.say(samples, llm, sampling_params)
        answers = [sample.messages[-1].content for sample in samples]
        for sample, other in zip(samples, answers[1:] + answers[:1], strict=True):
            sample.messages.append(ChatMessage("user", f"Your neighbour says: {other}"))
        self.say(samples, llm, sampling_params)
        for sample in samples:
            sample.done = True
        return env_state

    def say(self, samples, llm, sampling_params) -> None:
        """Sample one turn of the policy for every sample, as one batch."""
        outputs = llm.generate([sample.messages for sample in samples], sampling_params)
        for sample, output in zip(samples, outputs, strict=True):
            sample.messages.append(ChatMessage("assistant", output.text))
            sample.current_step += 1


def brevity(completions: list[str], **columns) -> list[float]:
    """Reward short final answers; a reward may also be a plain function over the batch."""
    return [1.0 / (1.0 + len(completion)) for completion in completions]


if __name__ == "__main__":
    options = arguments(__doc__)
    trainer = GRPOTrainer(
        model=options.model,
        dataset=prompts(),
        reward_functions=[brevity],
        env=SeesItsNeighbour,
        max_steps=options.steps,
        rollout={"prompts": 4, "group_size": 16, "max_tokens": 8},
        training={"lr": 3e-3},
        output={"dir": options.output},
        **{"env.max_steps": 2},
    )
    trainer.train()
    print_progress(options.output)
